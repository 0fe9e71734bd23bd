"""Who is guilty when the device fails: everything in flight is dropped, and rows are built again by halves.

An error of evaluation belongs to the stream and not to the array that raised it: whatever was dispatched and not read
may hold zeros or stale numbers. So nothing is read any more. Every row is computed again from the tokens that were
delivered, and takes the steps that failed apart from the others before it runs with them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
import structlog

from oarlock.core.errors import CompositionError, RecoveriesExhausted
from oarlock.core.prefill import PrefillCohort
from oarlock.core.relief import newest_first

if TYPE_CHECKING:
    from oarlock.core.contracts.layout import BatchCache
    from oarlock.core.group import ExecutionGroup
    from oarlock.core.relief import Relief
    from oarlock.core.row import Row

_log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class Rebuild:
    """Builds rows again whose state cannot be trusted. What they emit on the way is delivered: nothing comes twice.

    At most 2 * log2(B) + 1 retries for each guilty row. Where the budget of bytes has no room for all of them at once they
    are built in portions, and who was proved waits in the queue. After ``limit`` recoveries in a row that found nobody guilty,
    without a request finished in between, it gives up with `errors.RecoveriesExhausted`.
    """

    relief: Relief
    conclude: Callable[[Row], None]
    limit: int
    _apart: list[tuple[list[Row], list[BatchCache]]] = attrs.field(factory=list, init=False)
    _blameless: int = attrs.field(default=0, init=False)
    _completed: int = attrs.field(default=0, init=False)

    @property
    def group(self) -> ExecutionGroup:
        """The running rows."""
        return self.relief.group

    @contextlib.contextmanager
    def contained(
        self, whose: ExecutionGroup | PrefillCohort, surrender: Callable[[], Sequence[Sequence[Row]]]
    ) -> Iterator[None]:
        """Let an error cost the rows that it must: those of ``whose`` that cannot run together, or all that are guilty.

        ``surrender`` drops all state and returns the rows that lost theirs.
        """
        try:
            yield
        except CompositionError as error:
            whose.fail(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self.run(surrender(), error.with_traceback(None))  # rows keep the errors, and these would keep the caches

    def run(self, suspects: Sequence[Sequence[Row]], error: Exception) -> None:
        """Build ``suspects`` again, set by set, and let those that can go on run together."""
        recovery = self.group.recovery
        recovery.recoveries += 1
        _log.warning("rebuilding", requests=[row.id for rows in suspects for row in rows], error=repr(error))
        if self.group.emitter.completed != self._completed:
            self._completed, self._blameless = self.group.emitter.completed, 0
        self._blameless += 1
        if self._blameless > self.limit:
            self._reject([row for rows in suspects for row in rows], RecoveriesExhausted(self.limit, error))
            return
        for row in (row for rows in suspects for row in rows):
            row.compiled = False  # it may have been the compiled step's
        for rows in self.relief.portions(suspects):
            self._make_room(rows)
            if not self._prove(rows):
                self._blameless = 0
        if self._apart:
            self._unite()

    def _prove(self, rows: Sequence[Row]) -> bool:
        """Build rows again, all of them, then by halves; False where guilty ones were found."""
        again = self._try(rows)
        if again is None:
            return True
        left = [row for row in rows if not row.over]
        if len(left) == 1:
            self._reject(left, again)
        elif left:
            middle = len(left) // 2
            halves = [self._prove(half) for half in (left[:middle], left[middle:])]
            if all(halves) and not any(row.over for row in left):
                self._stop(left, again)
        return False

    def _try(self, rows: Sequence[Row]) -> Exception | None:
        """Prefill rows and take two steps with nobody beside them: as many as were in flight. Return what went wrong."""
        self._set_apart()
        self.group.recovery.retries += 1
        cohort = PrefillCohort(self.group, self.conclude)
        cohort.eager = True  # what the step behind a first token does must not cost that token
        try:
            for row in rows:
                if not cohort.takes(row):
                    _exhaust(cohort)
                cohort.admit(row)
            _exhaust(cohort)
            if self.group.rows:
                self.group.advance()
                self.group.flush()
            if self.group.rows:
                self.group.evaluate()
        except Exception as again:  # noqa: BLE001 - whatever it is, it is these rows'
            cohort.surrender()
            self.group.surrender()
            mx.clear_cache()
            return again.with_traceback(None)
        return None

    def _make_room(self, rows: Sequence[Row]) -> None:
        """Let proved rows wait in the queue where ``rows`` cannot be built beside them."""
        proved = [*self.group.rows, *(row for apart, _ in self._apart for row in apart)]
        if proved and not self.relief.budget.rebuilds([*proved, *rows]):
            self.group.detach()
            self._apart = []
            for row in newest_first(proved):
                self.relief.preempt(row)

    def _set_apart(self) -> None:
        """Put the rows that are proved aside while others are tried."""
        if self.group.rows:
            self._apart.append(self.group.detach())

    def _unite(self) -> None:
        """Let all proved rows run together."""
        self._set_apart()
        apart, self._apart = self._apart, []
        for rows, caches in apart:
            for place, row in enumerate(rows):
                try:
                    self.group.join(row, [cache.take([place]) for cache in caches])
                except Exception as error:  # noqa: BLE001 - a failed merge costs the joiner alone
                    self._reject([row], error)

    def _stop(self, rows: Sequence[Row], error: Exception) -> None:
        """Reject rows that fail together though none fails alone: they would fail together again."""
        composition = CompositionError([row.id for row in rows], error)
        for row in rows:
            row.error = composition
        self._set_apart()
        for running, caches in self._apart:
            stay = [place for place, row in enumerate(running) if not row.over]
            for row in running:
                if row.over:
                    self.conclude(row)
            for cache in caches:
                cache.keep(stay)
            running[:] = [running[place] for place in stay]

    def _reject(self, rows: Sequence[Row], error: BaseException) -> None:
        for row in rows:
            row.error = row.error or error
            self.conclude(row)


def _exhaust(cohort: PrefillCohort) -> None:
    """Prefill until every row has joined or is over."""
    while not cohort.advance():
        pass
