"""The state cache as the engine calls it: foreign code, a disk or a network, whose errors cost no row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from oarlock.core.contracts.layout import RowState
from oarlock.core.contracts.state_cache import Checkpoint, NullStateCache, StateCache
from oarlock.core.row import Row

_log = structlog.get_logger(__name__)


class SafeStateCache:
    """A state cache whose errors cost the entry, never a row: each is logged and answered as by one without entries.

    `admit` alone may raise: the row can never be admitted.
    """

    def __init__(self, store: StateCache) -> None:
        self.name = store.name
        self.persists, self.resumes = store.persists, store.resumes
        self.admit = store.admit
        self._store = store
        self._nothing = NullStateCache()

    def fits(self, row: Row) -> bool:
        """Return what `admit` would."""
        return bool(self._ask("fits", row))

    def release(self, row: Row, completed: bool) -> None:
        """Give the row's reservation back."""
        self._ask("release", row, completed)

    def boundary(self) -> None:
        """Reclaim."""
        self._ask("boundary")

    def keeps(self, row: Row) -> bool:
        """Return whether this row's state is wanted."""
        return bool(self._ask("keeps", row))

    def lookup(self, key: Mapping[str, str], tokens: Sequence[int]) -> tuple[int, Sequence[RowState]] | None:
        """Return the longest reusable prefix."""
        found: tuple[int, Sequence[RowState]] | None = self._ask("lookup", key, tokens)
        return found

    def publish(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Store states."""
        self._ask("publish", key, tokens, states)

    def persist(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Store states beyond this process."""
        self._ask("persist", key, tokens, states)

    def checkpoint(self, key: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """Store how far a request is."""
        self._ask("checkpoint", key, checkpoint)

    def resume(self, key: Mapping[str, str]) -> Checkpoint | None:
        """Return how far a request was."""
        found: Checkpoint | None = self._ask("resume", key)
        return found

    def discard(self, key: Mapping[str, str]) -> None:
        """Forget a request."""
        self._ask("discard", key)

    def close(self) -> None:
        """Let go of everything."""
        self._ask("close")

    def stats(self) -> Mapping[str, Any]:
        """Return counters."""
        return dict(self._ask("stats"))

    def _ask(self, call: str, *given: Any) -> Any:
        try:
            return getattr(self._store, call)(*given)
        except Exception as error:  # noqa: BLE001 - it is foreign code, maybe a disk or a network
            _log.warning("state_cache_failed", cache=self.name, call=call, error=repr(error))
            return getattr(self._nothing, call)(*given)
