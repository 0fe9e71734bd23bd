"""Draws spread over the cores of a CPU: the same tokens however many share the work, and one call where that is not worth it."""

import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.oracle import Oracle
from oarlock.samplers import lanes
from oarlock.samplers.categorical import CategoricalRows

PROMPTS = [tuple(prompt) for prompt in models.prompts((12, 3, 30, 9, 17), 97)]
PARAMS = (
    SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(),
    SamplingParams(temperature=1.2, top_k=7, seed=2),
    SamplingParams(temperature=0.5, min_p=0.1, seed=3, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, top_p=0.5, top_k=20, seed=4),
)


@pytest.fixture
def shared(monkeypatch):
    """Share however little there is; the sizes of all calls are noted."""
    calls, sample = [], CategoricalRows._sample

    def noted(self, logits, keys, rows):
        calls.append(logits.shape[0])
        return sample(self, logits, keys, rows)

    monkeypatch.setattr(CategoricalRows, "_sample", noted)

    def on(cores):
        monkeypatch.setattr(lanes, "cores", lambda: cores)
        monkeypatch.setattr(lanes, "LEAST", 1)
        calls.clear()
        return calls

    return on


def said(model, plugins=(), **config):
    requests = [Request(prompt_ids=p, max_tokens=16, sampling=s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    with Engine(model, config={"state_cache": {"name": "none"}, **config}, plugins=plugins) as engine:
        results = engine.generate(requests)
        return [result.token_ids for result in results], engine.stats()


@pytest.mark.parametrize("cores", [2, 3, 64])
@pytest.mark.parametrize("pipeline", [True, False])
def test_rows_say_the_same_however_many_streams_draw(shared, cores, pipeline):
    model = models.build("tiny-full")
    calls = shared(1)
    expected, _ = said(model, scheduler={"pipeline": pipeline})
    assert max(calls) == 5
    calls = shared(cores)
    assert said(model, scheduler={"pipeline": pipeline})[0] == expected
    assert max(calls) == -(-5 // min(cores, lanes.MOST))


def test_windows_are_shared_too(shared):
    """Lines of one row go to several streams."""
    model = models.build("tiny-full")
    expected, _ = said(model)
    answers = dict(zip(PROMPTS, expected, strict=True))
    method = {"name": "speculative", "proposer": "oracle", "depth": 4, "adaptive": False}
    calls = shared(3)
    tokens, stats = said(model, [Oracle(answers=answers, vocabulary=97, wrong=0.2)], method=method)
    assert tokens == expected
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert max(calls) > 2


def test_an_error_in_one_part_costs_its_own_row(shared, monkeypatch):
    """The call fails while another stream's part is built: all is drawn row by row, and one row is over."""
    model = models.build("tiny-full")
    expected, _ = said(model)
    shared(5)
    sample = CategoricalRows._sample

    def raising(self, logits, keys, rows):
        mine = range(len(self._params)) if rows is None else rows.tolist()
        if any(self._params[row].top_k == 7 for row in mine):
            raise KeyError("cannot draw")
        return sample(self, logits, keys, rows)

    monkeypatch.setattr(CategoricalRows, "_sample", raising)
    requests = [Request(prompt_ids=p, max_tokens=16, sampling=s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    with Engine(model, config={"state_cache": {"name": "none"}}) as engine:
        handles = [engine.submit(request) for request in requests]
        for place, handle in enumerate(handles):
            if place == 2:
                with pytest.raises(Exception, match="cannot draw"):
                    handle.result()
            else:
                assert handle.result().token_ids == expected[place]


def test_little_work_and_other_devices_are_not_shared(monkeypatch):
    calls = []

    def compute(part):
        calls.append(part)
        return mx.zeros((part.stop - part.start,), dtype=mx.uint32)

    monkeypatch.setattr(lanes, "cores", lambda: 8)
    assert lanes.spread((4, 100), compute).shape == (4,)
    assert calls == [slice(0, 4)]
    calls.clear()
    assert lanes.spread((5, 2 * lanes.LEAST), compute).shape == (5,)
    assert calls == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 5)]
    calls.clear()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    lanes.spread((5, 2 * lanes.LEAST), compute)
    assert calls == [slice(0, 5)]
