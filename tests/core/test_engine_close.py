"""Close, hold, tasks between steps, the queue's limit, the lock, and what an engine leaves behind."""

import gc
import random
import threading
import weakref
from concurrent.futures import CancelledError

import mlx.core as mx
import pytest

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.errors import EngineClosed, QueueFull
from oarlock.core.prefill import PrefillCohort
from oarlock.core.row import Row


def test_close_rejects_what_is_left_and_can_be_repeated(engines, successor, ask):
    """Running, preparing and queued rows alike; a closed engine takes nothing."""
    engine = engines(successor, max_batch=1)
    running, queued = engine.submit(ask(0, 100)), engine.submit(ask(1, 5))
    engine.step()
    engine.step()
    assert engine.stats()["active_rows"] == 1
    engine.close()
    engine.close()
    for handle in (running, queued):
        with pytest.raises(EngineClosed):
            handle.result(timeout=1)
    for use in (
        lambda: engine.submit(ask(0, 1)),
        lambda: engine.run_at_boundary(print),
        lambda: engine.generate([ask(0, 1)]),
    ):
        with pytest.raises(EngineClosed):
            use()
    assert engine.stats()["active_rows"] == engine.stats()["kv_bytes"] == 0
    assert not engine.step()


def test_an_error_inside_the_with_block_closes_the_engine(successor, ask):
    handles = []

    def use():
        with Engine(successor) as engine:
            handles.append(engine.submit(ask(0, 50)))
            engine.step()
            raise KeyError

    with pytest.raises(KeyError):
        use()
    with pytest.raises(EngineClosed):
        handles[0].result()


@pytest.mark.fault("K-07")
def test_engines_that_come_and_go_leave_no_memory(tiny):
    """Built and closed 20 times, with rows running and an exception inside: memory is back to where it was."""

    check_memory(tiny)


def check_memory(model):
    def use():
        with Engine(model) as engine:
            for _ in range(4):
                engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=40))
            for _ in range(6):
                engine.step()
            raise ZeroDivisionError

    def once():
        with pytest.raises(ZeroDivisionError):
            use()

    def held():
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory() + mx.get_cache_memory()

    once()
    mx.clear_cache()
    before = held()
    for _ in range(20):
        once()
    assert held() <= before + 4096


@pytest.mark.fault("K-07", twin=True)
def test_an_engine_that_keeps_its_caches_is_found(tiny, monkeypatch):
    """The twin."""
    kept = []
    monkeypatch.setattr(Engine, "close", lambda engine: kept.append(engine))
    with pytest.raises(AssertionError):
        check_memory(tiny)


def test_hold_lets_what_runs_finish_and_admits_nothing_more(engines, successor, ask, counted):
    engine = engines(successor)
    first = engine.submit(ask(0, 4))
    engine.step()
    engine.hold()
    second = engine.submit(ask(10, 4))
    while engine.step():
        pass
    assert (first.done, second.done) == (True, False)
    assert not engine.step()
    assert engine.stats()["pending_rows"] == 1
    engine.release()
    assert second.result().token_ids == counted(10, 4)


def test_a_release_from_another_thread_wakes_the_driver(engines, successor, ask, counted):
    engine = engines(successor)
    engine.hold()
    handle = engine.submit(ask(0, 4))
    timer = threading.Timer(0.1, engine.release)
    timer.start()
    assert handle.result(timeout=10).token_ids == counted(0, 4)
    timer.join()


