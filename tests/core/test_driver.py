"""What the driver does when something around it goes wrong: state caches, consumers, locks, adapters, clean-up."""

from __future__ import annotations

import gc
import weakref

import attrs
import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.cleanup import attempt_all
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.engine import Engine
from oarlock.core.errors import EngineClosed, StepInsideStep
from oarlock.layouts.full import FullCache


class Broken(NullStateCache):
    """A state cache in which one call raises, always."""

    name = "broken"

    def __init__(self, call):
        self.calls = []
        for name in ("fits", "release", "boundary", "keeps", "lookup", "publish", "stats"):
            setattr(self, name, self._call(name, name == call, getattr(self, name)))

    def _call(self, name, raises, answer):
        def called(*given):
            self.calls.append(name)
            if raises:
                raise OSError(name)
            return True if name == "keeps" else answer(*given)

        return called

    def open(self, bound):
        return self


class Adapter:
    """Notes, and may not be entered."""

    def __init__(self, name, notes, fails=False):
        self.name, self.notes, self.fails = name, notes, fails

    def enter(self, model):
        if self.fails:
            raise OSError(self.name)
        self.notes.append(f"enter {self.name}")
        return lambda: self.notes.append(f"leave {self.name}")


@attrs.define(eq=False)
class Plugin:
    state_cache: object = None
    adapters: tuple = ()

    @hookimpl
    def register_state_caches(self, register):
        if self.state_cache is not None:
            register(self.state_cache)

    @hookimpl
    def register_adapters(self, register):
        for adapter in self.adapters:
            register(adapter)


# --- the state cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fits", "release", "boundary", "keeps", "lookup", "publish", "stats"])
@pytest.mark.parametrize("policy", ["decode_first", "fifo"])
def test_an_error_of_the_state_cache_costs_no_row(successor, ask, counted, call, policy):
    """DESIGN 7.7: whatever it is asked."""
    store = Broken(call)
    config = {
        "scheduler": {"verify": False, "policy": policy, "prefill_chunk": 2},
        "state_cache": {"name": "broken", "publish_min_tokens": 1},
    }
    with Engine(successor, config=config, plugins=[Plugin(store)]) as engine:
        requests = [ask(0, 4), Request(prompt_ids=[1, 2, 3, 4, 5], max_tokens=3), ask(30, 2)]
        results = engine.generate(requests)
        assert [result.token_ids for result in results] == [counted(0, 4), counted(5, 3), counted(30, 2)]
        assert engine.stats()["active_rows"] == 0
    assert call in store.calls


# --- consumers that reach back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("at", [0, 2])
def test_closing_from_a_consumer_takes_effect_at_the_end_of_the_step(engines, successor, ask, counted, at, early):
    """2.9: at the next safe boundary; in prefill and in decode, and nobody is left behind."""
    engine = engines(successor, early_first_token=early)
    taken = []

    def consumer(event):
        taken.append(event.token)
        if event.index == at:
            engine.close()
            assert engine.closed

    handles = [engine.submit(ask(0, 9, on_token=consumer)), engine.submit(ask(40, 9))]
    while engine.step():
        pass
    assert [type(handle.outcome) for handle in handles] == [EngineClosed] * 2
    assert tuple(taken) == counted(0, at + 1)
    assert engine.stats()["kv_bytes"] == 0
    with pytest.raises(EngineClosed):
        engine.submit(ask(0, 1))


def test_a_step_inside_a_step_is_refused(engines, successor, ask, counted):
    """From a consumer it costs the row that asked for it, from a task it goes to the task's caller."""
    engine = engines(successor)
    other = engine.submit(ask(40, 5))
    mine = engine.submit(ask(0, 5, on_token=lambda event: other.result()))
    task = engine.run_at_boundary(engine.step)
    assert other.result().token_ids == counted(40, 5)
    with pytest.raises(StepInsideStep, match="submit, cancel"):
        mine.result()
    with pytest.raises(StepInsideStep):
        task.result()


