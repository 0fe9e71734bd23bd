"""Draws behind the tokens of a window are those that the same rows would make one by one: keys, rows, blame, log-probabilities."""

import math

import mlx.core as mx
import pytest

from oarlock.core.request import Request, SamplingParams
from oarlock.core.row import Row
from oarlock.core.sampling import SamplerGroup
from oarlock.samplers.categorical import Categorical
from oarlock.samplers.greedy import Greedy

V, SAMPLERS = 60, (Greedy(), Categorical())
PARAMS = (
    SamplingParams(temperature=1.0, seed=1, logprobs=2),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.5, top_k=9, min_p=0.01, seed=1, logprobs=0),
)


def row(params, sampled=0):
    made = Row(
        request=Request(prompt_ids=[1], sampling=params), id="r", prompt_ids=(1,), max_tokens=99, stop_ids=frozenset(),
        seed=params.seed or 0, key=None,
    )  # fmt: skip
    made.sampled = sampled
    return made


def group(params, samplers=SAMPLERS, vectorised=True):
    rows = [row(each, 3 * place) for place, each in enumerate(params)]
    opened = SamplerGroup(samplers, vectorised)
    opened.set_rows(rows)
    return opened, rows


def scores(rows, width, seed=0):
    return 3 * mx.random.normal((rows, width, V), key=mx.random.key(seed))


def ids(rows, width):
    return mx.zeros((rows, width), dtype=mx.uint32)


@pytest.mark.parametrize("widths", [[3, 3, 3, 3], [1, 4, 2, 3], [1, 1, 1, 5], [2, 1, 1, 1]])
@pytest.mark.parametrize("params", [PARAMS, PARAMS[1:2] * 4], ids=["mixed", "greedy"])
@pytest.mark.parametrize("vectorised", [True, False])
def test_a_window_is_so_many_plain_draws(params, widths, vectorised):
    """Tokens and log-probabilities, each row from its own position on."""
    opened, rows = group(params, vectorised=vectorised)
    logits = scores(4, max(widths))
    lines = iter(opened.verify(logits, ids(4, max(widths)), widths).read())
    found = [[next(lines) for _ in range(width)] for width in widths]
    assert next(lines, None) is None
    for place in range(max(widths)):
        alone = opened.draw(logits[:, place], [True] * 4).read()
        for each, drawn, width in zip(found, alone, widths, strict=True):
            if place < width:
                assert each[place].token == drawn.token
                assert each[place].finite
                assert (each[place].logprob is None) == (drawn.logprob is None)
                if drawn.logprob is not None:
                    assert each[place].logprob.logprob == pytest.approx(drawn.logprob.logprob, abs=1e-6)
                    assert [token for token, _ in each[place].logprob.top] == [t for t, _ in drawn.logprob.top]
        for each in rows:
            each.sampled += 1


def test_the_places_of_a_row_are_drawn_with_keys_of_their_own():
    """The same scores everywhere: one row's draws differ from place to place, and equal seeds draw alike."""
    opened, rows = group([SamplingParams(temperature=1.0, seed=9)] * 2)
    rows[1].sampled = 0
    logits = mx.broadcast_to(scores(1, 1), (2, 12, V))
    drawn = [line.token for line in opened.verify(logits, ids(2, 12), [12, 12]).read()]
    assert drawn[:12] == drawn[12:]
    assert len(set(drawn)) > 4


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_line_that_is_no_distribution_is_marked_alone(bad):
    opened, _ = group(PARAMS)
    logits = scores(4, 3)
    logits[2, 1] = bad
    lines = opened.verify(logits, ids(4, 3), [3] * 4).read()
    assert [place for place, line in enumerate(lines) if not line.finite] == [2 * 3 + 1]


class Angry(Categorical):
    """Raises for rows with a min_p, whoever stands beside them."""

    name = "angry"

    def open(self, params):
        if any(each.min_p for each in params):
            raise LookupError("no min_p here")
        return super().open(params)


def test_a_sampler_that_raises_costs_the_lines_of_its_row():
    """The others get what they would have got."""
    wanted = [line.token for line in group(PARAMS)[0].verify(scores(4, 2), ids(4, 2), [2, 1, 2, 2]).read()]
    lines = group(PARAMS, (Greedy(), Angry()))[0].verify(scores(4, 2), ids(4, 2), [2, 1, 2, 2]).read()
    assert [str(line.error) for line in lines[5:]] == ["no min_p here"] * 2
    assert not any(line.real for line in lines[5:])
    assert [line.token for line in lines[:5]] == wanted[:5]
    assert all(line.error is None and line.real for line in lines[:5])
