"""What a row's consumer sees, where a row ends, what its usage says, and the seeds of rows that draw."""

import asyncio

import pytest

from oarlock.core import FinishReason, Request, SamplingParams
from oarlock.core.emission import Emitter
from oarlock.core.errors import InvalidParameter, PromptTooLong, RowError

# --- on_token -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, 0, True, "", [], 0.0])
def test_only_false_stops_a_row(engines, successor, ask, counted, answer):
    """None, 0 and whatever else go on."""
    result = engines(successor).submit(ask(0, 5, on_token=lambda event: answer)).result()
    assert (result.token_ids, result.finish_reason) == (counted(0, 5), FinishReason.LENGTH)


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("last", [0, 1, 3])
def test_false_stops_and_the_token_counts(engines, successor, ask, counted, pipeline, early, last):
    """The token that was answered with False is delivered and counted; a neighbour goes on."""
    engine = engines(successor, pipeline=pipeline, early_first_token=early)
    stopped = engine.submit(ask(0, 9, on_token=lambda event: event.index < last))
    other = engine.submit(ask(50, 9))
    result = stopped.result()
    assert (result.token_ids, result.finish_reason) == (counted(0, last + 1), FinishReason.STOP)
    assert result.usage.generated_tokens == last + 1
    assert other.result().token_ids == counted(50, 9)


def check_callback_error(engine, ask, counted):
    """The consumer of row 1 raises at its third token: exactly that row fails, with the two that it took."""
    taken = []

    def consume(event):
        if event.index == 2:
            raise KeyError("consumer")
        taken.append(event.token)

    handles = [engine.submit(ask(20 * i, 8, on_token=consume if i == 1 else None)) for i in range(3)]
    with pytest.raises(KeyError):
        handles[1].result()
    assert tuple(taken) == counted(20, 2)
    for i in (0, 2):
        assert handles[i].result().token_ids == counted(20 * i, 8)
    assert engine.stats()["recoveries"] == 0


@pytest.mark.fault("I-05")
@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"max_batch": 2}])
def test_a_consumer_that_raises_costs_its_own_row_only(engines, successor, ask, counted, settings):
    check_callback_error(engines(successor, **settings), ask, counted)


@pytest.mark.fault("I-05", twin=True)
def test_an_emitter_that_lets_errors_out_is_found(engines, successor, ask, counted, monkeypatch):
    """The twin: the error leaves the emission and is taken for the group's."""

    def emit(emitter, row, drawn):
        row.generated += 1
        emitter._deliver(row, drawn)
        return emitter.finish(row, FinishReason.LENGTH) if row.generated >= row.max_tokens else True

    monkeypatch.setattr(Emitter, "emit", emit)
    with pytest.raises((AssertionError, KeyError, RuntimeError, pytest.fail.Exception)):
        check_callback_error(engines(successor), ask, counted)


def test_a_coroutine_callback_is_refused(engines, successor, ask, counted):
    """At submit where it shows, else at the first token; nothing is left unawaited."""
    engine = engines(successor)

    async def consume(event):
        await asyncio.sleep(0)

    with pytest.raises(InvalidParameter) as caught:
        engine.submit(ask(0, 3, on_token=consume))
    assert caught.value.name == "on_token"
    other = engine.submit(ask(50, 3))
    with pytest.raises(RowError, match="AsyncEngine"):
        engine.submit(ask(0, 3, on_token=lambda event: consume(event))).result()
    assert other.result().token_ids == counted(50, 3)


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_eos_is_counted_and_not_delivered(engines, successor, letters, ask, counted, place, pipeline):
    """As the first, a middle and the last token; every id of the union ends a row."""
    engine = engines(successor, letters(eos=[11 + place, 90]), pipeline=pipeline)
    events = []
    result = engine.submit(ask(10, 5), events=events.append).result()
    assert (result.token_ids, result.finish_reason) == (counted(10, place), FinishReason.STOP)
    assert result.usage.generated_tokens == place + 1
    assert [event.token for event in events] == [*counted(10, place), None]
    assert engine.submit(ask(85, 20)).result().token_ids == counted(85, 4)


