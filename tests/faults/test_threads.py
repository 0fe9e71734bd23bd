"""Kind J, through coroutines: one thread loads, drives and closes; idle means asleep."""

import asyncio
import time

import pytest

from oarlock.core.aio import AsyncEngine
from oarlock.core.driver import Driver

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
