"""Errors of the device: nothing that was in flight is believed, everyone is computed again, the guilty row alone pays."""

import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.errors import CompositionError, RecoveriesExhausted
from oarlock.core.prefill import PrefillCohort
from oarlock.core.rebuild import Rebuild
from oarlock.methods.plain import PlainDecoding

pytestmark = pytest.mark.usefixtures("device")
SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"pipeline": False}, {"early_first_token": False}, {"tail_split": False}], ids=str
)


@SETTINGS
@pytest.mark.parametrize("call", range(1, 9))
def test_an_error_that_does_not_come_back_costs_nobody(engines, successor, ask, counted, call, settings):
    """In prefill, in decode, while another cohort reads first: every token is right and comes once."""
    engine = engines(successor, max_batch=3, prefill_chunk=2, **settings)
    successor.fail_late = (call,)
    got = []
    requests = [ask(20 * i, 10, on_token=_collector(got, i)) for i in range(4)]
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [counted(20 * i, 10) for i in range(4)]
    assert sorted(got) == sorted((i, token) for i in range(4) for token in counted(20 * i, 10))
    assert engine.stats()["recoveries"] == 1
    assert engine.stats()["retries"] <= 2


def check_guilty(engine, model, ask, counted, rows, start):
    starts = [start if i == 1 else 45 + 6 * i for i in range(rows)]
    got = []
    handles = [
        engine.submit(ask(first, 8, on_token=lambda e, i=i: got.append((i, e.token)))) for i, first in enumerate(starts)
    ]
    model.singular = (42,)
    with pytest.raises(RuntimeError, match="the device failed"):
        handles[1].result()
    for i in range(rows):
        if i != 1:
            assert handles[i].result().token_ids == counted(starts[i], 8)
    tokens = [token for i, token in got if i == 1]
    assert tokens == list(counted(start, len(tokens)))
    assert len(tokens) == 42 - start
    assert engine.stats()["retries"] <= engine.stats()["recoveries"] * (2 * (rows - 1).bit_length() + 1)
    assert engine.stats()["recoveries"] <= 2  # one before the guilty row steps past its neighbours' tokens
    model.singular = ()
    assert engine.submit(ask(42, 3)).result(timeout=9).token_ids == counted(42, 3)


def _collector(got, i):
    return lambda event: got.append((i, event.token))


@SETTINGS
@pytest.mark.parametrize("start", [42, 41, 40, 37], ids=["prefill", "first decode", "second", "later"])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_the_row_whose_evaluation_fails_is_found_by_halves(engines, successor, ask, counted, rows, start, settings):
    """Its neighbours end as they would alone; each token is delivered once; retries are few."""
    check_guilty(engines(successor, **settings), successor, ask, counted, rows, start)


@pytest.mark.fault("I-03", twin=True)
def test_a_rebuild_that_blames_everyone_is_found(engines, successor, ask, counted, monkeypatch):
    """The twin: nobody is tried apart from the others."""
    monkeypatch.setattr(Rebuild, "_prove", lambda rebuild, rows: rebuild._reject(rows, RuntimeError("all")))
    with pytest.raises((AssertionError, RuntimeError)):
        check_guilty(engines(successor), successor, ask, counted, 4, 40)


def test_draws_go_on_as_they_would_have(engines, tiny, monkeypatch):
    """Sampled rows with seeds, ragged prompts, a failure in the middle: the tokens of an undisturbed run."""
    requests = [
        Request(
            prompt_ids=[(7 * i + j) % 90 + 1 for j in range(3 + 5 * i)],
            max_tokens=20,
            sampling=SamplingParams(temperature=0.9, top_p=0.9, seed=i, logprobs=1),
        )
        for i in range(4)
    ]
    calm = engines(tiny).generate(requests)
    engine = engines(tiny)
    flush, steps = PlainDecoding._emit, []

    def failing(self, register, *, fed):
        steps.append(1)
        if len(steps) in (4, 11):
            raise OSError("the register cannot be read")
        flush(self, register, fed=fed)

    monkeypatch.setattr(PlainDecoding, "_emit", failing)
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in calm]
    assert [[each.token for each in result.logprobs] for result in results] == [list(r.token_ids) for r in calm]
    assert engine.stats()["recoveries"] == 2


def test_rows_that_fail_together_and_never_alone_are_stopped(engines, successor, ask, counted):
    """The composition is at fault: an error that says so, never a loop."""
    engine = engines(successor)
    plain = type(successor).__call__

    def together(model, ids, cache):
        model.device_failed = len(ids) > 1
        return plain(model, ids, cache)

    handles = [engine.submit(ask(20 * i, 30)) for i in range(4)]
    while engine.stats()["active_rows"] < 4:
        engine.step()
    type(successor).__call__ = together
    try:
        for handle in handles:
            with pytest.raises(CompositionError) as caught:
                handle.result(timeout=9)
            assert len(caught.value.request_ids) >= 2
    finally:
        type(successor).__call__ = plain
    assert engine.submit(ask(3, 4)).result().token_ids == counted(3, 4)


