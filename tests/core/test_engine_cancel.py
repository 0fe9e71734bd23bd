"""A row can be cancelled in every state, from queued to finished, and nobody else notices."""

import pytest

from oarlock.core import FinishReason, Request
from oarlock.core.driver import Driver
from oarlock.core.engine import Engine
from oarlock.core.handle import Handle
from oarlock.core.testing import models

LENGTHS = (30, 24, 40, 35)
TOKENS = 12
STATES = ("queued", "preparing", "decoding", "finished")


def reached(state, engine, handle, told, tokens):
    return {
        "queued": handle.id not in told.names,
        "preparing": engine.stats()["preparing_rows"] and handle.id in told.names,
        "decoding": len(tokens.get(handle.id, ())) >= 3,
        "finished": handle.done,
    }[state]


def check_cancel(model, told, state, victim, **settings):
    """Cancel row ``victim`` in a state; then look at who was processed, and at every token."""
    prompts, tokens = models.prompts(LENGTHS, 97, seed=victim), {}
    order = sorted(range(4), key=lambda i: (i == victim, i)) if state == "queued" else range(4)
    with Engine(model, config={"scheduler": {"prefill_chunk": 8, **settings}}, plugins=[told]) as engine:

        def submit(i):
            def collect(event):
                tokens.setdefault(event.request_id, []).append(event.token)

            return engine.submit(Request(prompt_ids=prompts[i], max_tokens=TOKENS, id=str(i), on_token=collect))

        handles = {i: submit(i) for i in order}
        while not reached(state, engine, handles[victim], told, tokens):
            engine.step()
            assert len(told.records) < 200, f"never {state}"
        handles[victim].cancel()
        handles[victim].cancel()
        steps = len(told.records)
        results = [handles[i].result() for i in range(4)]
        handles[victim].cancel()
        assert engine.stats()["retries"] == 0
    check_outcome(model, state, victim, prompts, results, tokens)
    # A pipelined step that was already under way may still carry the row; nothing after it does.
    late = [name for step in told.records[steps + 1 :] for name in (*step.decode_ids, *step.prefill_ids)]
    assert state == "finished" or str(victim) not in late
    others = sum(length for i, length in enumerate(LENGTHS) if i != victim)
    prefilled = sum(step.prefill_tokens for step in told.records)
    assert others <= prefilled <= others + LENGTHS[victim], "somebody was prefilled again"


def check_outcome(model, state, victim, prompts, results, tokens):
    for i, result in enumerate(results):
        cancelled = i == victim and state != "finished"
        assert result.finish_reason is (FinishReason.CANCELLED if cancelled else FinishReason.LENGTH)
        wanted = models.serial(model, prompts[i], TOKENS)
        got = result.token_ids
        models.compare([got], [wanted.tokens[: len(got) if cancelled else TOKENS]], [wanted.gaps]).check()
        assert list(got) == tokens.get(str(i), [])
        assert result.usage.generated_tokens == len(got)


@pytest.mark.fault("K-01")
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("pipeline", [True, False], ids=["pipelined", "direct"])
def test_a_row_can_be_cancelled_in_every_state(tiny, told, state, victim, pipeline):
    """Absent from the next step; the others' tokens are those of mlx-lm alone, and they are not prefilled again."""
    check_cancel(tiny, told, state, victim, max_batch=2 if state == "queued" else 4, pipeline=pipeline)


@pytest.mark.fault("K-01", twin=True)
@pytest.mark.parametrize("state", ["queued", "preparing", "decoding"])
def test_a_cancel_that_does_nothing_is_found(tiny, told, state, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Handle, "cancel", lambda handle: None)
    with pytest.raises(AssertionError):
        check_cancel(tiny, told, state, 1, max_batch=2 if state == "queued" else 4)


@pytest.mark.fault("K-08")
def test_a_cancel_in_the_step_of_the_last_token_breaks_nothing(engines, successor, told, ask, counted):
    """Only one outcome is told."""
    engine = engines(successor, plugins=[told])
    handle = engine.submit(ask(0, 3, on_token=lambda event: handle.cancel() if event.index == 2 else None))
    other = engine.submit(ask(50, 6))
    assert handle.result().token_ids == counted(0, 3)
    assert other.result().token_ids == counted(50, 6)
    assert len(told.reasons) == 2


def check_all_at_once(engine, told, ask, counted):
    """Three running rows and three that were never admitted are cancelled in one go."""
    handles = [engine.submit(ask(i, 50)) for i in range(6)]
    for _ in range(4):
        engine.step()
    for handle in handles:
        handle.cancel()
    while engine.step():
        pass
    assert told.reasons == ["cancelled"] * 6
    assert [handle.result().token_ids for handle in handles[3:]] == [()] * 3
    stats = engine.stats()
    assert (stats["active_rows"], stats["pending_rows"], stats["kv_bytes"]) == (0, 0, 0)
    assert engine.submit(ask(9, 4)).result().token_ids == counted(9, 4)


@pytest.mark.fault("K-08")
def test_all_rows_can_be_cancelled_at_once(engines, successor, told, ask, counted):
    """The engine is idle at the next step, holds nothing, and takes new requests."""
    check_all_at_once(engines(successor, plugins=[told], max_batch=3), told, ask, counted)


@pytest.mark.fault("K-08", twin=True)
def test_a_cancel_that_expects_a_row_to_have_run_is_found(engines, successor, told, ask, counted, monkeypatch):
    plain = Driver.conclude

    def conclude(driver, row):
        assert row.admitted_at, "no state to release"
        plain(driver, row)

    monkeypatch.setattr(Driver, "conclude", conclude)
    with pytest.raises(AssertionError):
        check_all_at_once(engines(successor, plugins=[told], max_batch=3), told, ask, counted)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("after", [4, TOKENS])
def test_what_a_late_consumer_says_stands(tiny, cancelled, after):
    """A verdict on an earlier token holds, though tokens came since, were they the last, and the row be cancelled too."""
    prompts = models.prompts(LENGTHS, 97, seed=5)
    said = {"0": {"stop_at": 2}, "1": {"fault": ZeroDivisionError()}}
    handles, late = {}, []

    def act(event):
        if event.index == after - 1:
            handles[event.request_id].interrupt(**said[event.request_id])
            if cancelled:
                handles[event.request_id].cancel()
        elif event.index >= after:
            late.append(event)

    with Engine(tiny, config={"scheduler": {"prefill_chunk": 8}}) as engine:
        for i, prompt in enumerate(prompts):
            consumer = act if i < 2 else None
            request = Request(prompt_ids=prompt, max_tokens=TOKENS, id=str(i), on_token=consumer)
            handles[str(i)] = engine.submit(request)
        stopped, *others = (handles[i].result() for i in "023")
        with pytest.raises(ZeroDivisionError):
            handles["1"].result()
        assert engine.stats()["retries"] == 0
    assert not late
    alone = [models.serial(tiny, prompt, TOKENS).tokens for prompt in prompts]
    assert (stopped.finish_reason, list(stopped.token_ids)) == (FinishReason.STOP, list(alone[0][:2]))
    assert stopped.usage.generated_tokens == 2
    assert [list(each.token_ids) for each in others] == [list(tokens) for tokens in alone[2:]]