def test_tasks_run_between_steps_on_the_driving_thread(engines, successor, ask, counted):
    """Their value and their error go to whoever asked; rows are not disturbed; a hold keeps them waiting."""
    engine = engines(successor)
    handle = engine.submit(ask(0, 6))
    engine.step()
    where = engine.run_at_boundary(threading.get_ident)
    wrong = engine.run_at_boundary(lambda: 1 // 0)
    assert where.result(timeout=5) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        wrong.result(timeout=5)
    assert handle.result().token_ids == counted(0, 6)
    engine.hold()
    late = engine.run_at_boundary(lambda: "late")
    with pytest.raises(TimeoutError):
        late.result(timeout=0.05)
    engine.release()
    assert late.result(timeout=5) == "late"


def test_a_waiting_task_can_be_given_up_and_a_started_one_cannot(engines, successor):
    """16.2: it never runs; one that has started settles by itself, whoever gives it up meanwhile."""
    engine, ran = engines(successor), []
    engine.hold()
    waiting = engine.run_at_boundary(lambda: ran.append("waiting"))
    assert waiting.cancel()
    assert not waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result(timeout=5)
    started = engine.run_at_boundary(lambda: [started.cancel()])
    engine.release()
    assert started.result(timeout=5) == [False]
    assert not started.cancel()
    assert started.result(timeout=5) == [False]
    assert not ran


def test_a_full_queue_refuses_with_the_numbers(engines, successor, ask, counted):
    """Nothing is queued, and what was accepted goes on."""
    engine = engines(successor, max_batch=1, max_queued=3)
    handles = [engine.submit(ask(i, 2)) for i in range(3)]
    with pytest.raises(QueueFull) as caught:
        engine.submit(ask(9, 2))
    assert (caught.value.queued, caught.value.limit) == (3, 3)
    assert [handle.result().token_ids for handle in handles] == [counted(i, 2) for i in range(3)]
    assert engine.submit(ask(9, 2)).result().token_ids == counted(9, 2)


class Recorder:
    """A lock that remembers."""

    def __init__(self):
        self.held, self.times = False, 0

    def __enter__(self):
        assert not self.held
        self.held, self.times = True, self.times + 1

    def __exit__(self, *_):
        self.held = False


@pytest.mark.parametrize("end", ["idle", "close"])
def test_the_lock_is_held_from_the_first_admission_until_idle(engines, successor, end, ask):
    lock = Recorder()
    engine = engines(successor, lock=lock)
    engine.submit(ask(0, 3))
    assert not lock.held
    engine.step()
    assert lock.held
    engine.submit(ask(7, 30))
    engine.step()
    if end == "close":
        engine.close()
    else:
        while engine.step():
            assert lock.held
        engine.step()
    assert (lock.held, lock.times) == (False, 1)


# --- many requests ---------------------------------------------------------------------------------------------


def check_nothing_stays(engine, ask, draw):
    """500 requests, half of them cancelled at random moments: every row and every cohort dies."""
    alive = []
    for _ in range(25):
        handles = [engine.submit(ask(draw.randrange(97), draw.randint(1, 8))) for _ in range(20)]
        alive += [weakref.ref(handle._row) for handle in handles]
        for handle in draw.sample(handles, 10):
            for _ in range(draw.randrange(3)):
                engine.step()
            handle.cancel()
        while engine.step():
            pass
        assert all(handle.done for handle in handles)
    del handles, handle
    gc.collect()
    assert len(alive) == 500
    assert not [ref for ref in alive if ref() is not None]
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Row | PrefillCohort)]
    stats = engine.stats()
    assert (stats["active_rows"], stats["pending_rows"], stats["kv_bytes"]) == (0, 0, 0)


@pytest.mark.fault("K-04")
def test_500_requests_leave_nothing_behind(engines, successor, ask):
    check_nothing_stays(engines(successor, max_batch=4), ask, random.Random(3))


@pytest.mark.fault("K-04", twin=True)
def test_an_engine_that_remembers_its_rows_is_found(engines, successor, ask, monkeypatch):
    """The twin."""
    kept, settle = [], Row.settle
    monkeypatch.setattr(Row, "settle", lambda row, outcome: kept.append(row) or settle(row, outcome))
    with pytest.raises(AssertionError):
        check_nothing_stays(engines(successor, max_batch=4), ask, random.Random(3))
