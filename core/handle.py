"""A submitted request in its caller's hands: wait for it, or cancel it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from oarlock.core.result import Result
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.engine import Engine


class Handle:
    """One submitted request."""

    def __init__(self, engine: Engine, row: Row) -> None:
        self._engine = engine
        self._row = row

    @property
    def id(self) -> str:
        """The request's id."""
        return self._row.id

    @property
    def done(self) -> bool:
        """Whether the outcome stands."""
        return self._row.done.is_set()

    @property
    def outcome(self) -> Result | BaseException | None:
        """The result or the row's error, None while neither stands."""
        return self._row.outcome

    def cancel(self) -> None:
        """End the request at the next safe point with what it has so far. Legal from any thread, any number of times."""
        self._row.cancelled = True
        self._engine.kick()

    def interrupt(self, *, fault: BaseException | None = None, stop_at: int | None = None) -> None:
        """End the row at the next safe point: with ``fault``, or after ``stop_at`` of the tokens it has by then."""
        self._row.fault, self._row.stop_at = fault, stop_at  # before it is seen to be cancelled
        self.cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Return the result, or raise the row's own error.

        On the driving thread (or where nobody drives yet) this steps the engine; elsewhere it waits. Raises
        TimeoutError after ``timeout`` seconds.
        """
        self._engine.wait(self._row.done, timeout)
        outcome = self._row.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome


class Task:
    """Work that waits for a boundary between steps."""

    def __init__(self, engine: Engine, work: Callable[[], Any]) -> None:
        self._engine = engine
        self._work = work
        self._done = threading.Event()
        self._claim = threading.Lock()  # taken by whoever settles it, for good
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, unless it was settled; called by the driver. An error is its caller's."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._value = self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to whoever asked
            self._error = error
        self._done.set()

    def fail(self, error: BaseException) -> bool:
        """Settle without running; False where it runs already or is settled."""
        settles = self._claim.acquire(blocking=False)
        if settles:
            self._error = error
            self._done.set()
        return settles

    def cancel(self) -> bool:
        """Give up a task that waits, so that `result` raises CancelledError; False where it runs already or is settled.

        Legal from any thread. A task that has started always settles by itself.
        """
        return self.fail(CancelledError())

    def result(self, timeout: float | None = None) -> Any:
        """Return the work's value or raise its error; waits as `Handle.result` does."""
        self._engine.wait(self._done, timeout)
        if self._error is not None:
            raise self._error
        return self._value
