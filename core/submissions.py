"""The requests of one caller: submitted as the queue empties, and watched until the last is done. It steps nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from oarlock.core.handle import Handle
from oarlock.core.request import Request


class Submissions:
    """Any number of requests, more than a queue takes among them. What a step asks of them does not grow with their number."""

    def __init__(self, requests: Iterable[Request], submit: Callable[[Request], Handle]) -> None:
        """Nothing is submitted yet."""
        self.handles: list[Handle] = []
        self._waiting, self._submit = deque(requests), submit
        self._open: deque[Handle] = deque()

    @property
    def done(self) -> bool:
        """Whether all were submitted and are over."""
        while self._open and self._open[0].done:
            self._open.popleft()
        return not self._waiting and not self._open

    @property
    def outcomes(self) -> list[Any]:
        """What each ended with, a result or an exception, in the order of the requests."""
        return [handle.outcome for handle in self.handles]

    def feed(self, takes: Callable[[], bool]) -> None:
        """Submit as long as ``takes()``. A request that is refused stays the next."""
        while self._waiting and takes():
            handle = self._submit(self._waiting[0])
            self._waiting.popleft()
            self._open.append(handle)
            self.handles.append(handle)

    def cancel(self) -> None:
        """Submit no more, and let what runs end."""
        self._waiting.clear()
        for handle in self._open:
            if not handle.done:
                handle.cancel()
