"""The one service that holds rows' states outside a group: leases, prefix reuse, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from oarlock.core.contracts.layout import RowState
    from oarlock.core.row import Row


class StateCache(Protocol):
    """Called by the driver only, at boundaries. An error costs the entry, never a row."""

    name: str

    def admit(self, row: Row) -> bool:
        """Reserve and return True; return False where the row fits alone but not now; raise where it never fits."""
        ...

    def fits(self, row: Row) -> bool:
        """Return what `admit` would, reserving nothing."""
        ...

    def release(self, row: Row, completed: bool) -> None:
        """Give the row's reservation back. Idempotent."""
        ...

    def boundary(self) -> None:
        """Reclaim. Called before every preparation advance and every 256 decode advances."""
        ...

    def keeps(self, row: Row) -> bool:
        """Return whether this row's state is wanted. Depends on the request alone, not on a lease."""
        ...

    def lookup(self, key: Mapping[str, str], tokens: Sequence[int]) -> tuple[int, Sequence[RowState]] | None:
        """Return the longest reusable prefix (at most ``len(tokens) - 1``) and one state per layer, or None."""
        ...

    def publish(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Store states that cover exactly ``tokens``."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return counters: hits, misses, entries, bytes."""
        ...


class StateCacheFactory(Protocol):
    """What is registered under a name: it opens one state cache per engine."""

    name: str

    def open(self, bound: Any) -> StateCache:
        """Return an empty state cache for a bound model (`BoundModel`), whose config says what it may keep."""
        ...
