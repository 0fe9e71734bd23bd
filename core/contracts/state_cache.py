"""The one service that holds rows' states outside a group: leases, prefix reuse, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from oarlock.core.contracts.layout import RowState
    from oarlock.core.result import Logprob
    from oarlock.core.row import Row


@attrs.frozen(kw_only=True)
class Checkpoint:
    """How far a generation was, for any process to go on from with the same draws.

    ``tokens`` were delivered, ``logprobs`` with them where the request asks for any. ``states``, one a layer, cover
    exactly the first of prompt and tokens, short of the last; there may be none: then all is computed again.
    """

    seed: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    cached_tokens: int = 0
    states: tuple[RowState, ...] = ()


class StateCache(Protocol):
    """Called by the driver only, at boundaries. An error costs the entry, never a row.

    No method may evaluate an array: what a stream failed at would be raised here, and be lost. States are stored when
    the device has answered for them.
    """

    name: str
    persists: bool
    """Whether `persist` does anything."""
    resumes: bool
    """Whether `checkpoint` and `resume` do anything; requests for checkpoints are refused without."""

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
        """Return the longest reusable prefix (at most ``len(tokens) - 1``) and one state per layer, or None.

        A state may be of more tokens where all of them can be cut to the prefix; see `composition.restored`.
        """
        ...

    def publish(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Store states that cover exactly ``tokens``."""
        ...

    def persist(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Store states, whose arrays share memory with nothing, beyond this process. It may return before they are."""
        ...

    def checkpoint(self, key: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """Store beyond this process how far the request ``key`` is, in place of what was stored of it before.

        It may return before that is done, and then waits for it when it is called with this key again.
        """
        ...

    def resume(self, key: Mapping[str, str]) -> Checkpoint | None:
        """Return what was stored last of a request, whoever did, or None. The whole key is compared."""
        ...

    def discard(self, key: Mapping[str, str]) -> None:
        """Forget a request that has ended, also what is not written yet."""
        ...

    def close(self) -> None:
        """Write what is not written yet and let go of everything. Called once, by the engine's end."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return counters: hits, misses, entries, bytes."""
        ...


class NullStateCache:
    """Admits everything and keeps nothing: what runs when none is configured, and a start for others."""

    name = "none"
    persists = False
    resumes = False

    def admit(self, row: Row) -> bool:
        """Return True."""
        return True

    def fits(self, row: Row) -> bool:
        """Return True."""
        return True

    def release(self, row: Row, completed: bool) -> None:
        """Do nothing."""

    def boundary(self) -> None:
        """Do nothing."""

    def keeps(self, row: Row) -> bool:
        """Return False."""
        return False

    def lookup(self, key: Mapping[str, str], tokens: Sequence[int]) -> tuple[int, Sequence[RowState]] | None:
        """Return None."""
        return None

    def publish(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Do nothing."""

    def persist(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Do nothing."""

    def checkpoint(self, key: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """Do nothing."""

    def resume(self, key: Mapping[str, str]) -> Checkpoint | None:
        """Return None."""
        return None

    def discard(self, key: Mapping[str, str]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def stats(self) -> Mapping[str, int]:
        """Return no counters."""
        return {}


class StateCacheFactory(Protocol):
    """What is registered under a name: it opens one state cache per engine."""

    name: str

    def open(self, bound: Any) -> StateCache:
        """Return an empty state cache for a bound model (`BoundModel`), whose config says what it may keep."""
        ...
