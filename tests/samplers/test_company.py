"""A row's outcome depends on its own scores, parameters and key only, bit for bit, whatever rows stand beside it.

Each check is a function of a sampler, so that its twin can hand it a sampler with a planted fault.
"""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import SamplingParams
from oarlock.samplers import truncate
from oarlock.samplers.categorical import Categorical, CategoricalRows
from oarlock.samplers.greedy import Greedy

DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def same_bits(a, b):
    return (np.array(a).view(np.int32) == np.array(b).view(np.int32)).all()


def check_company(sampler, make, seed, size, dtype):
    """Random rows together, in another order, and alone: equal densities and tokens."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 17))
    params = [make.params(rng) for _ in range(count)]
    logits, keys = make.logits(rng, count, size, dtype, float(rng.choice([0.1, 3.0]))), make.keys(rng, count)
    together = sampler.open(params)
    density, tokens = together.density(logits), together.sample(logits, keys)
    assert density.dtype == mx.float32
    assert tokens.dtype == mx.uint32
    assert together.draw(density, keys).tolist() == tokens.tolist()
    order = rng.permutation(count).tolist()
    shuffled = sampler.open([params[i] for i in order])
    at = mx.array(order)
    assert same_bits(shuffled.density(logits[at]), density[at])
    assert shuffled.sample(logits[at], keys[at]).tolist() == tokens[at].tolist()
    for i in range(count):
        alone, line = sampler.open([params[i]]), slice(i, i + 1)
        assert same_bits(alone.density(logits[line]), density[line]), params[i]
        assert alone.sample(logits[line], keys[line]).item() == tokens[i].item(), params[i]


def check_many_companies(sampler, make, count, size, dtype):
    for seed in range(count):
        check_company(sampler, make, seed, size, dtype)


def check_forced_rows(sampler, make):
    """FAULTS M-02: rows that join one by one; those with a forced outcome equal greedy, the seeded one itself alone."""
    rng = np.random.default_rng(2)
    params = [
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.5, top_p=1e-9),
    ]
    for count in range(1, 6):
        logits, keys = make.logits(rng, count, 500), make.keys(rng, count)
        tokens = sampler.open(params[:count]).sample(logits, keys).tolist()
        forced = mx.argmax(logits, axis=-1).tolist()
        if count > 2:
            forced[2] = sampler.open([params[2]]).sample(logits[2:3], keys[2:3]).item()
        assert tokens == forced


def check_permuted_vocabularies(sampler, make):
    """FAULTS M-04: what top_p keeps of a row moves with the row's own vocabulary."""
    rng = np.random.default_rng(4)
    line = make.logits(rng, 1, 800)
    params = [SamplingParams(temperature=1.0, top_p=p) for p in (1e-9, 0.1, 0.9, 1.0)]
    orders = [rng.permutation(800) for _ in params]
    stacked = mx.concatenate([line[:, mx.array(order)] for order in orders])
    density = np.array(sampler.open(params).density(stacked))
    for i, order in enumerate(orders):
        expected = np.array(sampler.open([params[i]]).density(line))[0]
        assert (density[i] == expected[order]).all()


def check_a_candidate_remains(sampler, make):
    """FAULTS M-10: every set of filters leaves at least one finite candidate, and probabilities that sum to 1."""
    rng = np.random.default_rng(10)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.0, 0.01, 1.0, 30.0)
        for k in (0, 1, 2)
        for p in (1.0, 0.5, 1e-6)
        for m in (0.0, 0.9, 1.0)
    ]
    logits = np.array(make.logits(rng, len(params), 300))
    logits[:, 1 + rng.permutation(299)[:150]] = -np.inf
    logits[::2, 1:] = -np.inf
    density = np.array(sampler.open(params).density(mx.array(logits)))
    assert not np.isnan(density).any()
    assert (np.isfinite(density).sum(axis=-1) >= 1).all()
    assert np.isneginf(density[np.isneginf(logits)]).all()
    assert np.abs(np.exp(density.astype(np.float64)).sum(axis=-1) - 1).max() < 1e-5


