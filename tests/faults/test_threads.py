"""Kind J, through coroutines: one thread loads, drives and closes; idle means asleep."""

import asyncio
import time

import mlx.core as mx
import pytest
import structlog

from oarlock.core import SamplingParams, aio, hookimpl, layers
from oarlock.core.aio import AsyncEngine
from oarlock.core.driver import Driver
from oarlock.samplers.greedy import GreedyRows

SCRIPTS = {1: [10, 11, 12], 2: [20, 21, 22]}


@pytest.mark.fault("J-01")
def test_coroutines_and_threads_use_one_engine(bench):
    """Made here, submitted to from two threads and the loop, streamed on the loop, closed from a thread."""

    async def run():
        engine = AsyncEngine(bench.Scripted(SCRIPTS))
        async with engine:
            threads = [
                asyncio.to_thread(lambda n=n: engine.engine.submit(bench.ask(n, n=6)).result(20)) for n in SCRIPTS
            ]
            *results, tokens = await asyncio.gather(*threads, stream(engine))
        return [result.token_ids for result in results], tokens

    async def stream(engine):
        return [event.token async for event in engine.stream([bench.ask(2, n=6)])][:-1]

    rows, tokens = asyncio.run(run())
    assert rows == [(10, 11, 12) * 2, (20, 21, 22) * 2]
    assert tokens == [20, 21, 22] * 2


class ConstantRows(GreedyRows):
    """Adds a constant to the scores."""

    def __init__(self, constant):
        self.constant = constant

    def sample(self, logits, keys, rows=None):
        return super().sample(logits + self.constant, keys, rows)


class Constant:
    """A third party's sampler whose constant nobody has evaluated yet: token 5 wins."""

    name, is_argmax_invariant = "constant", False

    def __init__(self):
        self.tables = {"bias": [100.0 * (mx.arange(64) == 5)]}

    def handles(self, params):
        return params.temperature == 0.125

    def open(self, params):
        return ConstantRows(self.tables["bias"][0])


class ConstantPlugin:
    """Registers it."""

    def __init__(self):
        self.sampler = Constant()

    @hookimpl
    def register_samplers(self, register):
        register(self.sampler)


def check_constants(bench):
    """Made here, used on the thread that drives: by coroutines, and by whoever steps."""
    request = bench.ask(1, n=3, sampling=SamplingParams(temperature=0.125))

    async def run():
        async with AsyncEngine(bench.Scripted(SCRIPTS), plugins=[ConstantPlugin()]) as engine:
            return (await engine.generate([request]))[0].token_ids

    assert asyncio.run(run()) == (5, 5, 5)
    engine = bench.engine(bench.Scripted(SCRIPTS), plugins=[ConstantPlugin()], verify=False)
    assert bench.Worker(bench.run, engine, [request]).result() == [(5, 5, 5)]


@pytest.mark.fault("J-02")
def test_a_plugins_constants_are_evaluated_where_they_were_made(bench):
    check_constants(bench)


@pytest.mark.fault("J-02", twin=True)
def test_twin_constants_that_keep_their_thread_are_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(aio, "evaluate_plugins", lambda plugins: None)
    monkeypatch.setattr(layers, "evaluate_plugins", lambda plugins: None)
    with planted(RuntimeError):
        check_constants(bench)


@pytest.mark.fault("J-02")
def test_a_constant_that_another_thread_left_lazy_fails_nobody_who_does_not_use_it(bench):
    """A warning names the plugin; the engine binds, and rows of other samplers are answered."""
    plugin = ConstantPlugin()
    with structlog.testing.capture_logs() as lines:
        engine = bench.Worker(bench.engine, bench.Scripted(SCRIPTS), None, [plugin]).result()
    assert {line["event"] for line in lines if line["log_level"] == "warning"} == {"plugin_not_evaluated"}
    assert bench.run(engine, [bench.ask(1, n=3)]) == [(10, 11, 12)]


def idle_share(bench, seconds):
    """The share of a core that this process uses while an engine has nothing to do, by its CPU clock."""

    async def run():
        async with AsyncEngine(bench.Scripted(SCRIPTS)) as engine:
            await engine.generate([bench.ask(1, n=6)])
            await asyncio.sleep(0.1)
            before, began = time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            used = (time.process_time() - before) / (time.monotonic() - began)
            again = await engine.generate([bench.ask(2, n=3)])
            assert again[0].token_ids == (20, 21, 22)
            return used

    return asyncio.run(run())


@pytest.mark.fault("J-06")
def test_an_idle_engine_sleeps(bench):
    assert idle_share(bench, 1.0) < 0.05


@pytest.mark.fault("J-06", twin=True)
def test_twin_an_engine_that_polls_is_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(Driver, "sleep", lambda *_: None)
    with planted():
        assert idle_share(bench, 0.5) < 0.05
