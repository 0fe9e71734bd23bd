"""Kinds L and M at the door: what cannot be is refused with its numbers before anything changes, and others go on."""

import math
from types import SimpleNamespace

import pytest

from oarlock.core import FinishReason, Request, SamplingParams, errors, sampling
from oarlock.core.engine import Engine

POSITIONS = 16


def check_what_never_fits(bench, engine):
    """Refused at submit with the numbers; a small request behind it completes."""
    for length in (POSITIONS, POSITIONS + 1, 400):
        with pytest.raises(errors.PromptTooLong) as caught:
            engine.submit(bench.ask(*([1] * length), n=4))
        assert (caught.value.prompt_tokens, caught.value.positions) == (length, POSITIONS)
    assert engine.stats()["pending_rows"] == 0
    assert bench.run(engine, [bench.ask(1, n=3)]) == [(5, 6, 7)]


@pytest.mark.fault("L-02")
def test_a_prompt_longer_than_the_positions_is_refused_and_nobody_waits(bench):
    engine = bench.engine(bench.Scripted({1: [5, 6, 7]}), positions=POSITIONS, prefill_batch_tokens=2)
    check_what_never_fits(bench, engine)
    last = engine.generate([bench.ask(*([1] * (POSITIONS - 1)), n=None), bench.ask(1, 1, n=100)])
    assert [(row.usage.generated_tokens, row.finish_reason) for row in last] == [
        (1, "length"),
        (POSITIONS - 2, "length"),
    ]


@pytest.mark.fault("L-02", twin=True)
def test_twin_a_model_that_states_no_positions_takes_them(bench, planted):
    engine = bench.engine(bench.Scripted({1: [5, 6, 7]}))
    with planted():
        check_what_never_fits(bench, engine)


BAD_LIMITS = (0, -1, 1.5, "5", True, math.nan, 2.0)


def check_limits(make):
    """A limit is a whole number of at least one, or None: up to the model's positions."""
    for limit in BAD_LIMITS:
        with pytest.raises(errors.InvalidMaxTokens) as caught:
            make(prompt_ids=[1], max_tokens=limit)
        assert caught.value.got is limit
    assert make(prompt_ids=[1], max_tokens=None).max_tokens is None
    assert make(prompt_ids=[1], max_tokens=1).max_tokens == 1


@pytest.mark.fault("L-04")
def test_limits_of_another_kind_are_refused_everywhere(bench):
    """By the record and by the door for plain data; None needs a model that states its positions."""
    check_limits(Request)
    check_limits(lambda **fields: Request.from_mapping(fields))
    engine = bench.engine(bench.Scripted({1: [5]}))
    with pytest.raises(errors.InvalidParameter, match="max_tokens"):
        engine.submit(bench.ask(1, n=None))


@pytest.mark.fault("L-04", twin=True)
def test_twin_limits_taken_as_they_come_are_noticed(planted):
    with planted():
        check_limits(SimpleNamespace)


def check_empty_prompts(submit):
    for fields in (
        {"prompt": ""},
        {"prompt_ids": []},
        {"prompt_ids": ()},
        {"messages": [{"role": "user", "content": ""}]},
    ):
        with pytest.raises(errors.EmptyPrompt):
            submit(Request(max_tokens=2, **fields))


@pytest.fixture
def spoken(bench):
    """An engine with a tokenizer; others run in it while the tests ask."""
    return bench.engine(bench.Scripted({1: [5, 6, 7]}), bench.Words({1: "one", 5: "five"}))


@pytest.mark.fault("L-06")
def test_an_empty_prompt_is_refused_and_others_go_on(bench, spoken):
    other = spoken.submit(bench.ask(1, n=3))
    spoken.step()
    check_empty_prompts(spoken.submit)
    assert other.result().token_ids == (5, 6, 7)


@pytest.mark.fault("L-06", twin=True)
def test_twin_a_prompt_that_is_filled_up_silently_is_noticed(planted, spoken):
    with planted():
        check_empty_prompts(lambda request: spoken.submit(Request(prompt_ids=[1], max_tokens=2)))


def check_short_prompts(bench, engine, options):
    """Prompts of 1 to 12 tokens, all options on: every one is answered."""
    requests = [bench.ask(*([1] * n), n=4, **options) for n in range(1, 13)]
    requests += [Request(prompt="|".join(["one"] * n), max_tokens=4, **options) for n in range(1, 13)]
    for result in engine.generate(requests):
        assert len(result.token_ids) == 4
        assert result.finish_reason is FinishReason.LENGTH


OPTIONS = {
    "sampling": SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, seed=3, logprobs=5),
    "stop": ("nine", "ten"),
    "stop_token_ids": (9,),
    "prefill_chunk": 3,
    "priority": 1,
}