def check_banned_tokens(sampler, make):
    """FAULTS M-12, the sampler's part: a score of minus infinity is never drawn, at any temperature."""
    rng = np.random.default_rng(12)
    params = [SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.5, 5.0, 1e30) for k in (0, 50)]
    logits = np.array(make.logits(rng, len(params), 400))
    banned = np.zeros_like(logits, dtype=bool)
    for line in range(len(params)):
        banned[line, np.argsort(-logits[line])[: 399 if line % 2 else 370]] = True
    scores = mx.array(np.where(banned, -np.inf, logits).astype(np.float32))
    rows = sampler.open(params)
    for _ in range(20):
        tokens = rows.sample(scores, make.keys(rng, len(params))).tolist()
        assert not any(banned[line, token] for line, token in enumerate(tokens))


CHECKS = [check_forced_rows, check_permuted_vocabularies, check_a_candidate_remains, check_banned_tokens]


class Planted(Categorical):
    """A categorical sampler with a fault."""

    def __init__(self, rows_class):
        self.rows_class = rows_class

    def open(self, params):
        return self.rows_class(params)


class FirstRowsParameters(CategoricalRows):
    """One row's parameters for all."""

    def __init__(self, params):
        super().__init__([params[0]] * len(params))


class NeighboursOrder(CategoricalRows):
    """What the first row keeps, every row keeps."""

    def density(self, logits, rows=None):
        mask = mx.isfinite(super().density(logits, rows))
        scores = mx.where(mask[:1], logits, -mx.inf)
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


class BoundOfAllRows(CategoricalRows):
    """A maximum over the whole batch instead of each row's (FAULTS M-09)."""

    def density(self, logits, rows=None):
        scores = mx.where(logits >= logits.max() - 3, logits, -mx.inf)
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


class PlaceInTheBatch(CategoricalRows):
    """A draw that depends on where the row stands."""

    def sample(self, logits, keys, rows=None):
        return super().sample(logits, keys + mx.arange(keys.shape[0], dtype=mx.uint32)[:, None], rows)


class FloatSumOfTheBatch(CategoricalRows):
    """A normaliser whose last bits depend on the company."""

    def density(self, logits, rows=None):
        return super().density(logits, rows) + 1e-7 * mx.tanh(logits.astype(mx.float32).sum())


class NotRenormalised(CategoricalRows):
    """min_p taken as a bound on probability itself, so that it may mask every token."""

    def density(self, logits, rows=None):
        density = super().density(logits, rows)
        return mx.where(mx.exp(density) > 0.95, density, -mx.inf)


class NoNegativeInfinity(CategoricalRows):
    """Banned tokens get merely a low score."""

    def sample(self, logits, keys, rows=None):
        return super().sample(mx.maximum(logits, -5.0), keys, rows)


@pytest.mark.fault("M-02", "M-04", "M-09")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "compositions"), [(97, 40), (1000, 20), (49152, 3)])
def test_a_row_among_others_is_the_row_alone(make, size, compositions, dtype):
    check_many_companies(Categorical(), make, compositions, size, dtype)


@pytest.mark.fault("M-02", "M-04", "M-09", twin=True)
@pytest.mark.parametrize(
    "fault", [FirstRowsParameters, NeighboursOrder, BoundOfAllRows, PlaceInTheBatch, FloatSumOfTheBatch]
)
def test_twin_company_is_noticed(make, fault):
    with pytest.raises(AssertionError):
        check_many_companies(Planted(fault), make, 5, 97, mx.float32)


@pytest.mark.fault("M-02", "M-04", "M-10", "M-12")
@pytest.mark.parametrize("check", CHECKS)
def test_fault_is_absent(make, check):
    check(Categorical(), make)


@pytest.mark.fault("M-02", "M-04", "M-10", "M-12", twin=True)
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (check_forced_rows, FirstRowsParameters),
        (check_forced_rows, PlaceInTheBatch),
        (check_permuted_vocabularies, NeighboursOrder),
        (check_a_candidate_remains, NotRenormalised),
        (check_banned_tokens, NoNegativeInfinity),
    ],
)
def test_twin_fault_is_noticed(make, check, fault):
    with pytest.raises(AssertionError):
        check(Planted(fault), make)


