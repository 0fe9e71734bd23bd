"""Handing finished rows' states to the state cache. It trusts no count that it has not checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.row import Row

_log = structlog.get_logger(__name__)


class NullStateCache:
    """Admits everything and keeps nothing: what runs when no state cache is configured."""

    name = "none"

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

    def stats(self) -> Mapping[str, int]:
        """Return no counters."""
        return {}


def publish(
    store: StateCache, identity: str, caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int]
) -> bool:
    """Store the state of the row at ``place`` under exactly ``tokens``; False where it is dropped instead.

    Dropped: an unwanted or tainted state, and one that does not cover exactly these tokens on every layer. An error
    of the store costs the entry, never the row.
    """
    if row.fed_tainted or row.error is not None or not row.request.reuse_prefix or not caches:
        return False
    try:
        if not store.keeps(row):
            return False
        if any(cache.tokens[place] != len(tokens) for cache in caches):
            _log.warning("state_dropped", request=row.id, tokens=len(tokens), held=caches[0].tokens[place])
            return False
        states = [cache.extract(place) for cache in caches]
        if any(state.tokens != len(tokens) for state in states):
            return False
        store.publish({"identity": identity, "namespace": row.namespace}, list(tokens), states)
    except Exception as error:  # noqa: BLE001 - the entry is lost, the row is not
        _log.warning("state_not_stored", request=row.id, error=repr(error))
        return False
    return True
