"""Run any number of requests through an engine with few of them in memory. It prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oarlock.core.errors import QueueFull
from oarlock.core.request import Request
from oarlock.core.result import Result, TokenEvent

if TYPE_CHECKING:
    from oarlock.core.engine import Engine


class Job(Protocol):
    """Something with a request."""

    @property
    def request(self) -> Request:
        """What to run."""
        ...


J = TypeVar("J", bound=Job)


def drive(
    engine: Engine,
    jobs: Iterator[J],
    finished: Callable[[J, Result | BaseException], None],
    events: Callable[[TokenEvent], None] | None = None,
) -> None:
    """Take jobs as there is room, at most max_batch + max_queued at once, and report each outcome once.

    A request that is refused, and a row that fails, is reported like any other outcome; the rest go on.
    """
    scheduler = engine.bound.config.scheduler
    limit = scheduler.max_batch + scheduler.max_queued
    running: list[tuple[J, Any]] = []
    waiting: J | None = None
    while True:
        while len(running) < limit:
            job = waiting if waiting is not None else next(jobs, None)
            waiting = None
            if job is None:
                break
            try:
                handle = engine.submit(job.request, events=events)
            except QueueFull:
                waiting = job
                break
            except Exception as error:  # noqa: BLE001 - tokenizers and templates raise what they like
                finished(job, error)
                continue
            running.append((job, handle))
        if not running:
            return
        try:
            engine.step()
        except Exception:
            if engine.closed or not any(handle.done for _, handle in running):
                raise  # nothing goes on, or nobody got the error and it would come again and again
        over = [(job, handle) for job, handle in running if handle.done]
        running = [(job, handle) for job, handle in running if not handle.done]
        for job, handle in over:
            finished(job, handle.outcome)
