"""A submitted request in a coroutine's hands, and the inbox of events on their way to it. It drives nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import attrs

from oarlock.core.errors import SlowConsumer
from oarlock.core.handle import Handle
from oarlock.core.result import Result, TokenEvent

MAX_UNREAD = 256
"""Events that may wait for a consumer before the time it takes is looked at."""


class Inbox:
    """Events on their way from the driving thread to one consumer on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.queue: asyncio.Queue[TokenEvent | BaseException | None] = asyncio.Queue()
        self._loop = loop
        self._seconds = seconds
        self._unread = 0
        self._taken_at = time.monotonic()

    def put(self, event: TokenEvent) -> None:
        """Called on the driving thread. Raises `errors.SlowConsumer`, which rejects the event's row alone."""
        late = time.monotonic() - self._taken_at
        if event.token is not None and self._unread >= MAX_UNREAD and late > self._seconds:
            raise SlowConsumer(event.request_id, self._seconds, self._unread)
        if not self._unread:
            self._taken_at = time.monotonic()
        self._unread += 1
        self._loop.call_soon_threadsafe(self.queue.put_nowait, event)

    def end(self, error: BaseException | None) -> None:
        """Called on the driving thread once the outcome stands."""
        self._loop.call_soon_threadsafe(self.queue.put_nowait, error)

    async def take(self) -> TokenEvent | BaseException | None:
        """Return the next event, or how a row ended."""
        item = await self.queue.get()
        if isinstance(item, TokenEvent):
            self._unread -= 1
            self._taken_at = time.monotonic()
        return item


@attrs.define(eq=False)
class AsyncHandle:
    """One submitted request, awaited instead of waited for."""

    _handle: Handle
    _ended: asyncio.Future[None]
    _inbox: Inbox | None = None
    _pump: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self._handle.id

    @property
    def done(self) -> bool:
        """Whether the outcome stands."""
        return self._handle.done

    def cancel(self) -> None:
        """End the request at the next safe point with what it has so far."""
        self._handle.cancel()

    async def result(self) -> Result:
        """Return the result or raise the row's own error. A cancelled coroutine cancels its request."""
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self._handle.cancel()
            raise
        if self._pump is not None:
            await asyncio.shield(self._pump)
        return self._handle.result()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yield the row's events, once, where it was submitted to be listened to; how it ended is `result`'s to say."""
        if self._inbox is None:
            msg = f"request {self.id!r} was not submitted with listen=True, so nobody kept its events"
            raise RuntimeError(msg)
        while isinstance(item := await self._inbox.take(), TokenEvent):
            yield item
