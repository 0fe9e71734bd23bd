"""AsyncEngine: coroutines share steps, and each loses at most its own row."""

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from oarlock.core import FinishReason, Request, hookimpl
from oarlock.core.aio import AsyncEngine
from oarlock.core.aio_handle import MAX_UNREAD
from oarlock.core.errors import EmptyPrompt, EngineClosed, InvalidConstraint, QueueFull, SlowConsumer
from oarlock.core.testing import models

LONG = 100_000


class Steps:
    """Keeps every StepRecord."""

    def __init__(self):
        self.records = []

    @hookimpl
    def step_finished(self, step):
        self.records.append(step)


@pytest.fixture(scope="module")
def model():
    return models.build("tiny-full")


def ask(*ids, n=4, **fields):
    return Request(prompt_ids=ids, max_tokens=n, **fields)


def run(model, scenario, **options):
    """Run ``scenario(engine)`` on a fresh engine and loop."""

    async def main():
        async with AsyncEngine(model, positions=LONG, **options) as engine:
            return await scenario(engine)

    return asyncio.run(main())


def test_two_coroutines_that_submit_50_ms_apart_share_a_step(model):
    """The later one joins the batch of the earlier; both get what they get alone."""
    steps = Steps()

    async def scenario(engine):
        first = await engine.submit(ask(1, 2, 3, n=3000))

        async def later():
            await asyncio.sleep(0.05)
            return await (await engine.submit(ask(4, 5, n=20))).result()

        second = await later()
        first.cancel()
        return await first.result(), second

    first, second = run(model, scenario, plugins=[steps])
    assert max(record.decode_rows for record in steps.records) == 2
    assert any(record.decode_rows == 1 for record in steps.records)
    alone = models.serial(model, [4, 5], 20)
    models.compare([second.token_ids], [alone.tokens], [alone.gaps]).check()
    assert first.finish_reason is FinishReason.CANCELLED
    assert second.finish_reason is FinishReason.LENGTH


def test_a_coroutine_consumer_ends_its_row_exactly_where_it_says_false(model):
    """Tokens that were sampled while it made up its mind are taken back."""

    async def scenario(engine):
        seen = []

        async def on_token(event):
            seen.append(event.token)
            await asyncio.sleep(0.01)
            return len(seen) < 3

        result = await (await engine.submit(ask(1, 2, n=500, on_token=on_token))).result()
        return seen, result

    seen, result = run(model, scenario)
    assert list(result.token_ids) == seen
    assert (len(seen), result.usage.generated_tokens, result.finish_reason) == (3, 3, FinishReason.STOP)


def test_a_coroutine_consumer_that_raises_loses_its_own_row(model):
    async def scenario(engine):
        async def on_token(event):
            raise KeyError(event.index)

        bad = await engine.submit(ask(1, 2, n=500, on_token=on_token))
        good = await engine.submit(ask(3, n=50))
        return await asyncio.gather(bad.result(), good.result(), return_exceptions=True)

    bad, good = run(model, scenario)
    assert isinstance(bad, KeyError)
    assert len(good.token_ids) == 50


def test_a_cancelled_coroutine_cancels_its_request(model):
    """As asyncio does: the coroutine gets CancelledError, the row leaves the batch."""

    async def scenario(engine):
        handle = await engine.submit(ask(1, n=LONG - 1))
        task = asyncio.create_task(handle.result())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await handle.result()
        while engine.stats()["active_rows"]:  # the row is settled first, and leaves at the end of its step
            await asyncio.sleep(0.01)
        return result.finish_reason

    assert run(model, scenario) is FinishReason.CANCELLED


def test_generate_keeps_the_order_and_puts_errors_in_place(model):
    """More requests than the queue holds are fed as it empties."""

    async def scenario(engine):
        wrong = ask(1, on_token=lambda event: 1 / 0)
        requests = [ask(i % 90 + 1, n=2 + i % 3) for i in range(9)]
        outcomes = await engine.generate([*requests, wrong], return_errors=True)
        with pytest.raises(ZeroDivisionError):
            await engine.generate([wrong])
        return outcomes

    *results, error = run(model, scenario, config={"scheduler": {"max_queued": 2}})
    assert [len(result.token_ids) for result in results] == [2 + i % 3 for i in range(9)]
    assert isinstance(error, ZeroDivisionError)


def test_a_stream_feeds_the_queue_and_ends_each_request_once(model):
    async def scenario(engine):
        return [event async for event in engine.stream([ask(i + 1, n=3) for i in range(7)])]

    events = run(model, scenario, config={"scheduler": {"max_queued": 2, "max_batch": 2}})
    assert sum(event.finish_reason is not None for event in events) == 7
    assert sum(event.token is not None for event in events) == 21


def test_leaving_a_stream_cancels_what_still_runs(model):
    async def scenario(engine):
        stream = engine.stream([ask(1, n=LONG - 1), ask(2, n=LONG - 1)])
        async for event in stream:
            if event.index == 2:
                break
        await stream.aclose()
        while engine.stats()["active_rows"] + engine.stats()["pending_rows"]:
            await asyncio.sleep(0.01)

    run(model, scenario)


