"""One thread drives an engine; the others submit, cancel, wait and close. Arrays stay with the driver."""

import random
import threading
import time
from typing import ClassVar

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from oarlock.core import Request, SamplingParams, hookimpl, layers
from oarlock.core.engine import Engine
from oarlock.core.errors import EngineClosed, WrongThread
from oarlock.core.handle import Handle
from oarlock.core.sampling import SamplerGroup
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache, FullLayout, FullOptions


def in_thread(work, name="other"):
    """Run ``work`` on a fresh thread and return what it returns, or raise what it raises."""
    box = []

    def run():
        try:
            box[:] = [work(), None]
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            box[:] = [None, error]

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if box[1] is not None:
        raise box[1]
    return box[0]


class Serving:
    """A thread that drives an engine until told to end."""

    def __init__(self, engine):
        self.engine, self.ends, self.error = engine, False, None
        self.thread = threading.Thread(target=self.run, name="driver")

    def run(self):
        try:
            while not self.ends:
                if not self.engine.step():
                    time.sleep(0.001)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def __enter__(self):
        self.thread.start()
        while self.engine._owner is None:
            pass
        return self

    def __exit__(self, *_):
        self.ends = True
        self.thread.join(60)
        assert self.error is None


def test_stepping_from_a_second_thread_names_both(engines, successor, ask):
    engine = engines(successor)
    engine.submit(ask(0, 3))
    engine.step()
    with pytest.raises(WrongThread) as caught:
        in_thread(engine.step, "stranger")
    assert (caught.value.owner, caught.value.caller) == (threading.current_thread().name, "stranger")
    for name in (caught.value.owner, "stranger"):
        assert name in str(caught.value)
    while engine.step():
        pass


def test_a_thread_that_has_ended_drives_no_more(engines, successor, ask, counted):
    """Work that another thread started, and left, is finished by the next that steps or waits."""
    engine = engines(successor)
    handle = in_thread(lambda: engine.submit(ask(0, 30)))
    in_thread(lambda: [engine.step() for _ in range(5)])
    assert handle.result(timeout=10).token_ids == counted(0, 30)


def test_whoever_waits_takes_over_when_the_driver_ends(engines, successor, ask, counted):
    """It ends while another thread waits: nobody waits for ever."""
    engine = engines(successor)
    with Serving(engine):
        engine.hold()
        handle = engine.submit(ask(0, 9))
        box = []
        waiter = threading.Thread(target=lambda: box.append(handle.result(timeout=30)))
        waiter.start()
    engine.release()
    waiter.join(40)
    assert box[0].token_ids == counted(0, 9)


def check_four_threads(model):
    """Built on A; submitted from B and C; iterated on D; closed on A."""
    prompts = models.prompts((9, 4, 12), 97)
    engine = Engine(model)
    first = in_thread(lambda: engine.submit(Request(prompt_ids=prompts[0], max_tokens=8)), "B")
    second = in_thread(lambda: engine.submit(Request(prompt_ids=prompts[1], max_tokens=8)), "C")
    request = Request(prompt_ids=prompts[2], max_tokens=8, sampling=SamplingParams(logprobs=1))
    events = in_thread(lambda: list(engine.stream([request])), "D")
    in_thread(lambda: [first.result(), second.result()], "E")
    rows = [first.result().token_ids, second.result().token_ids, tuple(event.token for event in events[:-1])]
    engine.close()
    assert rows == [models.serial(model, prompt, 8).tokens for prompt in prompts]
    assert all(type(event.logprob.logprob) is float for event in events[:-1])


@pytest.mark.fault("J-01")
def test_an_engine_is_built_driven_and_closed_on_different_threads(tiny):
    check_four_threads(tiny)


def lazy_model():
    """Its weights and a private array, such as a rope table, are not evaluated."""
    model = models.build("tiny-full")
    model.update(tree_map(lambda weight: weight * 1.0, model.parameters()))
    for module in model.modules():
        module._private = mx.arange(4) * 2.0
    return model


@pytest.mark.fault("J-02")
def test_a_model_with_lazy_arrays_is_evaluated_where_it_is_bound():
    """They carry the building thread: an engine that runs elsewhere must not meet them."""
    model = lazy_model()
    engine = Engine(model)
    assert in_thread(model.model._private.tolist) == [0, 2, 4, 6]
    engine.close()
    check_four_threads(lazy_model())


@pytest.mark.fault("J-01", twin=True)
@pytest.mark.fault("J-02", twin=True)
def test_a_bind_that_evaluates_nothing_is_found(monkeypatch):
    """The twin: the first step on another thread meets the building thread's arrays."""
    monkeypatch.setattr(layers, "evaluate", lambda model: None)
    model = lazy_model()
    config = {"scheduler": {"verify": False}}
    with pytest.raises(RuntimeError, match="Stream"), Engine(model, config=config) as engine:
        in_thread(lambda: engine.generate([Request(prompt_ids=[1, 2], max_tokens=2)]))


def test_result_waits_on_a_second_thread_while_the_first_drives(engines, successor, ask, counted):
    engine = engines(successor)
    with Serving(engine):
        results = [engine.submit(ask(i, 20)).result(timeout=30) for i in range(3)]
    assert [result.token_ids for result in results] == [counted(i, 20) for i in range(3)]


