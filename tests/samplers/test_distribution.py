"""Over 20,000 seeds, draws on SmolLM2's scores follow the filtered softmax, and no draw tells anything about another.

Scores are the 256 best at the end of a few texts (`smollm2_scores.json`), in the order of their ids. Draws are made as
the engine makes them, by a sampler group: seeds 0 to 19,999, and each row's first positions.
"""

import functools
import json
from pathlib import Path
from statistics import NormalDist

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.config import EngineConfig
from oarlock.core.manager import build
from oarlock.core.models import load_model
from oarlock.core.request import Request, SamplingParams
from oarlock.core.row import Row
from oarlock.core.sampling import SamplerGroup
from oarlock.samplers.categorical import Categorical, CategoricalRows
from oarlock.samplers.greedy import Greedy

SEEDS, POSITIONS = 20_000, 4
DRAWS = SEEDS * POSITIONS
FALSE_ALARM = 1e-3
"""How often a right sampler would fail a test, had its seeds not been fixed."""
SHIFT = 0.02
SOURCE = Path(__file__).with_name("smollm2_scores.json")
SCORES = {
    text: np.array(kept["scores"], dtype=np.float32)
    for text, kept in json.loads(SOURCE.read_text(encoding="utf-8")).items()
}
CASES = {
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=1.5, top_k=12),
    "min_p": SamplingParams(temperature=1.2, min_p=0.07),
    "all": SamplingParams(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
}
cases, texts = pytest.mark.parametrize("case", CASES), pytest.mark.parametrize("text", SCORES)
OPEN = "Once upon a time there was a"
"""The text with the most ways to go on."""


@functools.cache
def rows_of(case):
    """A row for each seed, at its first position."""
    made = []
    for seed in range(SEEDS):
        asked = Request(prompt_ids=[1], sampling=attrs.evolve(CASES[case], seed=seed))
        made.append(Row(request=asked, id="r", prompt_ids=(1,), max_tokens=9, stop_ids=frozenset(), seed=seed, key=None))  # fmt: skip
    return made


def group(rows, positions, sampler=None):
    """The sampler group of rows, as the engine opens it, each at a position of its own."""
    for row, position in zip(rows, np.broadcast_to(positions, len(rows)), strict=True):
        row.sampled = int(position)
    opened = SamplerGroup((Greedy(), sampler or Categorical()), vectorised=True)
    opened.set_rows(rows)
    return opened


def draws(case, text, sampler=None):
    """Tokens by seed and position, drawn step by step."""
    rows, line = rows_of(case), SCORES[text]
    logits = mx.broadcast_to(mx.array(line), (SEEDS, line.size))
    opened, tokens = group(rows, 0, sampler), []
    for _ in range(POSITIONS):
        tokens.append(np.array(opened.draw(logits, [True] * SEEDS).tokens))
        for row in rows:
            row.sampled += 1
    return np.stack(tokens, axis=1)  # (S, P)


@functools.cache
def drawn(case, text):
    """Those of the real sampler."""
    return draws(case, text)


def quantile(freedom, alarm=FALSE_ALARM):
    """What chi-square exceeds with probability ``alarm`` (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + NormalDist().inv_cdf(1 - alarm) * part**0.5) ** 3


def power(freedom, distance):
    """How likely the test alarms where expectations are off by ``distance`` in chi-square (Patnaik)."""
    scale = (freedom + 2 * distance) / (freedom + distance)
    freedom_of = (freedom + distance) / scale
    part = 2 / (9 * freedom_of)
    root = (quantile(freedom) / (scale * freedom_of)) ** (1 / 3)
    return 1 - NormalDist().cdf((root - 1 + part) / part**0.5)


def cells(density, count):
    """The cell of each token: one of its own where it is expected fifty times, else one for all the others."""
    often = density * count >= 50
    return np.where(often, np.cumsum(often) - 1, often.sum())


def pooled(values, cell):
    return np.bincount(cell, weights=values)


def chi_square(counts, density):
    """The statistic over the cells, and its degrees of freedom."""
    cell = cells(density, counts.sum())
    expected, seen = pooled(density * counts.sum(), cell), pooled(counts, cell)
    some = expected > 0
    return ((seen - expected)[some] ** 2 / expected[some]).sum(), some.sum() - 1


def shifted(density, token):
    """The density where 2% of all draws go to ``token`` that were the others'."""
    moved = density * (1 - SHIFT / (1 - density[token]))
    moved[token] = density[token] + SHIFT
    return moved


def hardest(density, count):
    """The token whose shift of 2% is the hardest to see, and the power against it."""
    cell = cells(density, count)
    expected = pooled(density * count, cell)
    some = expected > 0
    found = []
    for token in np.flatnonzero(density):
        off = pooled(shifted(density, token) * count, cell) - expected
        found.append((power(some.sum() - 1, (off[some] ** 2 / expected[some]).sum()), int(token)))
    return min(found)[::-1]


