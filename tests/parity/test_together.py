"""Drafts, constraints, processors, seeds, log-probabilities and ends in one batch: each row says what it says alone, plainly.

With prefixes that were computed before and a process that ends in the middle as well.
"""

import attrs
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.oracle import Oracle

V, TOKENS = 97, 24
LENGTHS = (12, 3, 30, 9, 17, 5)


class Turns:
    """Even and odd ids by turns, and ``length`` of them."""

    def __init__(self, length, log):
        self.length, self.taken, self.log = length, [], log

    @property
    def terminated(self):
        return len(self.taken) >= self.length

    def accept(self, token):
        assert self.mask()[token]
        self.taken.append(token)

    def ready(self):
        """Nothing is filled elsewhere."""

    def mask(self):
        assert not self.terminated
        return np.arange(V) % 2 == len(self.taken) % 2

    def forced(self):
        return ()

    def rollback(self, n):
        self.log.append(n)
        del self.taken[-n:]


class Factory:
    """Registers as ``turns``; ``taken_back`` are the counts that its constraints were asked to forget."""

    name = "turns"

    def __init__(self):
        self.taken_back = []

    def open(self, spec, tokenizer, request):
        return Turns(spec, self.taken_back)

    @hookimpl
    def register_constraints(self, register):
        register(self)


def requests(prompts):
    penalised = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    rows = (
        {"sampling": SamplingParams(**penalised)},
        {
            "sampling": SamplingParams(temperature=0.9, seed=3, **penalised),
            "min_tokens": 9,
            "stop_token_ids": range(20),
        },
        {"constraint": {"turns": 17}},
        {
            "constraint": {"turns": TOKENS + 1},
            "sampling": SamplingParams(temperature=1.1, seed=5, extra={"no_repeat_ngram": 2}),
        },
        {"sampling": SamplingParams(logit_bias={5: 2.0, 7: -9.0}, logprobs=3)},
        {"sampling": SamplingParams(temperature=0.7, top_p=0.9, seed=8), "constraint": {"turns": 11}},
    )
    return [
        Request(
            prompt_ids=prompt,
            max_tokens=TOKENS,
            id=str(row),
            **{**given, "stop_token_ids": tuple(given.get("stop_token_ids", ()))},
        )
        for row, (prompt, given) in enumerate(zip(prompts, rows, strict=True))
    ]


def run(model, asked, plugins, every=0, method=None, **scheduler):
    config = {"scheduler": scheduler, "state_cache": {"name": "none"}, "method": method or {"name": "plain"}}
    with Engine(model, config=config, plugins=plugins) as engine:
        handles = []
        for request in asked:
            handles.append(engine.submit(request))
            for _ in range(every):
                engine.step()
        results = [handle.result() for handle in handles]
        return results, engine.stats()


@pytest.fixture(scope="module")
def alone():
    """The rows, their results alone, and the model."""
    model = models.build("tiny-full")
    asked = requests(models.prompts(LENGTHS, V))
    results = [run(model, [request], [Factory()])[0][0] for request in asked]
    assert {result.finish_reason.value for result in results} == {"stop", "length"}
    return model, asked, results


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipelined", "direct"])
@pytest.mark.parametrize(("every", "most"), [(0, 6), (2, 4)])
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_every_row_says_what_it_says_alone(alone, pipeline, every, most, speculative):
    """The oracle is wrong one time in five, so that constraints and histories are taken back."""
    model, asked, wanted = alone
    factory, method = Factory(), None
    plugins = [factory]
    if speculative:
        answers = {request.prompt_ids: result.token_ids for request, result in zip(asked, wanted, strict=True)}
        plugins.append(Oracle(answers=answers, vocabulary=V))
        method = {"name": "speculative", "proposer": "oracle", "depth": 4, "adaptive": False}
    results, stats = run(model, asked, plugins, every, method, pipeline=pipeline, max_batch=most, prefill_chunk=7)
    for got, want in zip(results, wanted, strict=True):
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason), got.id
    best = [[each.token for each in result.logprobs] for result in (results[4], wanted[4])]
    assert best[0] == best[1]
    assert stats["recoveries"] == 0
    if speculative:
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
        assert factory.taken_back
        assert all(result.usage.accepted_tokens > 0 for result in results)


