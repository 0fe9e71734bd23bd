"""Kind I: what fails costs the guilty row, a bounded number of attempts, and nobody else anything."""

import asyncio
from types import SimpleNamespace

import attrs
import pytest

from oarlock.core import SamplingParams, aio
from oarlock.core.aio import AsyncEngine
from oarlock.core.emission import Emitter
from oarlock.core.errors import NonFiniteLogits
from oarlock.core.recovery import Recovery
from oarlock.core.sampling import PendingDraw

POISON = 60
SCRIPTS = {1: [10, 11, 12, 13], 2: [20, 21, 22, 23], 3: [30, 31, 32, 33], 4: [40, 41, 42, 43]}


class Boom(Exception):
    """What a broken model raises."""


class Poisoned:
    """Raises in every forward that is fed the poison, and counts those forwards."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, cache):
        if POISON in ids.flatten().tolist():
            self.calls += 1
            raise Boom


def poisoned(bench, script, **settings):
    """An engine whose row 9 says ``script``; the poison is armed after bind."""
    model = bench.Scripted({**SCRIPTS, 9: script})
    engine = bench.engine(model, **settings)
    model.before = Poisoned()
    return engine, model.before


def says(first, n):
    return tuple((SCRIPTS[first] * n)[:n])


def check_a_bad_row_ends(bench, script, sampling):
    engine = bench.engine(bench.Scripted({**SCRIPTS, 9: script}))
    good = [bench.ask(1, n=12), bench.ask(2, n=12, sampling=SamplingParams(temperature=0.5, seed=1))]
    first, bad, second = bench.run(engine, [good[0], bench.ask(9, n=12, sampling=sampling), good[1]])
    assert isinstance(bad, NonFiniteLogits)
    assert (first, second) == (says(1, 12), says(2, 12))


SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=4)]


@pytest.mark.fault("I-02")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["NAN", "DEAD"])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_scores_that_are_no_numbers_end_their_row_at_once(bench, sampling, kind, step):
    check_a_bad_row_ends(bench, [50] * step + [getattr(bench, kind)] * 20, sampling)


@pytest.mark.fault("I-02", twin=True)
def test_twin_a_row_that_goes_on_with_token_0_is_noticed(bench, planted, monkeypatch):
    read = PendingDraw.read
    monkeypatch.setattr(PendingDraw, "read", lambda self: [attrs.evolve(d, finite=True) for d in read(self)])
    with planted():
        check_a_bad_row_ends(bench, [50, bench.NAN, bench.NAN], SamplingParams())


def check_a_failing_forward_costs_one_row(bench, step, max_batch):
    """Two other rows in flight and two queued; who comes later is answered too."""
    prompt = [9, POISON] if step is None else [9]
    engine, _ = poisoned(bench, [50] * (step or 0) + [POISON] * 20, max_batch=max_batch)
    requests = [bench.ask(1, n=9), bench.ask(2, n=9), bench.ask(*prompt, n=9), bench.ask(3, n=9), bench.ask(4, n=9)]
    *_, bad, third, fourth = outcomes = bench.run(engine, requests)
    assert isinstance(bad, Boom)
    assert [*outcomes[:2], third, fourth] == [says(first, 9) for first in (1, 2, 3, 4)]
    assert bench.run(engine, [bench.ask(2, n=4)]) == [says(2, 4)]
    assert engine.stats()["active_rows"] == engine.stats()["pending_rows"] == 0


@pytest.mark.fault("I-03")
@pytest.mark.parametrize("max_batch", [3, 16])
@pytest.mark.parametrize("step", [None, 0, 4], ids=["prefill", "first decode", "fifth decode"])
def test_a_failing_forward_costs_its_row_and_nobody_waits(bench, step, max_batch):
    check_a_failing_forward_costs_one_row(bench, step, max_batch)


@pytest.mark.fault("I-03", twin=True)
def test_twin_a_batch_that_fails_as_one_is_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(Recovery, "run", lambda self, step, rows, reject: step())
    with planted():
        check_a_failing_forward_costs_one_row(bench, 0, 16)


async def outlive_a_driver_error(bench):
    """An error of the driving thread itself is everybody's, at once; the next request is served."""
    async with AsyncEngine(bench.Scripted(SCRIPTS)) as engine:
        scheduler = engine.engine._scheduler
        waiting = [await engine.submit(bench.ask(first, n=10**6)) for first in (1, 2)]

        def fail(work):
            engine.engine._scheduler = scheduler
            raise Boom

        engine.engine._scheduler = SimpleNamespace(iterate=fail)
        for handle in waiting:
            with pytest.raises(Boom):
                await asyncio.wait_for(handle.result(), 5)
        again = await engine.submit(bench.ask(3, n=4))
        assert (await asyncio.wait_for(again.result(), 5)).token_ids == says(3, 4)