def test_a_consumer_may_submit_and_cancel(engines, successor, ask, counted):
    """What needs no step is allowed."""
    engine, late = engines(successor), []
    victim = engine.submit(ask(40, 50))

    def consumer(event):
        if event.index == 1:
            late.append(engine.submit(ask(20, 3)))
            victim.cancel()

    assert engine.submit(ask(0, 4, on_token=consumer)).result().token_ids == counted(0, 4)
    assert late[0].result().token_ids == counted(20, 3)
    assert victim.result().finish_reason == "cancelled"


def test_a_listener_that_raises_at_the_end_changes_nothing(engines, successor, ask, counted):
    """The outcome stands, and the other listener is still told."""
    told = []

    def events(event):
        if event.finish_reason is not None:
            raise OSError("gone")

    engine = engines(successor)
    handle = engine.submit(ask(0, 3), events=events, ended=told.append)
    assert handle.result().token_ids == counted(0, 3)
    assert told == [None]


# --- what an error keeps alive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "callback", "sampler"])
def test_the_error_of_a_row_keeps_no_cache_alive(engines, successor, ask, kind, monkeypatch):
    """Its traceback leads to frames, and those to the caches of everybody in the batch: they are emptied."""
    made, init = weakref.WeakSet(), FullCache.__init__

    def noted(self, *given):
        made.add(self)
        init(self, *given)

    def consumer(event):
        if kind == "callback" and event.index == 2:
            raise OSError("no")

    monkeypatch.setattr(FullCache, "__init__", noted)
    engine = engines(successor)
    made.clear()
    handles = [engine.submit(ask(0, 6, on_token=consumer)), engine.submit(ask(40, 6))]
    if kind == "sampler":
        monkeypatch.setattr(type(engine.bound.samplers[0].open([])), "sample", None)
    successor.failing = (3,) if kind == "forward" else ()
    while engine.step():
        pass
    assert any(isinstance(handle.outcome, Exception) for handle in handles)
    gc.collect()
    assert len(made) == 0


# --- admission, adapters, lock ---------------------------------------------------------------------------------------


def test_an_adapter_that_cannot_be_entered_costs_its_row(successor, ask, counted):
    """4.9: the old one is left already; the next row enters its own."""
    notes = []
    adapters = (Adapter("a", notes), Adapter("bad", notes, fails=True), Adapter("b", notes))
    config = {"scheduler": {"verify": False}}
    with Engine(successor, config=config, plugins=[Plugin(adapters=adapters)]) as engine:
        names = ("a", "a", "bad", "b")
        outcomes = engine.generate([ask(5, 2, adapter=name) for name in names], return_errors=True)
        engine.step()
    assert [getattr(outcome, "token_ids", None) for outcome in outcomes] == [counted(5, 2)] * 2 + [None, counted(5, 2)]
    assert isinstance(outcomes[2], OSError)
    assert notes == ["enter a", "leave a", "enter b", "leave b"]


def test_a_lock_that_cannot_be_taken_fails_the_rows_and_not_the_engine(successor, ask, counted):
    """2.11: the driver's own error rejects everybody; the next submit starts anew."""

    class Lock:
        broken = True

        def __enter__(self):
            if self.broken:
                raise OSError("lock")

        def __exit__(self, *error):
            pass

    lock = Lock()
    with Engine(successor, config={"scheduler": {"verify": False}}, lock=lock) as engine:
        handle, task = engine.submit(ask(0, 2)), engine.run_at_boundary(list)
        with pytest.raises(OSError, match="lock"):
            engine.step()
        assert isinstance(handle.outcome, OSError)
        with pytest.raises(OSError, match="lock"):
            task.result()
        lock.broken = False
        assert engine.submit(ask(0, 2)).result().token_ids == counted(0, 2)


# --- clean-up -------------------------------------------------------------------------------------------------------


def fail(error):
    raise error


def test_all_clean_up_steps_are_attempted():
    """10.13: one error is raised as it is, several as a group."""
    done = []
    attempt_all([lambda: done.append(1), lambda: done.append(2)])
    with pytest.raises(KeyError):
        attempt_all([lambda: fail(KeyError(1)), lambda: done.append(3)])
    with pytest.raises(BaseExceptionGroup) as caught:
        attempt_all([lambda: fail(KeyError(1)), lambda: done.append(4), lambda: fail(OSError(2))])
    assert [type(error) for error in caught.value.exceptions] == [KeyError, OSError]
    assert done == [1, 2, 3, 4]