def check_density(tokens, density):
    """Tokens that are filtered out are never drawn, the others as often as they should."""
    counts = np.bincount(tokens.ravel(), minlength=density.size)
    assert (counts[density == 0] == 0).all()
    found, freedom = chi_square(counts, density)
    assert found < quantile(freedom)


def test_quantiles_are_those_of_the_tables():
    for freedom, wanted in ((10, 29.588), (30, 59.703), (100, 149.449)):
        assert quantile(freedom) == pytest.approx(wanted, rel=6e-3)
    assert quantile(10, 0.05) == pytest.approx(18.307, rel=1e-3)
    assert quantile(100, 0.01) == pytest.approx(135.807, rel=1e-3)


@cases
@texts
def test_the_power_is_what_it_is_taken_to_be(make, case, text):
    """Of 2,000 samples with the shift that is hardest to see, so many are rejected; of right ones, hardly any."""
    density, random = make.density(SCORES[text], CASES[case]), np.random.default_rng(0)
    token, wanted = hardest(density, DRAWS)
    assert wanted >= 0.95
    for share, low, high in ((shifted(density, token), 0.95, 1.0), (density, 0.0, 0.004)):
        found = [chi_square(counts, density) for counts in random.multinomial(DRAWS, share, 2_000)]
        assert low <= np.mean([statistic > quantile(freedom) for statistic, freedom in found]) <= high


@cases
@texts
def test_tokens_follow_the_filtered_softmax(make, case, text):
    check_density(drawn(case, text), make.density(SCORES[text], CASES[case]))


class Shifted(Categorical):
    """Draws one token more often, by 2% of all draws."""

    def __init__(self, density, token):
        with np.errstate(divide="ignore"):
            self._moved = mx.array(np.log(shifted(density, token)).astype(np.float32))

    def open(self, params):
        rows = CategoricalRows([SamplingParams(temperature=1.0) for _ in params])
        sample, moved = rows.sample, self._moved
        rows.sample = lambda logits, keys, _=None: sample(mx.broadcast_to(moved, logits.shape), keys)
        return rows


@cases
@texts
def test_twin_a_token_that_is_drawn_2_percent_too_often_is_noticed(make, case, text):
    density = make.density(SCORES[text], CASES[case])
    token, _ = hardest(density, DRAWS)
    tokens = draws(case, text, Shifted(density, token))
    check_density(tokens, shifted(density, token))  # that is what it draws
    with pytest.raises(AssertionError):
        check_density(tokens, density)


@cases
def test_the_draws_of_a_window_are_the_very_same(case):
    """Whatever its rows' widths are, wherever they stand, and whatever stands in it."""
    count, line, random = 2_000, SCORES[OPEN], np.random.default_rng(3)
    starts = random.integers(0, POSITIONS, count)
    widths = [int(random.integers(1, POSITIONS - start + 1)) for start in starts]
    ids = mx.array(random.integers(0, line.size, (count, POSITIONS), dtype=np.uint32))
    scores = mx.broadcast_to(mx.array(line), (count, POSITIONS, line.size))
    tokens = np.array(group(rows_of(case)[:count], starts).verify(scores, ids, widths).tokens)
    plain = zip(drawn(case, OPEN)[:count], starts, widths, strict=True)
    assert tokens.tolist() == [token for row, start, width in plain for token in row[start : start + width]]


class Ranks:
    """Tokens as numbers of mean 0 and deviation 1, in the order in which one uniform number chooses among them."""

    def __init__(self, density):
        self._below = np.cumsum(density) - density / 2  # (V,)
        mean = (density * self._below).sum()
        self._scores = (self._below - mean) / np.sqrt((density * (self._below - mean) ** 2).sum())
        self._parts = np.minimum((4 * self._below).astype(int), 3)
        self._shares = np.bincount(self._parts, weights=density, minlength=4)

    def check(self, pairs):
        """Raise AssertionError where the two of any kind of pair [N, 2] know of each other.

        By correlation, and by chi-square of which quarters they fall into together. Pairs share no token.
        """
        alarm = FALSE_ALARM / (2 * len(pairs))
        expected = np.outer(self._shares, self._shares)
        for kind, each in pairs.items():
            first, second = each.T
            correlation = (self._scores[first] * self._scores[second]).mean()
            assert abs(correlation) < NormalDist().inv_cdf(1 - alarm / 2) / np.sqrt(len(each)), kind
            seen = np.bincount(4 * self._parts[first] + self._parts[second], minlength=16).reshape(4, 4)
            statistic = ((seen - expected * len(each)) ** 2 / (expected * len(each))).sum()
            assert statistic < quantile(15, alarm), kind


