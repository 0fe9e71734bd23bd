"""Greedy is argmax over dtype-rounded normalised scores, lowest id first, for one row as for many (SPEC 9.2)."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import SamplingParams
from oarlock.samplers.categorical import Categorical
from oarlock.samplers.greedy import Greedy

DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def serial(logits):
    """What mlx-lm's serial generation does with one row of scores."""
    return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [97, 1000, 49152])
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_equals_the_serial_choice_of_each_row_bit_for_bit(make, dtype, size, spread):
    logits = make.logits(np.random.default_rng(size), 8, size, dtype, spread)
    tokens = Greedy().open([SamplingParams()] * 8).sample(logits, make.keys(np.random.default_rng(1), 8))
    assert tokens.dtype == mx.uint32
    assert tokens.tolist() == [serial(logits[i]) for i in range(8)]
    assert tokens.tolist() == [
        Greedy().open([SamplingParams()]).sample(logits[i : i + 1], mx.zeros((1, 2), dtype=mx.uint32)).item()
        for i in range(8)
    ]


def rounding_tie():
    """Scores whose best stands at id 9, and which rounding after normalising ties with id 4: bfloat16 near -9."""
    line = np.zeros(5000, dtype=np.float32)
    line[4], line[9] = 2.984375, 3.0
    return mx.array(line)[None].astype(mx.bfloat16)


def test_the_lowest_id_wins_ties_that_rounding_makes():
    logits = rounding_tie()
    assert mx.argmax(logits, axis=-1).item() == 9
    assert serial(logits[0]) == 4
    assert Greedy().open([SamplingParams()]).sample(logits, mx.zeros((1, 2), dtype=mx.uint32)).item() == 4


def test_density_is_a_point_and_draw_finds_it(make):
    logits = mx.concatenate([rounding_tie(), make.logits(np.random.default_rng(0), 3, 5000, mx.bfloat16)])
    rows = Greedy().open([SamplingParams()] * 4)
    keys = mx.zeros((4, 2), dtype=mx.uint32)
    density = rows.density(logits)
    assert density.dtype == mx.float32
    assert mx.exp(density).sum(axis=-1).tolist() == [1, 1, 1, 1]
    assert rows.draw(density, keys).tolist() == rows.sample(logits, keys).tolist()


def test_a_greedy_row_in_categorical_gets_exactly_greedys_token(make):
    rng = np.random.default_rng(3)
    logits = mx.concatenate([rounding_tie()] * 2 + [make.logits(rng, 4, 5000, mx.bfloat16, 0.05)])
    params = [SamplingParams(), SamplingParams(temperature=1.0)] * 3
    keys = make.keys(rng, 6)
    rows = Categorical().open(params)
    expected = Greedy().open(params).sample(logits, keys).tolist()
    assert rows.sample(logits, keys).tolist()[::2] == expected[::2]
    assert rows.draw(rows.density(logits), keys).tolist()[::2] == expected[::2]
    assert Categorical().open([SamplingParams()] * 6).sample(logits, keys).tolist() == expected


def test_handles_greedy_rows_and_no_others():
    assert Greedy().handles(SamplingParams(top_p=0.5, top_k=3))
    assert not Greedy().handles(SamplingParams(temperature=1e-6))
    assert Categorical().handles(SamplingParams())
    assert Categorical().handles(SamplingParams(temperature=1.0))


def test_keep_changes_nothing(make):
    rng = np.random.default_rng(5)
    rows = Greedy().open([SamplingParams()] * 4)
    rows.keep([3, 0])
    logits = make.logits(rng, 2, 97)
    assert rows.sample(logits, make.keys(rng, 2)).tolist() == mx.argmax(logits, axis=-1).tolist()
