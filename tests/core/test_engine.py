"""The engine's public surface: generate, stream, handles and gauges."""

import pytest

from oarlock.core import FinishReason, Request, SamplingParams, TokenEvent
from oarlock.core.errors import RowError

# --- generate -------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_requests(engines, successor, ask, counted):
    """Short ones end first and still stand in their place; more than the queue takes are submitted as it empties."""
    engine = engines(successor, max_batch=3, max_queued=2)
    lengths = [9, 1, 5, 30, 2, 2, 7, 1, 12, 3]
    results = engine.generate([ask(3 * i, n) for i, n in enumerate(lengths)])
    assert [r.token_ids for r in results] == [counted(3 * i, n) for i, n in enumerate(lengths)]
    assert all(r.finish_reason is FinishReason.LENGTH for r in results)
    assert engine.generate([]) == []


def test_a_failed_request_is_raised_after_all_are_done(engines, successor, ask, counted):
    engine = engines(successor)
    successor.poisoned = (42,)
    requests = [ask(0, 9), ask(40, 9), ask(60, 9)]
    with pytest.raises(RowError) as caught:
        engine.generate(requests)
    outcomes = engine.generate(requests, return_errors=True)
    assert [type(outcome) for outcome in outcomes[::2]] == [type(outcomes[0])] * 2
    assert (outcomes[0].token_ids, outcomes[2].token_ids) == (counted(0, 9), counted(60, 9))
    assert type(outcomes[1]) is type(caught.value)
    assert outcomes[1].request_id
    assert engine.stats()["active_rows"] == engine.stats()["pending_rows"] == 0


# --- stream -----------------------------------------------------------------------------------------------------


def by_request(events):
    rows = {}
    for event in events:
        rows.setdefault(event.request_id, []).append(event)
    return rows


def test_a_stream_says_what_the_results_say(engines, successor, letters, ask):
    """Per request: indices count up, texts concatenate to the result's, and the last event has the reason."""
    engine = engines(successor, letters(eos=[50]), max_batch=2)
    requests = [ask(10, 6, id="a"), ask(47, 9, id="b"), ask(30, 12, id="c", stop="GHI"), ask(5, 3, id="d")]
    results = {r.id: r for r in engine.generate(requests)}
    assert [results[name].finish_reason for name in "abcd"] == ["length", "stop", "stop", "length"]
    rows = by_request(engine.stream(requests))
    assert set(rows) == set(results)
    for name, (*tokens, last) in rows.items():
        assert [event.index for event in tokens] == list(range(len(tokens)))
        assert tuple(event.token for event in tokens) == results[name].token_ids
        assert "".join(event.text for event in (*tokens, last)) == results[name].text
        assert {event.finish_reason for event in tokens} <= {None}
        assert (last.token, last.finish_reason) == (None, results[name].finish_reason)
    assert "GHI" not in results["c"].text
    assert results["b"].text == letters().decode([48, 49])


def test_rows_of_a_stream_come_as_they_are_made(engines, successor, ask):
    """Two rows alternate: nobody waits for the other's end."""
    events = list(engines(successor).stream([ask(0, 8, id="a"), ask(50, 8, id="b")]))
    names = [event.request_id for event in events if event.token is not None]
    assert names[:4] != ["a"] * 4
    assert names.index("b") < 3


def test_a_failed_row_raises_after_the_others_events(engines, successor, ask, counted):
    engine = engines(successor)
    successor.poisoned = (42,)
    events = []
    with pytest.raises(RowError):
        events.extend(engine.stream([ask(40, 20, id="bad"), ask(0, 20, id="good")]))
    rows = by_request(events)
    assert tuple(event.token for event in rows["good"][:-1]) == counted(0, 20)
    assert rows["good"][-1].finish_reason is FinishReason.LENGTH
    assert [event.token for event in rows["bad"]] == [41, 42]


@pytest.mark.fault("K-09")
@pytest.mark.parametrize("exhaust", [True, False])
def test_a_consumer_that_stops_at_the_reason_is_no_quitter(engines, successor, exhaust, ask, told):
    """The row counts as finished, not as cancelled."""
    engine = engines(successor, plugins=[told])
    for event in engine.stream([ask(0, 4)]):
        if event.finish_reason and not exhaust:
            break
    assert (told.reasons, told.failed) == (["length"], [])


def test_leaving_a_stream_cancels_what_still_runs(engines, successor, ask, told):
    engine = engines(successor, plugins=[told])
    stream = engine.stream([ask(0, 500), ask(50, 500)])
    for _ in range(5):
        next(stream)
    stream.close()
    assert told.reasons == ["cancelled"] * 2
    assert not engine.step()
    assert engine.stats()["active_rows"] == 0


# --- handles ----------------------------------------------------------------------------------------------------


def test_a_handle_waits_and_tells(engines, successor, ask, counted):
    engine = engines(successor)
    handle, other = engine.submit(ask(3, 5, id="mine")), engine.submit(ask(7, 2))
    assert (handle.id, handle.done, handle.outcome) == ("mine", False, None)
    assert other.id not in ("", "mine")
    result = handle.result()
    assert (result.id, result.token_ids) == ("mine", counted(3, 5))
    assert handle.result() is result is handle.outcome
    assert handle.done
    assert other.result(timeout=5).token_ids == counted(7, 2)


def test_waiting_ends_with_the_timeout(engines, successor, ask, counted):
    engine = engines(successor)
    engine.hold()
    handle = engine.submit(ask(0, 3))
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    engine.release()
    assert handle.result().token_ids == counted(0, 3)


def test_names_of_requests_without_one_differ(engines, successor, ask):
    engine = engines(successor)
    handles = [engine.submit(ask(i, 1)) for i in range(20)]
    assert len({handle.id for handle in handles}) == 20


# --- gauges ------------------------------------------------------------------------------------------


def test_stats_count_rows_bytes_and_tokens(engines, successor, ask):
    engine = engines(successor, max_batch=2)
    for i in range(4):
        engine.submit(ask(10 * i, 5))
    for _ in range(3):
        engine.step()
    during = engine.stats()
    assert (during["active_rows"], during["pending_rows"]) == (2, 2)
    assert during["kv_bytes"] > 0
    while engine.step():
        pass
    after = engine.stats()
    assert (after["active_rows"], after["pending_rows"], after["kv_bytes"]) == (0, 0, 0)
    assert after["delivered_tokens"] == 20
    assert after["recoveries"] == after["retries"] == 0


def test_events_and_results_are_plain_values(engines, tiny):
    """A caller may keep them and read them on any thread: no array is among them."""
    engine = engines(tiny)
    events = []
    request = Request(prompt_ids=[1, 2], max_tokens=4, sampling=SamplingParams(logprobs=2))
    result = engine.submit(request, events=events.append).result()
    for entry in result.logprobs:
        assert type(entry.logprob) is float
        assert [(type(token), type(value)) for token, value in entry.top] == [(int, float)] * 2
    assert {type(token) for token in result.token_ids} == {int}
    assert all(isinstance(event, TokenEvent) for event in events)
    assert [event.logprob for event in events[:-1]] == list(result.logprobs)