def test_filters_nobody_asks_for_are_skipped_without_a_trace(make):
    """A row beside neighbours that need every filter, and beside none that does."""
    rng = np.random.default_rng(1)
    plain = SamplingParams(temperature=0.9)
    busy = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.1)
    logits, keys = make.logits(rng, 2, 3000), make.keys(rng, 2)
    for neighbour in (plain, busy, SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)):
        rows = Categorical().open([plain, neighbour])
        assert same_bits(rows.density(logits)[:1], Categorical().open([plain]).density(logits[:1]))
        assert rows.sample(logits, keys)[0].item() == Categorical().open([plain]).sample(logits[:1], keys[:1]).item()


@pytest.mark.parametrize("seed", range(6))
def test_rows_says_whose_parameters_each_line_of_a_window_has(make, seed):
    rng = np.random.default_rng(seed)
    params = [make.params(rng) for _ in range(5)]
    owners = rng.integers(0, 5, 12).tolist()
    logits, keys = make.logits(rng, 12, 1000), make.keys(rng, 12)
    at = mx.array(owners, dtype=mx.int32)
    window, flat = Categorical().open(params), Categorical().open([params[i] for i in owners])
    assert same_bits(window.density(logits, at), flat.density(logits))
    tokens = flat.sample(logits, keys).tolist()
    assert window.sample(logits, keys, at).tolist() == tokens
    assert window.draw(window.density(logits, at), keys).tolist() == tokens


@pytest.mark.parametrize("seed", range(6))
def test_keep_reorders_and_drops_rows(make, seed):
    rng = np.random.default_rng(seed)
    params = [make.params(rng) for _ in range(7)]
    indices = rng.permutation(7)[: int(rng.integers(1, 8))].tolist()
    kept = Categorical().open(params)
    kept.keep(indices)
    fresh = Categorical().open([params[i] for i in indices])
    logits, keys = make.logits(rng, len(indices), 1000), make.keys(rng, len(indices))
    assert same_bits(kept.density(logits), fresh.density(logits))
    assert kept.sample(logits, keys).tolist() == fresh.sample(logits, keys).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [97, 2000])
def test_broken_scores_neither_crash_nor_leave_the_vocabulary_nor_touch_neighbours(make, size, dtype):
    """The core rejects such rows by its own check, after this call."""
    rng = np.random.default_rng(size)
    good = np.array(make.logits(rng, 1, size))
    bad = np.repeat(good, 7, axis=0)
    bad[1, 5] = np.nan
    bad[2] = np.nan
    bad[3] = -np.inf
    bad[4, 3] = np.inf
    bad[5] = np.inf
    bad[6, ::2] = np.nan
    logits = mx.array(bad).astype(dtype)
    keys = mx.repeat(make.keys(rng, 1), 7, axis=0)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.2),
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=1e-300, top_k=10**9),
        SamplingParams(temperature=1e300, min_p=1e-300),
    ):
        for sampler in (Categorical(), Greedy()):
            rows = sampler.open([params] * 7)
            tokens = rows.sample(logits, keys).tolist()
            assert all(0 <= token < size for token in tokens)
            assert all(0 <= token < size for token in rows.draw(rows.density(logits), keys).tolist())
            assert tokens[0] == sampler.open([params]).sample(logits[:1], keys[:1]).item()


@pytest.mark.parametrize("top_k", [50, 3 * truncate.BLOCK])
def test_candidates_suffice_where_top_k_and_top_p_meet(make, top_k):
    """top_p among top_k's candidates alone, and beside a row that has no top_k: the same bits."""
    both = SamplingParams(temperature=1.3, top_k=top_k, top_p=0.8)
    logits = make.logits(np.random.default_rng(8), 2, 5000, spread=1.0)
    alone = Categorical().open([both]).density(logits[:1])
    beside = Categorical().open([both, SamplingParams(temperature=1.0, top_p=0.99)]).density(logits)
    assert same_bits(alone, beside[:1])
    assert top_k / 4 < mx.isfinite(alone).sum().item() < top_k
