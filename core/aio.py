"""AsyncEngine: the same engine on a thread of its own, for coroutines. It schedules nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core.aio_handle import AsyncHandle, Inbox
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidParameter
from oarlock.core.handle import Handle
from oarlock.core.layers import evaluate, evaluate_plugins
from oarlock.core.request import Request
from oarlock.core.result import Result, TokenEvent


class AsyncEngine:
    """An engine that a dedicated thread loads, drives and closes; coroutines submit to it and read from it.

    ``consumer_timeout`` (seconds): a consumer that leaves more than `aio_handle.MAX_UNREAD` events waiting and takes none for so
    long loses its own row. A coroutine ``on_token`` is awaited on the loop that submitted it.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, consumer_timeout: float = 30.0, **options: Any) -> None:
        """Bind ``model`` on the engine's thread; ``options`` are those of `Engine`. Blocks until it is bound."""
        evaluate(model)
        evaluate_plugins(options.get("plugins", ()))
        self._start(lambda: Engine(model, tokenizer, **options), consumer_timeout)

    @classmethod
    async def load(cls, source: str | PathLike[str], *, consumer_timeout: float = 30.0, **options: Any) -> AsyncEngine:
        """Load and bind on the engine's thread; see `Engine.load`."""
        self = cls.__new__(cls)
        await asyncio.to_thread(self._start, lambda: Engine.load(source, **options), consumer_timeout)
        return self

    @classmethod
    def around(cls, make: Callable[[], Engine], *, consumer_timeout: float = 30.0) -> AsyncEngine:
        """Return the engine that ``make`` returns, called on the thread that drives it. Blocks until it does."""
        self = cls.__new__(cls)
        self._start(make, consumer_timeout)
        return self

    def _start(self, make: Callable[[], Engine], consumer_timeout: float) -> None:
        self._consumer_timeout = consumer_timeout
        self._pumps: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        made: list[Engine | BaseException] = []

        def drive() -> None:
            try:
                made.append(make())
            except BaseException as error:  # noqa: BLE001 - raised where the engine was asked for
                made.append(error)
            ready.set()
            try:
                if isinstance(made[0], Engine):
                    _drive(made[0])
            finally:
                # mlx 0.32 aborts the process at exit for a thread that ended with streams; remove when it does not
                mx.clear_streams()

        self._thread = threading.Thread(target=drive, name="oarlock", daemon=True)
        self._thread.start()
        ready.wait()
        if isinstance(made[0], BaseException):
            raise made[0]
        self._engine = made[0]
        self._finalizer = weakref.finalize(self, _shut, self._engine, self._thread)

    @property
    def engine(self) -> Engine:
        """The engine behind; its ``submit``, ``stats``, ``hold`` and ``release`` are legal from any thread."""
        return self._engine

    @property
    def alive(self) -> bool:
        """Whether the engine's thread takes work."""
        return self._thread.is_alive() and not self._engine.closed

    async def submit(self, request: Request, *, listen: bool = False) -> AsyncHandle:
        """Queue a request; raises at once what `Engine.submit` raises.

        With ``listen`` the handle is an asynchronous iterator over the row's events, which must be read.
        """
        if request.on_token is not None and inspect.iscoroutinefunction(request.on_token):
            if listen:
                raise InvalidParameter("listen", listen, "False beside a coroutine on_token")
            inbox = Inbox(asyncio.get_running_loop(), self._consumer_timeout)
            handle = await self._submit(attrs.evolve(request, on_token=None), inbox)
            pump = asyncio.create_task(_pump(inbox, request.on_token, handle))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
            handle._pump = pump
            return handle
        return await self._submit(
            request, Inbox(asyncio.get_running_loop(), self._consumer_timeout) if listen else None
        )

    async def _submit(self, request: Request, inbox: Inbox | None) -> AsyncHandle:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end(error: BaseException | None) -> None:
            if inbox is not None:
                inbox.end(error)
            loop.call_soon_threadsafe(_resolve, ended)

        submit = partial(self._engine.submit, request, events=inbox.put if inbox is not None else None, ended=end)
        return AsyncHandle(submit() if request.constraint is None else await _apart(submit), ended, inbox)

    async def generate(self, requests: Sequence[Request], *, return_errors: bool = False) -> list[Any]:
        """Run requests to their end and return their results in the order given; see `Engine.generate`."""
        limit = asyncio.Semaphore(self._engine.bound.config.scheduler.max_queued)

        async def run(request: Request) -> Result:
            async with limit:
                return await (await self.submit(request)).result()

        outcomes = await asyncio.gather(*map(run, requests), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not return_errors:
                raise outcome
        return outcomes

    async def stream(self, requests: Sequence[Request]) -> AsyncIterator[TokenEvent]:
        """Yield the events of ``requests`` as they come; leaving the iterator cancels what still runs."""
        inbox = Inbox(asyncio.get_running_loop(), self._consumer_timeout)
        handles: list[AsyncHandle] = []
        failed: BaseException | None = None
        waiting, running = deque(requests), 0
        try:
            while waiting or running:
                while waiting and running < self._engine.bound.config.scheduler.max_queued:
                    handles.append(await self._submit(waiting.popleft(), inbox))
                    running += 1
                item = await inbox.take()
                if isinstance(item, TokenEvent):
                    yield item
                else:
                    running -= 1
                    failed = failed or item
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()
        if failed is not None:
            raise failed

    async def run_at_boundary(self, task: Callable[[], Any]) -> Any:
        """Run ``task`` on the engine's thread between steps and return its value."""
        queued = self._engine.run_at_boundary(task)
        try:
            return await asyncio.to_thread(queued.result)
        except asyncio.CancelledError:
            queued.cancel()
            raise

    def hold(self) -> None:
        """Admit nothing more until `release`."""
        self._engine.hold()

    def release(self) -> None:
        """End a hold."""
        self._engine.release()

    def stats(self) -> dict[str, Any]:
        """Return gauges and counters; see `Engine.stats`."""
        return self._engine.stats()

    async def close(self) -> None:
        """Reject what is left, release everything and end the thread. Idempotent."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> AsyncEngine:
        """Return the engine."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()


def _drive(engine: Engine) -> None:
    """Step until closed, sleeping where nothing can be done. An error of the driver is logged; the next row is served."""
    while not engine.closed:
        with contextlib.suppress(Exception):  # every row was rejected with it already, and it is logged
            engine.step_or_sleep()
    engine.step()


def _shut(engine: Engine, thread: threading.Thread) -> None:
    """Close the engine and wait for its thread; also when the process ends without a close."""
    engine.close()
    thread.join()


async def _apart(submit: Callable[[], Handle]) -> Handle:
    """Submit on another thread: compiling a constraint can take a second, in which nobody on the loop would get a token."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_drop)
        raise


def _drop(submitting: asyncio.Future[Handle]) -> None:
    """Cancel a request whose submitter is gone."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _pump(inbox: Inbox, on_token: Callable[[TokenEvent], Any], handle: AsyncHandle) -> None:
    """Await a coroutine consumer for every token, in order; its False ends the row there, its error rejects it."""
    while isinstance(item := await inbox.take(), TokenEvent):
        if item.token is None:
            continue
        try:
            answer = await on_token(item)
        except Exception as error:  # noqa: BLE001 - a consumer may raise anything; it costs its own row
            handle._handle.interrupt(fault=error)
            return
        if answer is False:
            handle._handle.interrupt(stop_at=item.index + 1)
            return