def test_a_guilty_row_that_is_cancelled_leaves_nobody_to_blame(engines, successor, ask, counted):
    """All failed with it and each half succeeds without it: that says nothing of the others."""
    engine = engines(successor)

    def consumer(event):
        if engine.stats()["retries"] >= 2:  # the first half is being built
            guilty.cancel()

    first = engine.submit(ask(0, 60, on_token=consumer))
    guilty = engine.submit(ask(37, 20))
    while engine.stats()["active_rows"] < 2:
        engine.step()
    successor.singular = (42,)
    assert str(guilty.result().finish_reason) == "cancelled"
    successor.singular = ()
    assert first.result().token_ids == counted(0, 60)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_device_that_fails_again_and_again_is_given_up(engines, successor, ask, counted, limit, monkeypatch):
    """`max_recoveries` in a row without a guilty row and without a result; the queue is answered by what comes next."""
    engine = engines(successor, max_recoveries=limit, pipeline=False)
    emit, calls = PlainDecoding._emit, []

    def failing(self, register, *, fed):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise OSError("again")
        emit(self, register, fed=fed)

    handles = [engine.submit(ask(20 * i, 40)) for i in range(3)]
    monkeypatch.setattr(PlainDecoding, "_emit", failing)
    for handle in handles:
        with pytest.raises(RecoveriesExhausted) as caught:
            handle.result(timeout=9)
        assert caught.value.limit == limit
    assert engine.stats()["recoveries"] == limit + 1
    monkeypatch.undo()
    assert engine.submit(ask(3, 4)).result().token_ids == counted(3, 4)


def test_a_cancelled_row_is_not_computed_again(engines, successor, ask, counted):
    engine = engines(successor)
    first, second = engine.submit(ask(0, 30)), engine.submit(ask(40, 30))
    while engine.stats()["active_rows"] < 2:
        engine.step()
    first.cancel()
    successor.fail_late = (successor.calls + 1,)
    assert second.result().token_ids == counted(40, 30)
    assert str(first.result().finish_reason) == "cancelled"


def test_a_first_token_is_read_before_the_step_behind_it_can_fail(engines, successor, ask):
    """A lone row whose first token waits for the next step: that step is guilty, the token is not."""
    got = []
    engine = engines(successor, early_first_token=False)
    successor.singular = (42,)
    handle = engine.submit(ask(41, 8, on_token=_collector(got, 0)))
    with pytest.raises(RuntimeError, match="the device failed"):
        handle.result()
    assert got == [(0, 42)]


def test_the_errors_of_rows_keep_no_frames(engines, successor, ask):
    """Who keeps an outcome would keep what ran when the device failed first, and with it the caches of a batch."""
    engine = engines(successor)
    handles = [engine.submit(ask(start, 8)) for start in (0, 37, 60)]
    successor.singular = (42,)
    while engine.step():
        pass
    first = handles[1].outcome.__context__
    assert "the device failed" in str(first)
    assert first.__traceback__ is None


def test_a_row_that_is_over_is_not_built_again(engines, successor, ask, counted, monkeypatch):
    """The device fails while a rejected row is dropped from its cohort: that row has its error already."""
    engine = engines(successor)
    successor.failing = (42,)
    keep, failed = PrefillCohort._keep, []

    def failing(self, survivors):
        if len(survivors) < len(self.rows) and not failed:
            failed.append(True)
            raise OSError("rows cannot be moved")
        keep(self, survivors)

    monkeypatch.setattr(PrefillCohort, "_keep", failing)
    handles = [engine.submit(ask(start, 4)) for start in (42, 10)]
    assert handles[1].result().token_ids == counted(10, 4)
    assert handles[0]._row.error is handles[0].outcome
    assert engine.stats()["retries"] == 4  # in place, each alone, and one to build the other again


def test_a_row_that_just_joined_is_built_again_once(engines, successor, ask, counted, monkeypatch):
    """It runs already and is still in its cohort."""
    engine = engines(successor)
    keep, failed = PrefillCohort._keep, []

    def failing(self, survivors):
        if self._group.rows and not failed:
            failed.append(True)
            raise OSError("rows cannot be moved")
        keep(self, survivors)

    monkeypatch.setattr(PrefillCohort, "_keep", failing)
    handles = [engine.submit(ask(start, 4)) for start in (0, 10)]
    assert [handle.result().token_ids for handle in handles] == [counted(0, 4), counted(10, 4)]
    assert engine.stats()["retries"] == 1
    assert failed