SHARED, INTERVAL, WINDOW = 20, 4, 5
"""Tokens that all prompts begin with; tokens between two checkpoints of a row; tokens of the widest window."""


class Prefilled:
    """Counts the tokens of prompts that were forwarded, those that drafted rows forwarded again included."""

    def __init__(self):
        self.tokens = 0

    @hookimpl
    def step_finished(self, step):
        self.tokens += step.prefill_tokens


@pytest.fixture(scope="module")
def shared():
    """Rows whose prompts begin alike, and their results alone, without anything that was kept."""
    model = models.build("tiny-full")
    start, *rest = models.prompts((SHARED, *LENGTHS), V)
    asked = requests([(*start, *prompt) for prompt in rest])
    return model, tuple(start), asked, [run(model, [request], [Factory()])[0][0] for request in asked]


def opened(model, asked, wanted, directory, *plugins, **scheduler):
    """An engine that drafts, keeps prefixes in memory and checkpoints in a directory."""
    answers = {request.prompt_ids: result.token_ids for request, result in zip(asked, wanted, strict=True)}
    method = {"name": "speculative", "proposer": "oracle", "depth": WINDOW - 1, "adaptive": False}
    kept = {"name": "memory", "publish_min_tokens": 4, "checkpoints": str(directory)}
    config = {"scheduler": scheduler, "state_cache": kept, "method": method}
    return Engine(model, config=config, identity="weights", plugins=[Oracle(answers=answers, vocabulary=V), *plugins])


@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"max_batch": 4, "prefill_chunk": 7}], ids=str)
@pytest.mark.parametrize("tokens", [6, 30, 75])
def test_prefixes_and_a_restart_change_nothing_either(shared, settings, tokens, tmp_path):
    """Rows adopt what a request before them left, and what one process began another one ends."""
    model, start, asked, wanted = shared
    factory, told = Factory(), []
    asked = [
        attrs.evolve(request, checkpoint_interval=INTERVAL, on_token=lambda event: told.append(event))
        for request in asked
    ]
    with opened(model, asked, wanted, tmp_path, factory, **settings) as first:
        first.generate([Request(prompt_ids=(*start, 1), max_tokens=2)])
        handles = [first.submit(request) for request in asked]
        while len(told) < tokens:
            first.step()
        known, ended = [tuple(handle._row.token_ids) for handle in handles], [handle.done for handle in handles]
        for each in first._store._store._directories:
            each.flush()
        before = first.stats()
    assert before["recoveries"] == 0
    assert before["state_cache"]["hits"] >= len([said for said in known if said])
    prefilled = Prefilled()
    with opened(model, asked, wanted, tmp_path, factory, prefilled, **settings) as second:
        results = second.generate(asked)
        after = second.stats()
    # What a step takes is written in the next one, and what is over is taken away.
    kept = [len(said) > 1 + WINDOW and not over for said, over in zip(known, ended, strict=True)]
    for got, want, said, resumed in zip(results, wanted, known, kept, strict=True):
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason), got.id
        assert got.token_ids[: len(said)] == said
        assert got.usage.cached_tokens >= SHARED or not resumed
    assert [[each.token for each in side[4].logprobs] for side in (results, wanted)] == [list(wanted[4].token_ids)] * 2
    assert 0 < before["accepted_tokens"] + after["accepted_tokens"] < before["drafted_tokens"] + after["drafted_tokens"]
    assert factory.taken_back
    assert after["recoveries"] == 0
    fresh = sum(len(request.prompt_ids) for request, resumed in zip(asked, kept, strict=True) if not resumed)
    assert prefilled.tokens <= fresh + sum(kept) * (2 * INTERVAL + WINDOW)
    assert any(kept) or tokens < 30
