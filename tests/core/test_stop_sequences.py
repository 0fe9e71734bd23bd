"""Stop sequences: tokens that end a row together, whatever step they came in, and nothing of them is ever shown."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.core import FinishReason, Request, SamplingParams
from oarlock.core.contracts.method import Drawn
from oarlock.core.stops import StopSequences

SETTINGS = pytest.mark.parametrize("scheduler", [{}, {"pipeline": False}, {"early_first_token": False}], ids=str)


def defined(tokens, sequences, include, least):
    """The definition: the first sequence that is complete, the longest of several, that leaves enough tokens."""
    for end in range(1, len(tokens) + 1):
        lengths = [len(s) for s in sequences if tuple(tokens[:end][-len(s) :]) == tuple(s)]
        lengths = [length for length in lengths if (end if include else end - length) >= least]
        if lengths:
            return tokens[: end if include else end - max(lengths)], max(lengths)
    return tokens, 0


def run(tokens, sequences, include, least):
    """Push until a sequence is complete: what was let out, and how long the sequence was."""
    stops, out = StopSequences(sequences, include=include, min_tokens=least), []
    for token in tokens:
        found = stops.push(Drawn(token))
        out += [drawn.token for drawn in stops.free()]
        assert stops.released == len(out)
        if found:
            return out, found
    stops.end()
    return [*out, *(drawn.token for drawn in stops.free())], 0


@settings(max_examples=600, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=16),
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    least=st.integers(0, 6),
)
def test_a_row_ends_with_the_first_complete_sequence(tokens, sequences, include, least):
    assert run(tokens, sequences, include, least) == defined(tokens, sequences, include, least)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=12),
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_exactly_the_longest_beginning_of_a_sequence_is_held_back(tokens, sequences):
    stops, seen = StopSequences(sequences), []
    for token in tokens:
        seen.append(token)
        if stops.push(Drawn(token)):
            return
        stops.free()
        beginnings = [n for s in sequences for n in range(len(s)) if n <= len(seen) and seen[len(seen) - n :] == s[:n]]
        assert stops.released == len(seen) - max(beginnings)


def events_of(engine, request):
    events = list(engine.stream([request]))
    tokens = [event.token for event in events if event.token is not None]
    assert [event.index for event in events if event.token is not None] == list(range(len(tokens)))
    return tuple(tokens), "".join(event.text for event in events)


@SETTINGS
@pytest.mark.parametrize(
    ("sequences", "fields", "kept", "generated", "reason"),
    [
        ([[4, 5]], {}, 3, 5, "stop"),
        ([[4, 5]], {"include_stop": True}, 5, 5, "stop"),
        ([[4, 5, 6, 9], [5, 6]], {}, 4, 6, "stop"),
        ([[4, 6], [5, 7]], {}, 9, 9, "length"),
        ([[8, 9, 10]], {}, 9, 9, "length"),
        ([[1]], {}, 0, 1, "stop"),
        ([[2, 3], [6, 7]], {"min_tokens": 3}, 5, 7, "stop"),
        ([[2, 3], [6, 7]], {"min_tokens": 3, "include_stop": True}, 3, 3, "stop"),
        ([[2, 3]], {"min_tokens": 1}, 1, 3, "stop"),
        ([[3, 4, 5]], {"stop_token_ids": [4]}, 3, 4, "stop"),
        ([[3, 4, 5]], {"stop_token_ids": [4], "min_tokens": 3}, 3, 4, "stop"),
    ],
)
def test_tokens_text_and_usage_end_there(
    engines, successor, letters, ask, scheduler, sequences, fields, kept, generated, reason
):
    """After 0 come 1, 2, 3, ...; streams and results agree, and a neighbour goes on."""
    engine = engines(successor, letters(), **scheduler)
    request = ask(0, 9, stop_sequences=sequences, **fields)
    mine, other = engine.generate([request, ask(50, 12)])
    assert mine.token_ids == tuple(range(1, kept + 1))
    assert mine.text == "".join(chr(token + 33) for token in mine.token_ids)
    assert (mine.finish_reason, mine.usage.generated_tokens) == (reason, generated)
    assert len(other.token_ids) == 12
    assert events_of(engine, request) == (mine.token_ids, mine.text)


@SETTINGS
def test_logprobs_belong_to_the_tokens_that_are_left(engines, successor, ask, scheduler):
    request = ask(0, 9, stop_sequences=[[4, 5, 6]], sampling=SamplingParams(logprobs=1))
    (result,) = engines(successor, **scheduler).generate([request])
    assert [record.token for record in result.logprobs] == list(result.token_ids) == [1, 2, 3]


@SETTINGS
def test_a_consumer_that_refuses_a_token_gets_none_behind_it(engines, successor, ask, scheduler):
    """Several tokens are let out at once: the row ends with the one that was refused."""
    seen = []

    def refuse(event):
        seen.append(event.token)
        return event.token != 4

    engine = engines(successor, **scheduler)
    (result,) = engine.generate([ask(0, 9, stop_sequences=[[3, 4, 5, 9]], on_token=refuse)])
    assert seen == [1, 2, 3, 4]
    assert result.token_ids == (1, 2, 3, 4)
    assert result.finish_reason == FinishReason.STOP


@SETTINGS
def test_what_is_held_back_at_the_limit_is_let_out(engines, successor, ask, scheduler):
    """Also where the consumer refuses it there: stop wins over length."""
    engine, seen = engines(successor, **scheduler), []
    (result,) = engine.generate(
        [ask(0, 4, stop_sequences=[[3, 4, 5]], on_token=lambda event: seen.append(event.token))]
    )
    assert (seen, result.token_ids, result.finish_reason) == ([1, 2, 3, 4], (1, 2, 3, 4), "length")
    (result,) = engine.generate([ask(0, 4, stop_sequences=[[3, 4, 5]], on_token=lambda event: event.token != 3)])
    assert (result.token_ids, result.finish_reason) == ((1, 2, 3), "stop")


def test_a_cancelled_row_keeps_what_it_has_shown(engines, successor, ask):
    engine, seen = engines(successor), []
    handle = engine.submit(ask(0, 30, stop_sequences=[range(3, 13)], on_token=lambda e: seen.append(e.token)))
    for _ in range(7):
        engine.step()
    handle.cancel()
    result = handle.result()
    assert (result.finish_reason, result.token_ids) == ("cancelled", (1, 2))
    assert seen == [1, 2]


@SETTINGS
def test_a_consumer_that_raises_costs_its_own_row(engines, successor, ask, counted, scheduler):
    """Also where tokens are let out at the row's end."""

    def consume(event):
        if event.token == 4:
            raise KeyError("consumer")

    engine = engines(successor, **scheduler)
    failing, other = engine.submit(ask(0, 4, stop_sequences=[[3, 4, 5]], on_token=consume)), engine.submit(ask(50, 9))
    with pytest.raises(KeyError):
        failing.result()
    assert other.result().token_ids == counted(50, 9)


