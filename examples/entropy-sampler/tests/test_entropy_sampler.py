"""The contract, and that a row is warmer where the model is less certain."""

import math
from typing import ClassVar

import mlx.core as mx
import pytest
from entropy_sampler import Entropy

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidParameter
from oarlock.core.testing import models
from oarlock.core.testing.samplers import SamplerContract


class TestEntropy(SamplerContract):
    """With much warmth and none."""

    sampler = "entropy"
    params: ClassVar = [SamplingParams(temperature=t, extra={"warmth": w}) for t in (0.3, 1.0) for w in (0, 0.5, 3)]


@pytest.mark.parametrize("certain", [0.0, 1.0, 8.0])
def test_the_temperature_follows_the_entropy(certain):
    scores = mx.array([[certain, 0.0, 0.0, -1.0]])
    p = [math.exp(s) / sum(map(math.exp, scores[0].tolist())) for s in scores[0].tolist()]
    temperature = 0.5 + 2 * sum(-x * math.log(x) for x in p) / math.log(4)
    density = Entropy().open([SamplingParams(temperature=0.5, extra={"warmth": 2.0})]).density(scores)
    assert (density[0, 0] - density[0, 3]).item() == pytest.approx((certain + 1) / temperature, rel=1e-4)


def test_a_row_is_what_it_is_alone():
    params = [SamplingParams(), *(SamplingParams(temperature=0.8, seed=s, extra={"warmth": 1.0}) for s in range(3))]
    requests = [Request(prompt_ids=[3, 4, 5 + i], max_tokens=16, sampling=each) for i, each in enumerate(params)]
    with Engine(models.build("tiny-full")) as engine:
        together = [result.token_ids for result in engine.generate(requests)]
        assert together == [engine.generate([request])[0].token_ids for request in requests]


def test_what_cannot_be_is_refused_when_it_is_submitted():
    sampling = SamplingParams(temperature=1.0, extra={"warmth": -1})
    with Engine(models.build("tiny-full")) as engine, pytest.raises(InvalidParameter, match="0 to 100"):
        engine.submit(Request(prompt_ids=[3], max_tokens=1, sampling=sampling))