def test_eos_can_be_ignored_and_other_tokens_can_end(engines, successor, letters, ask, counted):
    engine = engines(successor, letters(eos=[12]))
    assert engine.submit(ask(10, 5, ignore_eos=True)).result().token_ids == counted(10, 5)
    result = engine.submit(ask(20, 9, stop_token_ids=[23])).result()
    assert (result.token_ids, result.finish_reason) == (counted(20, 2), FinishReason.STOP)
    assert engine.submit(ask(20, 9, stop_token_ids=23, ignore_eos=True)).result().token_ids == counted(20, 2)


def test_without_a_tokenizer_nothing_but_a_stop_token_ends_a_row_early(engines, successor, ask, counted):
    engine = engines(successor)
    assert engine.submit(ask(0, 200)).result().token_ids == counted(0, 200)
    assert engine.submit(ask(0, 200, stop_token_ids=[5])).result().token_ids == counted(0, 4)


@pytest.mark.parametrize("prompt", [1, 5, 19])
def test_no_limit_means_up_to_the_positions(engines, successor, counted, prompt):
    engine = engines(successor, positions=20)
    request = Request(prompt_ids=range(prompt), max_tokens=None)
    assert engine.submit(request).result().token_ids == counted(prompt - 1, 20 - prompt)
    more = Request(prompt_ids=range(prompt), max_tokens=1000)
    assert engine.submit(more).result().usage.generated_tokens == 20 - prompt


@pytest.mark.parametrize("prompt", [20, 21])
def test_a_prompt_that_fills_the_positions_is_refused(engines, successor, ask, counted, prompt):
    """With the numbers, while others go on."""
    engine = engines(successor, positions=20)
    other = engine.submit(ask(50, 9))
    engine.step()
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(Request(prompt_ids=range(prompt), max_tokens=3))
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.positions) == (prompt, 3, 20)
    assert other.result().token_ids == counted(50, 9)


def test_no_limit_without_positions_is_refused(engines, successor):
    with pytest.raises(InvalidParameter) as caught:
        engines(successor).submit(Request(prompt_ids=[1], max_tokens=None))
    assert caught.value.name == "max_tokens"


# --- usage, seeds ------------------------------------------------------------------------------------------------------


def test_usage_counts_and_times(engines, successor, letters):
    engine = engines(successor, letters(eos=[30]))
    usage = engine.submit(Request(prompt_ids=[5, 6, 20], max_tokens=50)).result().usage
    assert (usage.prompt_tokens, usage.generated_tokens, usage.cached_tokens) == (3, 10, 0)
    assert (usage.drafted_tokens, usage.accepted_tokens, usage.forced_tokens) == (0, 0, 0)
    assert usage.prefill_ms > 0
    assert usage.decode_ms > 0
    one = engine.submit(Request(prompt_ids=[5], max_tokens=1)).result().usage
    assert one.generated_tokens == 1
    assert one.decode_ms < usage.decode_ms


@pytest.mark.fault("M-14")
def test_rows_without_a_seed_differ_and_can_be_repeated(engines, tiny):
    """Ten equal requests in one submit, and in a second engine: all distinct; the reported seed repeats each."""
    request = Request(prompt_ids=[1, 2, 3], max_tokens=12, sampling=SamplingParams(temperature=1.0))
    results = [*engines(tiny).generate([request] * 10), *engines(tiny).generate([request] * 10)]
    assert len({result.token_ids for result in results}) == 20
    assert len({result.usage.seed for result in results}) == 20
    again = [
        Request(prompt_ids=[1, 2, 3], max_tokens=12, sampling=SamplingParams(temperature=1.0, seed=result.usage.seed))
        for result in results
    ]
    repeated = engines(tiny, max_batch=3).generate(again)
    assert [result.token_ids for result in repeated] == [result.token_ids for result in results]


def test_greedy_duplicates_are_equal(engines, tiny):
    results = engines(tiny).generate([Request(prompt_ids=[1, 2, 3], max_tokens=12)] * 6)
    assert len({result.token_ids for result in results}) == 1


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_a_given_seed_is_reported(engines, tiny, seed):
    sampling = SamplingParams(temperature=1.0, seed=seed)
    first, second = engines(tiny).generate([Request(prompt_ids=[4], max_tokens=6, sampling=sampling)] * 2)
    assert first.usage.seed == second.usage.seed == seed
    assert first.token_ids == second.token_ids