def test_a_consumer_that_does_not_keep_up_loses_its_own_row(model):
    """A stream that nobody reads is rejected once it is late; its neighbour is not."""

    async def scenario(engine):
        stream = engine.stream([ask(1, n=LONG - 1)])
        await anext(stream)
        neighbour = await (await engine.submit(ask(2, n=4 * MAX_UNREAD))).result()
        with pytest.raises(SlowConsumer, match=str(MAX_UNREAD)):
            async for _ in stream:
                pass
        return neighbour

    assert len(run(model, scenario, consumer_timeout=0.01).token_ids) == 4 * MAX_UNREAD


def test_what_is_refused_is_refused_at_once(model):
    async def scenario(engine):
        with pytest.raises(EmptyPrompt):
            await engine.submit(Request(prompt_ids=[]))
        engine.hold()
        await engine.submit(ask(1))
        with pytest.raises(QueueFull):
            await engine.submit(ask(1))
        engine.release()
        assert await engine.run_at_boundary(lambda: 7) == 7

    run(model, scenario, config={"scheduler": {"max_queued": 1}})


def test_a_cancelled_coroutine_gives_its_task_up(model):
    """16.2; the thread that waited for it ends, and the engine goes on."""
    ran = []

    async def scenario(engine):
        engine.hold()
        waiting = asyncio.create_task(engine.run_at_boundary(lambda: ran.append(1)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.release()
        assert await engine.run_at_boundary(lambda: 7) == 7

    run(model, scenario)
    assert not ran


def test_close_rejects_what_is_left_and_is_idempotent(model):
    async def main():
        engine = AsyncEngine(model, positions=LONG)
        handle = await engine.submit(ask(1, n=LONG - 1))
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineClosed):
            await handle.result()
        with pytest.raises(EngineClosed):
            await engine.submit(ask(1))

    asyncio.run(main())


def test_a_process_that_never_closes_its_engine_ends_cleanly():
    """mlx aborts a process in which a thread ended with streams of its own."""
    program = (
        "import asyncio\n"
        "from oarlock.core import Request\n"
        "from oarlock.core.aio import AsyncEngine\n"
        "from oarlock.core.testing import models\n"
        "async def main():\n"
        "    engine = AsyncEngine(models.build('tiny-full'), positions=99)\n"
        "    print(len((await (await engine.submit(Request(prompt_ids=[1], max_tokens=3))).result()).token_ids))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


def test_an_engine_that_cannot_be_made_says_why_where_it_was_asked_for(model):
    with pytest.raises(LookupError, match="no_such_policy"):
        AsyncEngine(model, config={"scheduler": {"policy": "no_such_policy"}})
    with pytest.raises(FileNotFoundError):
        asyncio.run(AsyncEngine.load("/nowhere/at/all"))


class Slow:
    """Registers as ``slow``: a constraint that allows everything, and takes until ``may`` to be compiled."""

    name = "slow"

    def __init__(self):
        self.may, self.opened = threading.Event(), 0

    def open(self, spec, tokenizer, request):
        assert self.may.wait(20)
        self.opened += 1
        if spec != "good":
            msg = "3:1: nothing that could be compiled"
            raise ValueError(msg)
        return SimpleNamespace(
            terminated=False,
            accept=lambda token: None,
            ready=lambda: None,
            mask=lambda: np.ones(97, dtype=bool),
            forced=lambda: (),
        )

    @hookimpl
    def register_constraints(self, register):
        register(self)


def test_nobody_waits_while_a_constraint_is_compiled(model):
    """The loop goes on and other requests are answered; then the submitter gets its handle, or the refusal."""
    slow = Slow()

    async def scenario(engine):
        good = asyncio.create_task(engine.submit(ask(1, 2, n=6, constraint={"slow": "good"})))
        bad = asyncio.create_task(engine.submit(ask(1, 2, constraint={"slow": "bad"})))
        other = await (await engine.submit(ask(3, 4, n=6))).result()
        assert not good.done()
        slow.may.set()
        with pytest.raises(InvalidConstraint, match="3:1: nothing"):
            await bad
        return other, await (await good).result()

    results = run(model, scenario, plugins=[slow])
    assert [len(result.token_ids) for result in results] == [6, 6]


def test_who_leaves_while_a_constraint_is_compiled_leaves_no_row(model):
    """Its request is cancelled as soon as it is there."""
    slow = Slow()

    async def scenario(engine):
        leaving = asyncio.create_task(engine.submit(ask(1, 2, n=LONG - 9, constraint={"slow": "good"})))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        slow.may.set()
        while not slow.opened or engine.stats()["active_rows"] or engine.stats()["pending_rows"]:
            await asyncio.sleep(0.01)
        return await (await engine.submit(ask(3, 4, n=6))).result()

    assert len(run(model, scenario, plugins=[slow]).token_ids) == 6
