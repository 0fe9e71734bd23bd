"""One row on its way through prefill: where it stands, and which chunk is next. It forwards nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import attrs

from oarlock.core.contracts.layout import RowState
from oarlock.core.planner import Chunk, plan
from oarlock.core.recording import memory
from oarlock.core.row import Row
from oarlock.core.tracing import shared


@attrs.define(eq=False)
class Preparing:
    """A row on its way: where it stands, and the chunk that was planned for it.

    ``ids`` are its known tokens: the prompt, and what a row that lost its state has delivered.
    """

    row: Row
    ids: tuple[int, ...]
    position: int
    chunk_size: int
    snapshots: list[int] = attrs.field(factory=list)
    """Positions ahead at which the state is stored, in ascending order."""
    chunk: Chunk | None = None
    boundaries: list[list[RowState] | None] = attrs.field(factory=list)
    """The states of those that were reached."""
    stored: int = 0
    """Where its last checkpoint was, or where it began."""

    def due(self, chunk: Chunk) -> bool:
        """Return whether its state is to be stored at the end of ``chunk`` for another process; once if so."""
        interval = self.row.request.checkpoint_interval
        if interval is None or chunk.end - self.stored < interval:
            return False
        self.stored = chunk.end
        return True

    def planned(self, longest: Callable[[int, int], int], *, tail_split: bool) -> Chunk:
        """Return the chunk that is next; ``longest(position, width)`` says how wide it may be."""
        if self.chunk is None:
            size = longest(self.position, self.row.unmixed(self.position, self.chunk_size))
            snapshot = self.snapshots[len(self.boundaries)] if len(self.boundaries) < len(self.snapshots) else None
            self.chunk = plan(len(self.ids), self.position, size, tail_split=tail_split, snapshot=snapshot)
            self.row.spans.begin("prefill.chunk", start=self.chunk.start, end=self.chunk.end)
        return self.chunk


def ending(preparing: Sequence[Preparing], width: int) -> list[tuple[Preparing, Chunk]]:
    """Return whose chunk ends ``width`` tokens on, with that chunk."""
    planned = ((each, each.chunk) for each in preparing)
    return [(each, chunk) for each, chunk in planned if chunk is not None and each.position + width == chunk.end]


@contextlib.contextmanager
def spans(preparing: Sequence[Preparing], width: int) -> Iterator[None]:
    """Open the spans of a forward of ``width`` tokens a row."""
    rows = [each.row for each in preparing]
    zeros = [each.row for each, chunk in ending(preparing, width) if chunk.final]
    with shared(rows, "prefill.forward", width), shared(zeros, "token_zero.forward", width, **memory()):
        yield