def test_many_threads_may_wait_where_nobody_drives(engines, successor, ask, counted):
    """One of them becomes the driver, the others wait; none is told that it is the wrong thread."""
    engine = engines(successor)
    handles, results, ready = [engine.submit(ask(i, 20)) for i in range(8)], {}, threading.Barrier(8)

    def wait(i):
        ready.wait()
        results[i] = handles[i].result(timeout=30)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert {i: result.token_ids for i, result in results.items()} == {i: counted(i, 20) for i in range(8)}


def test_waiting_on_a_second_thread_ends_with_the_timeout(engines, successor, ask):
    engine = engines(successor)
    with Serving(engine):
        engine.hold()
        handle = engine.submit(ask(0, 5))
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.05)
        engine.release()
        assert handle.result(timeout=30)


def test_close_from_another_thread_ends_the_drivers_rows(engines, successor, ask):
    engine = engines(successor)
    with Serving(engine):
        handle = engine.submit(ask(0, 10**6))
        engine.close()
        with pytest.raises(EngineClosed):
            handle.result(timeout=30)


class Spied(FullCache):
    """Notes every thread that touches a cache."""

    threads: ClassVar = set()

    def __getattribute__(self, name):
        if not name.startswith("__") and name != "threads":
            Spied.threads.add(threading.get_ident())
        return super().__getattribute__(name)


class SpyPlugin:
    @hookimpl
    def register_layouts(self, register):
        class Layout:
            name, kinds, options = "spied", frozenset({"full"}), FullOptions
            refuses, bytes_at = FullLayout().refuses, FullLayout().bytes_at

            def open(self, layer, options, *, slots, window):
                return Spied(slots)

            def restore(self, state):
                raise NotImplementedError

        register(Layout())


def check_cancels(model, seconds_per_thread=60):
    """Eight threads submit and cancel at random, 2,000 operations; survivors equal mlx-lm, caches see one thread."""
    prompts = models.prompts((12, 3, 7, 1), 97)
    serial = [models.serial(model, prompt, 12).tokens for prompt in prompts]
    config = {"scheduler": {"max_batch": 8, "max_queued": 4000, "prefill_chunk": 4}, "layouts": {"full": "spied"}}
    engine = Engine(model, config=config, plugins=[SpyPlugin()])
    outcomes, threads = [], []

    def work(seed):
        draw, mine = random.Random(seed), []
        for _ in range(250):
            if mine and draw.random() < 0.55:
                draw.choice(mine)[1].cancel()
            else:
                row = draw.randrange(len(prompts))
                mine.append((row, engine.submit(Request(prompt_ids=prompts[row], max_tokens=12))))
            if draw.random() < 0.1:
                engine.stats()
        outcomes.extend((row, handle.result(timeout=seconds_per_thread)) for row, handle in mine)

    Spied.threads = set()
    with Serving(engine) as serving:
        driver = serving.thread.ident
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * seconds_per_thread)
        assert not any(thread.is_alive() for thread in threads)
        assert Spied.threads == {driver}
        assert engine.stats()["recoveries"] == 0
    engine.close()
    finished = [(row, result) for row, result in outcomes if result.finish_reason != "cancelled"]
    print(f"{len(outcomes)} requests, {len(finished)} of them finished")
    assert finished
    assert len(outcomes) > 600
    for row, result in outcomes:
        assert result.token_ids == serial[row][: len(result.token_ids)]
    assert all(len(result.token_ids) == 12 for _, result in finished)


@pytest.mark.fault("J-04")
def test_cancels_from_eight_threads_touch_no_cache(tiny):
    check_cancels(tiny)


@pytest.mark.fault("J-04", twin=True)
def test_a_cancel_that_edits_the_batch_itself_is_found(tiny, monkeypatch):
    """The twin: it asks the running caches, as an abort on the caller's thread would."""
    plain = Handle.cancel

    def cancel(handle):
        plain(handle)
        handle._engine.bound.open_caches(slots=1, window=1)[0].add(1)

    monkeypatch.setattr(Handle, "cancel", cancel)
    with pytest.raises(AssertionError):
        check_cancels(tiny)


def check_draws(model):
    """Seeded: the same on every thread. Unseeded: different on every thread, whatever the threads' own state is."""

    def draw(seed):
        with Engine(model) as engine:
            sampling = SamplingParams(temperature=1.0, seed=seed)
            return engine.generate([Request(prompt_ids=[1, 2], max_tokens=10, sampling=sampling)])[0].token_ids

    mx.random.seed(0)
    seeded = [in_thread(lambda: draw(1)) for _ in range(3)] + [draw(1)]
    assert len(set(seeded)) == 1
    assert draw(2) != seeded[0]
    assert len({in_thread(lambda: draw(None)) for _ in range(3)} | {draw(None)}) == 4


@pytest.mark.fault("M-01")
def test_draws_do_not_depend_on_the_thread(tiny):
    check_draws(tiny)


@pytest.mark.fault("M-01", twin=True)
def test_keys_from_the_threads_own_generator_are_found(tiny, monkeypatch):
    """MLX's generator is per thread, and every new thread starts alike."""

    def keys(group, *_):
        return mx.random.randint(0, 2**31 - 1, (len(group._rows), 2)).astype(mx.uint32)

    monkeypatch.setattr(SamplerGroup, "_keys", keys)
    with pytest.raises(AssertionError):
        check_draws(tiny)