@pytest.mark.fault("I-03")
def test_the_driving_thread_outlives_its_errors(bench):
    asyncio.run(outlive_a_driver_error(bench))


@pytest.mark.fault("I-03", twin=True)
def test_twin_a_driving_thread_that_ends_leaves_everyone_waiting(bench, planted, monkeypatch):
    def once(engine):
        try:
            while not engine.closed:
                engine.step_or_sleep()
        except Boom:
            return

    monkeypatch.setattr(aio, "_drive", once)
    monkeypatch.setattr(asyncio, "wait_for", lambda awaitable, seconds: real_wait_for(awaitable, 0.3))
    with planted(TimeoutError):
        asyncio.run(outlive_a_driver_error(bench))


real_wait_for = asyncio.wait_for


def check_attempts_are_few(bench, rows):
    """At most 2 log2(B) + 1 retries for a guilty row, then the engine is idle."""
    engine, poison = poisoned(bench, [50, POISON])
    requests = [bench.ask(1 + i % 4, n=9) for i in range(rows - 1)] + [bench.ask(9, n=9)]
    outcomes = bench.run(engine, requests)
    assert sum(isinstance(outcome, Boom) for outcome in outcomes) == 1
    assert poison.calls <= 2 + 2 * (rows - 1).bit_length()
    assert engine.step() is False
    before = poison.calls
    engine.step()
    assert poison.calls == before


@pytest.mark.fault("I-04")
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_a_failing_step_is_repeated_a_few_times_and_no_more(bench, rows):
    check_attempts_are_few(bench, rows)


@pytest.mark.fault("I-04")
def test_a_model_that_always_fails_fails_its_rows_and_idles(bench):
    engine, poison = poisoned(bench, [50, POISON])
    model = engine.bound.model

    def always(ids, cache):
        poison.calls += 1
        raise Boom

    model.before = always
    outcomes = bench.run(engine, [bench.ask(1 + i % 4, n=9) for i in range(8)])
    assert all(isinstance(outcome, Boom) for outcome in outcomes)
    assert poison.calls <= 8 * (2 * 3 + 2)
    assert engine.step() is False
    model.before = None
    assert bench.run(engine, [bench.ask(1, n=4)]) == [says(1, 4)]


@pytest.mark.fault("I-04", twin=True)
def test_twin_an_engine_that_tries_again_for_ever_is_noticed(bench, planted, monkeypatch):
    run = Recovery.run

    def again(self, step, rows, reject):
        for _ in range(100):
            try:
                return step()
            except Exception:  # noqa: BLE001 - the planted fault
                continue
        return run(self, step, rows, reject)

    monkeypatch.setattr(Recovery, "run", again)
    with planted():
        check_attempts_are_few(bench, 4)


def check_a_consumer_costs_its_own_row(bench):
    """It raises at its third token: two are delivered, and the others reach their limits."""
    delivered = []

    def consumer(event):
        if event.index == 2:
            raise Boom
        delivered.append(event.token)

    requests = [bench.ask(1, n=9), bench.ask(2, n=9, on_token=consumer), bench.ask(3, n=9)]
    first, bad, third = bench.run(bench.engine(bench.Scripted(SCRIPTS)), requests)
    assert isinstance(bad, Boom)
    assert delivered == [20, 21]
    assert (first, third) == (says(1, 9), says(3, 9))


@pytest.mark.fault("I-05")
def test_a_consumer_that_raises_costs_its_own_row(bench):
    check_a_consumer_costs_its_own_row(bench)


@pytest.mark.fault("I-05")
def test_a_coroutine_that_raises_costs_its_own_row(bench):
    async def consumer(event):
        if event.index == 2:
            raise Boom

    async def run():
        async with AsyncEngine(bench.Scripted(SCRIPTS)) as engine:
            requests = [bench.ask(1, n=9), bench.ask(2, n=90, on_token=consumer), bench.ask(3, n=9)]
            return await engine.generate(requests, return_errors=True)

    first, bad, third = asyncio.run(run())
    assert isinstance(bad, Boom)
    assert (first.token_ids, third.token_ids) == (says(1, 9), says(3, 9))


@pytest.mark.fault("I-05", twin=True)
def test_twin_a_consumers_error_that_leaves_the_step_is_noticed(bench, planted, monkeypatch):
    def escape(self, row, error):
        raise error

    monkeypatch.setattr(Emitter, "_poison", escape)
    with planted():
        check_a_consumer_costs_its_own_row(bench)
