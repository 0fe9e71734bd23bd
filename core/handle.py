"""A submitted request in its caller's hands: wait for it, or cancel it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oarlock.core.request import Result
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
        self._engine.wake()

    def interrupt(self, *, fault: BaseException | None = None, stop_at: int | None = None) -> None:
        """Reject the row with ``fault``, or end it after ``stop_at`` delivered tokens, at its next one."""
        self._row.fault, self._row.stop_at = fault, stop_at
        self._engine.wake()

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
