"""Kind F, seen from outside: one answer for each request, in its place, with its own options."""

import inspect

import pytest

from oarlock.core import SamplingParams
from oarlock.core.aio import AsyncEngine
from oarlock.core.engine import Engine

SCRIPTS = {first: [10 * first, 10 * first + 1] for first in (1, 2, 3, 4, 5)}
OPTIONS = [{}, {"prefill_chunk": 1}, {"sampling": SamplingParams(logprobs=1)}, {"priority": 2}, {"stop_token_ids": 63}]


def check_one_answer_each(bench, generate):
    """As many answers as requests, however their options differ."""
    for count in range(6):
        requests = [bench.ask(first, n=2, **options) for first, options in zip(SCRIPTS, OPTIONS, strict=True)][:count]
        answers = generate(bench.engine(bench.Scripted(SCRIPTS), max_batch=2, max_queued=2), requests)
        assert [answer.token_ids for answer in answers] == [tuple(SCRIPTS[r.prompt_ids[0]]) for r in requests]


@pytest.mark.fault("F-07")
def test_every_request_gets_its_answer(bench):
    check_one_answer_each(bench, Engine.generate)


@pytest.mark.fault("F-07")
@pytest.mark.parametrize("owner", [Engine, AsyncEngine])
@pytest.mark.parametrize("name", ["generate", "stream", "submit"])
def test_nothing_takes_lists_of_options_beside_the_requests(owner, name):
    """What belongs to a request stands in it, so there is no second list that could be shorter."""
    kinds = inspect.Parameter
    positional = [
        parameter.name
        for parameter in inspect.signature(getattr(owner, name)).parameters.values()
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    assert positional in (["self", "requests"], ["self", "request"])


@pytest.mark.fault("F-07", twin=True)
def test_twin_a_list_of_options_that_is_too_short_is_noticed(bench, planted):
    def paired(engine, requests):
        chunks = [1] * (len(requests) - 1)
        return engine.generate([request for request, _ in zip(requests, chunks, strict=False)])

    with planted():
        check_one_answer_each(bench, paired)
