"""Who is guilty when a step fails for a group: retry in place, then halves. It rejects nobody itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from oarlock.core.errors import CompositionError
from oarlock.core.forward import ForwardFailed, forward
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

Mark = tuple[tuple[int, ...], tuple[int, ...]]
"""Tells forwards of one run apart: tokens per row in it, and before it."""


@attrs.define
class Recovery:
    """Counts what went wrong, and repeats steps whose forward raised while it was built.

    Such an error leaves the caches as they were, so nothing is computed again: the same step is tried once more in
    place; if it raises again, halves are tried in isolation down to single rows, at most 2 * log2(B) + 1 retries for
    each guilty row. Rows that fail alone are rejected with their own error. If nobody does, the composition is at
    fault and `errors.CompositionError` says so: never a loop.
    """

    bound: BoundModel
    recoveries: int = 0
    retries: int = 0

    def run(
        self,
        step: Callable[[], None],
        rows: Callable[[], Sequence[Row]],
        reject: Callable[[dict[int, Exception]], None],
    ) -> None:
        """Do ``step`` until it succeeds for the rows that remain.

        ``rows()`` are those taking part now; ``reject`` drops guilty ones by place. Raises what is not a forward's.
        """
        repeated: Mark | None = None
        while rows():
            failed = self._attempt(step, rows, repeated)
            if failed is None:
                return
            repeated, guilty = failed
            if guilty:
                reject(guilty)

    def _attempt(
        self, step: Callable[[], None], rows: Callable[[], Sequence[Row]], repeated: Mark | None
    ) -> tuple[Mark, dict[int, Exception]] | None:
        """Do ``step``; None where it succeeds, else what failed, and who is guilty where it fails again.

        The failure is this frame's alone: whoever keeps a row's error keeps the frames that still ran at the time.
        """
        try:
            step()
        except ForwardFailed as error:
            failure = error.with_traceback(None)
        else:
            return None
        forwarded = (tuple(failure.widths), failure.caches[0].tokens)
        if forwarded != repeated:  # the first time, or a later forward of a step that went further
            self.recoveries += 1
            self.retries += 1
            return forwarded, {}
        guilty = self.isolate(failure)
        if not guilty:
            raise CompositionError([row.id for row in rows()], failure.cause) from failure.cause
        return forwarded, guilty

    def isolate(self, failure: ForwardFailed) -> dict[int, Exception]:
        """Return the rows, by place, whose part of a failed forward fails alone, each with its error."""
        places = list(range(len(failure.widths)))
        if len(places) == 1:
            return {0: failure.cause}
        return self._halves(failure, places)

    def _halves(self, failure: ForwardFailed, places: Sequence[int]) -> dict[int, Exception]:
        middle = len(places) // 2
        return self._search(failure, places[:middle]) | self._search(failure, places[middle:])

    def _search(self, failure: ForwardFailed, places: Sequence[int]) -> dict[int, Exception]:
        error = self._try(failure, places)
        if error is None:
            return {}
        return {places[0]: error} if len(places) == 1 else self._halves(failure, places)

    def _try(self, failure: ForwardFailed, places: Sequence[int]) -> Exception | None:
        """Repeat the forward for some rows on copies of their caches; the copies are thrown away."""
        self.retries += 1
        widths = [failure.widths[i] for i in places]
        ids = failure.ids[mx.array(list(places), dtype=mx.int32), : max(widths)]
        rows = [failure.rows[i] for i in places] if failure.rows else ()
        try:
            forward(self.bound, [cache.take(places) for cache in failure.caches], ids, widths, rows)
        except ForwardFailed as again:
            return again.cause
        return None