@pytest.mark.fault("L-07")
@pytest.mark.parametrize("tail_split", [True, False])
def test_very_short_prompts_are_answered(bench, tail_split):
    model = bench.Scripted({1: [5, 5, 5]})
    engine = bench.engine(model, bench.Words({1: "one", 5: "five"}), tail_split=tail_split)
    check_short_prompts(bench, engine, {})
    check_short_prompts(bench, engine, OPTIONS)


@pytest.mark.fault("L-07", twin=True)
def test_twin_a_prompt_cut_from_its_end_is_noticed(bench, planted, spoken, monkeypatch):
    encode = bench.Words.encode
    monkeypatch.setattr(bench.Words, "encode", lambda self, text: encode(self, text)[: len(encode(self, text)) - 11])
    with planted(errors.EmptyPrompt):
        check_short_prompts(bench, spoken, OPTIONS)


def check_logprobs_of_the_whole_vocabulary(bench, vocabulary, ask):
    """More alternatives than there are tokens: all there are, and rows beside it go on."""
    engine = bench.engine(bench.Scripted({1: [5, 6], 2: [7, 8]}, vocabulary=vocabulary))
    wide, other = engine.generate([bench.ask(1, n=2, sampling=SamplingParams(logprobs=ask)), bench.ask(2, n=2)])
    assert [len(record.top) for record in wide.logprobs] == [min(ask, vocabulary)] * 2
    assert other.token_ids == (7, 8)


@pytest.mark.fault("M-07")
@pytest.mark.parametrize("ask", [0, 1, 11, 12, 13, 20])
def test_alternatives_beyond_the_vocabulary_are_all_there_are(bench, ask):
    check_logprobs_of_the_whole_vocabulary(bench, 12, ask)


@pytest.mark.fault("M-07", twin=True)
def test_twin_alternatives_without_a_bound_are_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(sampling, "min", max, raising=False)
    with planted(ValueError):
        check_logprobs_of_the_whole_vocabulary(bench, 12, 13)


@pytest.mark.fault("M-06")
@pytest.mark.parametrize("token", [64, 2**31])
def test_a_bias_outside_the_vocabulary_is_refused(bench, token):
    """Once a processor applies biases; until then every bias is."""
    engine = bench.engine(bench.Scripted({1: [5]}))
    with pytest.raises(errors.RequestError, match="logit_bias"):
        engine.submit(bench.ask(1, sampling=SamplingParams(logit_bias={token: 1.0})))


def steps_until_started(bench, engine, model, busy, odd):
    """Steps from submitting ``odd`` until it is admitted, while ``busy`` keeps arriving and never lets the engine idle."""
    admitted = []
    running = [engine.submit(busy()) for _ in range(2)]
    engine.step()
    waiting = engine.submit(Request(**odd, on_admitted=lambda: admitted.append(True)))
    for step in range(200):
        engine.step()
        if admitted:
            return step, waiting
        running = [handle for handle in running if not handle.done]
        running += [engine.submit(busy()) for _ in range(2 - len(running))]
    return 200, waiting


@pytest.mark.fault("L-09")
def test_a_request_that_fits_nobody_is_not_passed_over_for_ever(bench):
    """It stands at the head until the group is empty, and those behind it wait for it."""
    model = bench.Scripted({1: [5], 2: [6]})
    engine = bench.engine(model, plugins=[OtherMethod()])
    odd = {"prompt_ids": (2,), "max_tokens": 2, "method": "other"}
    steps, handle = steps_until_started(bench, engine, model, lambda: bench.ask(1, n=6), odd)
    assert steps <= 8
    assert handle.result().token_ids == (6, 6)


class OtherMethod:
    """Plain decoding under another name: its rows never share a group with those of the engine's own."""

    def __init__(self):
        from oarlock.core import hookimpl
        from oarlock.methods.plain import Plain

        self.register_methods = hookimpl(lambda register: register(Plain(name="other")))


def check_a_long_prompt_lets_rows_run(bench, engine: Engine, chunks):
    """A running row gets a token for every chunk of a neighbour's prompt."""
    tokens = []
    running = engine.submit(bench.ask(1, n=500, on_token=lambda event: tokens.append(event.token)))
    while len(tokens) < 3:
        engine.step()
    before, admitted = len(tokens), []
    long = engine.submit(bench.ask(*([2] * 400), n=1, on_token=lambda event: admitted.append(len(tokens) - before)))
    long.result()
    assert admitted[0] >= chunks - 2
    running.cancel()


@pytest.mark.fault("L-09")
@pytest.mark.fault("L-09", twin=True)
def test_a_long_prompt_does_not_stop_the_running_rows(bench, planted):
    check_a_long_prompt_lets_rows_run(bench, bench.engine(bench.Scripted({1: [5], 2: [6]}), prefill_chunk=8), 50)
    with planted():
        check_a_long_prompt_lets_rows_run(bench, bench.engine(bench.Scripted({1: [5], 2: [6]})), 50)