@pytest.mark.parametrize("call", range(2, 8))
def test_a_row_that_is_computed_again_goes_on_from_what_it_holds_back(engines, successor, device, ask, call):
    """Held tokens are part of the row's state, though nobody has seen them."""
    seen, engine = [], engines(successor)
    successor.fail_late, successor.calls = (call,), 0
    request = ask(0, 9, stop_sequences=[[2, 3, 4, 9], [6, 7]], on_token=lambda event: seen.append(event.token))
    (result,) = engine.generate([request])
    assert seen == [1, 2, 3, 4, 5]
    assert result.token_ids == (1, 2, 3, 4, 5)
    assert engine.stats()["recoveries"] == 1


# --- every way to end, together -----------------------------------------------------------------------------------

ENDS = {  # after 0 come 1, 2, 3, ..., written "#$%&'()*; 5 and 8 are the tokenizer's ends and have no text
    "eos": ({}, 4, 5),
    "another eos is no end of this row": ({"ignore_eos": True}, 12, 12),
    "eos comes too early": ({"min_tokens": 6}, 6, 7),
    "ids of the request beside eos": ({"stop_token_ids": [3, 7]}, 2, 3),
    "ids alone": ({"stop_token_ids": [9, 7], "ignore_eos": True}, 6, 7),
    "ids come too early": ({"stop_token_ids": [3, 9], "ignore_eos": True, "min_tokens": 5}, 7, 8),
    "a string before eos": ({"stop": "%"}, 4, 4),
    "a string behind eos": ({"stop": "'("}, 4, 5),
    "a string across tokens": ({"stop": "'(", "ignore_eos": True}, 7, 7),
    "a string too early": ({"stop": ["#$", "(*"], "ignore_eos": True, "min_tokens": 4}, 9, 9),
    "a sequence before a string": ({"stop": "(*", "stop_sequences": [[6, 7]], "ignore_eos": True}, 5, 7),
    "a string before a sequence": ({"stop": "'(", "stop_sequences": [[6, 7, 9]], "ignore_eos": True}, 7, 7),
    "a sequence too early": ({"stop_sequences": [[2, 3], [6, 7]], "ignore_eos": True, "min_tokens": 4}, 5, 7),
    "a sequence that eos breaks": ({"stop_sequences": [[4, 5, 6]]}, 4, 5),
}


@pytest.fixture
def hesitant(successor):
    """After token t comes t + 1, and where that is forbidden t + 2."""

    class Hesitant(type(successor)):
        def __call__(self, ids, cache):
            return super().__call__(ids, cache) + 5.0 * (mx.arange(97) == (ids + 2)[..., None])

    return Hesitant()


@pytest.mark.fault("N-01")
@SETTINGS
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("drawn", [False, True])
def test_ends_work_together(engines, hesitant, letters, scheduler, name, drawn):
    """EOS ids, ids, strings and sequences of the request, and min_tokens, in greedy rows and in drawn ones."""
    fields, kept, generated = ENDS[name]
    sampling = SamplingParams(temperature=1e-3, seed=1) if drawn else SamplingParams()
    engine = engines(hesitant, letters({5, 8}), **scheduler)
    request = Request(prompt_ids=[0], max_tokens=12, sampling=sampling, **fields)
    mine, other = engine.generate([request, Request(prompt_ids=[50], max_tokens=12)])
    assert len(mine.token_ids) == kept
    assert mine.usage.generated_tokens == generated
    assert (mine.finish_reason == "length") == (kept == 12)
    assert other.token_ids == tuple(range(51, 63))