def apart(tokens, lag, axis):
    """Pairs at a distance along an axis, of which no two share a token."""
    size = tokens.shape[axis]
    first = [place for place in range(size - lag) if place // lag % 2 == 0]
    return np.stack([tokens.take(first, axis).ravel(), tokens.take(np.add(first, lag), axis).ravel()], axis=1)


def check_company(tokens, density):
    """Rows of neighbouring seeds, beside each other or further apart, at the same position and at the next."""
    pairs = {f"rows {lag} apart": apart(tokens, lag, 0) for lag in (1, 2, 3, 8, 64, 1000)}
    pairs |= {f"positions {lag} apart": apart(tokens, lag, 1) for lag in (1, 2, 3)}
    even, odd = tokens[::2], tokens[1::2]
    pairs["the next row's next position"] = np.stack([even[:, ::2].ravel(), odd[:, 1::2].ravel()], axis=1)
    pairs["the next row's last position"] = np.stack([even[:, 1::2].ravel(), odd[:, ::2].ravel()], axis=1)
    Ranks(density).check(pairs)


@cases
def test_rows_positions_and_neighbours_know_nothing_of_each_other(make, case):
    check_company(drawn(case, OPEN), make.density(SCORES[OPEN], CASES[case]))


@cases
def test_the_positions_of_a_long_row_know_nothing_of_each_other(make, case):
    """Their keys differ in one word, by less and less of their numbers."""
    rows, line = rows_of(case)[: 4 * 4096], SCORES[OPEN]
    for place, row in enumerate(rows):
        row.seed = place // 4096
    try:
        opened = group(rows, np.tile(np.arange(4096), 4))
    finally:
        for place, row in enumerate(rows):
            row.seed = place
    logits = mx.broadcast_to(mx.array(line), (len(rows), line.size))
    tokens = np.array(opened.draw(logits, [True] * len(rows)).tokens).reshape(4, 4096)
    pairs = {f"positions {lag} apart": apart(tokens, lag, 1) for lag in (1, 2, 3, 5, 64, 1024)}
    Ranks(make.density(line, CASES[case])).check(pairs)


class Whispering(Categorical):
    """Lets one row in twenty draw by the number of the row before it."""

    def open(self, params):
        rows = CategoricalRows(params)
        sample = rows.sample

        def whispered(logits, keys, lines=None):
            copies = (mx.arange(len(keys)) % 20 == 1)[:, None]
            return sample(logits, mx.where(copies, mx.roll(keys, 1, axis=0), keys), lines)

        rows.sample = whispered
        return rows


@pytest.mark.parametrize("case", ["temperature", "all"])
def test_twin_rows_that_draw_by_a_neighbours_number_are_noticed(make, case):
    tokens, density = draws(case, OPEN, Whispering()), make.density(SCORES[OPEN], CASES[case])
    check_density(tokens, density)  # each row by itself is right
    with pytest.raises(AssertionError, match="rows 1 apart"):
        check_company(tokens, density)


@pytest.mark.parametrize("case", ["temperature", "all"])
def test_twin_positions_that_share_a_number_are_noticed(make, case, monkeypatch):
    """One row in twenty draws twice by each number."""
    keys = SamplerGroup._keys

    def lazy(self, places, lines):
        late = [(row, ahead - (row % 20 == 0) * (self._rows[row].sampled + ahead) % 2) for row, ahead in places]
        return keys(self, late, lines)

    monkeypatch.setattr(SamplerGroup, "_keys", lazy)
    with pytest.raises(AssertionError, match="positions 1 apart"):
        check_company(draws(case, OPEN), make.density(SCORES[OPEN], CASES[case]))


def test_rows_in_another_order_draw_the_same():
    order = np.random.default_rng(4).permutation(SEEDS)
    rows, line = [rows_of("all")[place] for place in order], SCORES[OPEN]
    tokens = group(rows, 0).draw(mx.broadcast_to(mx.array(line), (SEEDS, line.size)), [True] * SEEDS).tokens
    assert (np.array(tokens) == drawn("all", OPEN)[order, 0]).all()


@pytest.mark.weights
def test_the_scores_are_the_models():
    """As they were written down, to the last digit but one."""
    config = EngineConfig.load({"model": {"dtype": "float32"}})
    smollm2 = load_model("smollm2", config, build(config))
    for text, each in json.loads(SOURCE.read_text(encoding="utf-8")).items():
        line = np.array(smollm2.model(mx.array([smollm2.tokenizer.encode(text)]))[0, -1])
        assert np.allclose(line[each["ids"]], each["scores"], atol=2e-3)
        assert each["ids"] == sorted(np.argsort(-line, kind="stable")[: len(each["ids"])])
