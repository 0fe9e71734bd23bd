"""Draws follow the density, and a key is all the randomness there is."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import SamplingParams
from oarlock.samplers.categorical import Categorical, _pick
from oarlock.samplers.greedy import Greedy

DRAWS = 20_000


def position_keys(seed, count):
    """A row's keys, one position after the other, as the core makes them."""
    words = np.random.default_rng(seed).integers(0, 2**32, 2, dtype=np.uint32)
    keys = np.repeat(words[None], count, axis=0)
    keys[:, 1] ^= np.arange(count, dtype=np.uint32)
    return mx.array(keys)


CASES = {
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.6, top_p=0.9),
    "top_k": SamplingParams(temperature=2.0, top_k=12),
    "min_p": SamplingParams(temperature=1.2, min_p=0.07),
    "all": SamplingParams(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
}


def draws(params, line, seed=0):
    logits = mx.broadcast_to(mx.array(line), (DRAWS, line.size))
    return np.array(Categorical().open([params] * DRAWS).sample(logits, position_keys(seed, DRAWS)))


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_20000_draws_at_different_positions_follow_the_exact_density(make, params):
    """Chi-square over the tokens that are expected at least five times, and total variation over all."""
    line = (np.random.default_rng(1).normal(size=97) * 2).astype(np.float32)
    expected = make.density(line, params) * DRAWS
    counts = np.bincount(draws(params, line), minlength=97)
    assert (counts[expected == 0] == 0).all()
    often = expected >= 5
    freedom = max(1, int(often.sum()) - 1)
    chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert chi < freedom + 4 * np.sqrt(2 * freedom)  # mean and deviation of chi-square; four of them
    assert np.abs(counts - expected).sum() / (2 * DRAWS) < 0.5 * np.sqrt(97 / DRAWS)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_twin_a_wrong_temperature_is_noticed(make, params):
    line = (np.random.default_rng(1).normal(size=97) * 2).astype(np.float32)
    wrong = SamplingParams(temperature=params.temperature * 1.15, top_k=params.top_k, top_p=params.top_p)
    expected = make.density(line, params) * DRAWS
    counts = np.bincount(draws(wrong, line), minlength=97)
    often = expected >= 5
    freedom = max(1, int(often.sum()) - 1)
    assert ((counts - expected)[often] ** 2 / expected[often]).sum() > freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [97, 49152])
def test_density_is_the_exact_one(make, params, size):
    lines = (np.random.default_rng(2).normal(size=(4, size)) * 3).astype(np.float32)
    density = np.exp(np.array(Categorical().open([params] * 4).density(mx.array(lines))).astype(np.float64))
    for line, got in zip(lines, density, strict=True):
        assert np.abs(got - make.density(line, params)).sum() < 2e-5


def test_keys_decide_everything():
    line = (np.random.default_rng(3).normal(size=1000) * 2).astype(np.float32)
    first, again, other = (draws(SamplingParams(temperature=1.0), line, seed) for seed in (5, 5, 6))
    assert (first == again).all()
    assert (first != other).mean() > 0.9


def test_draws_of_one_row_at_successive_positions_do_not_repeat_each_other():
    line = np.zeros(1000, dtype=np.float32)
    tokens = draws(SamplingParams(temperature=1.0), line).astype(np.float64)
    lags = [np.corrcoef(tokens[:-lag], tokens[lag:])[0, 1] for lag in (1, 2, 3, 64)]
    assert np.abs(lags).max() < 4 / np.sqrt(DRAWS)


def test_a_draw_is_never_a_token_of_weight_zero():
    """At both ends of the range of the uniform number and with weight in few places."""
    weights = np.zeros((DRAWS, 50), dtype=np.uint32)
    weights[:, [7, 20, 33]] = [1, 2**31 - 2, 1]
    tokens = np.array(_pick(mx.array(weights), position_keys(9, DRAWS)))
    assert set(tokens.tolist()) <= {7, 20, 33}


def test_flat_scores_over_a_large_vocabulary_are_drawn_evenly():
    size, count = 262_144, 64
    rows, logits = Categorical().open([SamplingParams(temperature=1.0)] * count), mx.zeros((count, size))
    tokens = [np.array(rows.sample(logits, position_keys(seed, count))) for seed in range(6)]
    drawn = np.sort(np.concatenate(tokens)) / size
    places = np.arange(drawn.size) / drawn.size
    assert np.abs(drawn - places).max() < 1.95 / np.sqrt(drawn.size)  # Kolmogorov-Smirnov at 0.1%


@pytest.mark.parametrize("name", ["sample", "density"])
def test_nothing_waits_for_the_device(name):
    """Tracing refuses whatever has to be read to go on; the trace is not evaluated."""
    params = [*CASES.values(), SamplingParams()]
    for sampler in (Categorical(), Greedy()):
        rows = sampler.open(params)
        logits, keys = mx.zeros((6, 5000)), mx.zeros((6, 2), dtype=mx.uint32)

        def draw(logits, keys, rows=rows):
            return rows.sample(logits, keys) if name == "sample" else rows.draw(rows.density(logits), keys)

        assert mx.compile(draw)(logits, keys).shape == (6,)
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda logits: mx.array(logits.max().item()))(logits)
