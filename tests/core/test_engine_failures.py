"""One bad row, one bad step, a model that always fails: who pays, how often it is tried, and what goes on."""

import pytest

from oarlock.core import SamplingParams
from oarlock.core.emission import Emitter
from oarlock.core.errors import CompositionError, NonFiniteLogits
from oarlock.core.recovery import Recovery

SAMPLED = SamplingParams(temperature=0.7, seed=3)


# --- scores that are no numbers ------------------------------------------------------------------------------------


def check_nan(engine, model, ask, counted, told, sampling, start):
    """Row 1 meets NaN after token 42: it ends within one step with an error; its neighbours do not notice."""
    handles = [engine.submit(ask(0, 12)), engine.submit(ask(start, 12, sampling=sampling)), engine.submit(ask(60, 12))]
    model.poisoned = (42,)
    with pytest.raises(NonFiniteLogits) as caught:
        handles[1].result()
    assert caught.value.request_id == handles[1].id
    assert caught.value.position == 42 - start
    steps = sum(handles[1].id in step.decode_ids for step in told.records)
    assert steps <= 42 - start + 2  # in the pipeline one more is under way
    for i, first in ((0, 0), (2, 60)):
        assert handles[i].result().token_ids == counted(first, 12)
    assert engine.stats()["recoveries"] == 0


@pytest.mark.fault("I-02")
@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"early_first_token": False}], ids=str)
@pytest.mark.parametrize("start", [42, 41, 38], ids=["first token", "second token", "later"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_row_of_nan_ends_at_once(engines, successor, ask, counted, told, sampling, start, settings):
    """Never the endless token 0."""
    engine = engines(successor, plugins=[told], **settings)
    check_nan(engine, successor, ask, counted, told, sampling, start)


@pytest.mark.fault("I-02", twin=True)
@pytest.mark.parametrize("start", [42, 38])
def test_an_engine_that_believes_nan_is_found(engines, successor, ask, counted, told, start, monkeypatch):
    """The twin."""
    plain = Emitter.emit

    def emit(emitter, row, drawn):
        object.__setattr__(drawn, "finite", True)
        return plain(emitter, row, drawn)

    monkeypatch.setattr(Emitter, "emit", emit)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_nan(engines(successor, plugins=[told]), successor, ask, counted, told, SamplingParams(), start)


# --- forwards that raise ---------------------------------------------------------------------------------------------


@pytest.mark.fault("I-03")
@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"early_first_token": False}], ids=str)
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6])
def test_one_failing_forward_costs_nobody(engines, successor, ask, counted, call, settings):
    """In prefill, in the first decode and later: the step is repeated in place and every token is right."""
    engine = engines(successor, max_batch=3, **settings)
    successor.fail_at = (call,)
    results = engine.generate([ask(20 * i, 10) for i in range(4)])
    assert [result.token_ids for result in results] == [counted(20 * i, 10) for i in range(4)]
    stats = engine.stats()
    assert (stats["recoveries"], stats["retries"]) == (1, 1)


def check_guilty(engine, model, ask, counted, rows, start):
    """A step fails whenever one row stands before a certain token: that row gets the error, with its own tokens."""
    got = []
    starts = [start if i == 1 else 45 + 6 * i for i in range(rows)]
    handles = [engine.submit(ask(first, 8, on_token=_collector(got, i))) for i, first in enumerate(starts)]
    model.failing = (42,)
    before = model.calls
    with pytest.raises(RuntimeError, match="a token fails"):
        handles[1].result()
    assert [token for i, token in got if i == 1] == list(counted(start, 42 - start))
    for i in range(rows):
        if i != 1:
            assert handles[i].result().token_ids == counted(starts[i], 8)
    stats = engine.stats()
    assert stats["recoveries"] == 1
    assert stats["retries"] <= 2 * (rows - 1).bit_length() + 1
    assert model.calls - before < 40
    model.failing = ()
    assert engine.submit(ask(42, 3)).result(timeout=1).token_ids == counted(42, 3)


def _collector(got, i):
    return lambda event: got.append((i, event.token))


@pytest.mark.fault("I-03")
@pytest.mark.parametrize("settings", [{}, {"pipeline": False}], ids=str)
@pytest.mark.parametrize("start", [42, 41, 39], ids=["prefill", "first decode", "later"])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_a_row_whose_step_fails_is_found_by_halves(engines, successor, ask, counted, rows, start, settings):
    """At most 2 * log2(B) + 1 retries; the others' tokens are right, and a new request is answered."""
    successor_engine = engines(successor, **settings)
    check_guilty(successor_engine, successor, ask, counted, rows, start)


@pytest.mark.fault("I-03", twin=True)
def test_a_recovery_that_blames_all_rows_is_found(engines, successor, ask, counted, monkeypatch):
    """The twin."""
    monkeypatch.setattr(
        Recovery, "isolate", lambda recovery, failure: dict.fromkeys(range(len(failure.widths)), failure.cause)
    )
    with pytest.raises((AssertionError, RuntimeError)):
        check_guilty(engines(successor), successor, ask, counted, 4, 39)


def test_a_lone_row_that_fails_is_rejected(engines, successor, ask, counted):
    engine = engines(successor)
    successor.failing = (5,)
    with pytest.raises(RuntimeError, match="a token fails"):
        engine.submit(ask(3, 9)).result()
    assert engine.submit(ask(10, 3)).result().token_ids == counted(10, 3)


@pytest.mark.fault("I-04")
def test_a_model_that_always_fails_is_not_tried_for_ever(engines, successor, ask, counted):
    """Running and queued rows get the error after a bounded number of forwards; the engine is idle and usable."""
    engine = engines(successor, max_batch=2)
    handles = [engine.submit(ask(20 * i, 9)) for i in range(4)]
    while engine.stats()["active_rows"] < 2:
        engine.step()
    before = successor.calls
    successor.fail_at = range(10**6)
    for _ in range(50):
        if not engine.step():
            break
    assert successor.calls - before <= 20
    for handle in handles:
        with pytest.raises(RuntimeError, match="fails"):
            handle.result(timeout=1)
    assert not engine.step()
    successor.fail_at = ()
    assert engine.submit(ask(7, 3)).result().token_ids == counted(7, 3)


def test_a_group_that_fails_only_together_is_stopped(engines, successor, ask, monkeypatch):
    """Nobody is guilty alone: an error that says so, never a loop."""
    engine = engines(successor)
    handles = [engine.submit(ask(20 * i, 30)) for i in range(4)]
    while engine.stats()["active_rows"] < 4:
        engine.step()
    plain = type(successor).__call__

    def together(model, ids, cache):
        if ids.shape[0] == 4:
            msg = "four rows fail"
            raise RuntimeError(msg)
        return plain(model, ids, cache)

    monkeypatch.setattr(type(successor), "__call__", together)
    for handle in handles:
        with pytest.raises(CompositionError) as caught:
            handle.result()
    assert set(caught.value.request_ids) == {handle.id for handle in handles}
    assert str(caught.value.cause) == "four rows fail"
    assert engine.stats()["retries"] < 10
    assert not engine.step()
