"""Rows' states to the state cache and back from it. It trusts no count that it has not checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.request import FinishReason
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

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


class SafeStateCache:
    """A state cache whose errors cost the entry, never a row: each is logged and answered as by one without entries.

    `admit` alone may raise: the row can never be admitted.
    """

    def __init__(self, store: StateCache) -> None:
        self.name = store.name
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

    def stats(self) -> Mapping[str, Any]:
        """Return counters."""
        return dict(self._ask("stats"))

    def _ask(self, call: str, *given: Any) -> Any:
        try:
            return getattr(self._store, call)(*given)
        except Exception as error:  # noqa: BLE001 - it is foreign code, maybe a disk or a network
            _log.warning("state_cache_failed", cache=self.name, call=call, error=repr(error))
            return getattr(self._nothing, call)(*given)


def state_key(identity: str, row: Row) -> dict[str, str]:
    """Return what besides the tokens decides a row's state."""
    return {"identity": identity, "adapter": row.request.adapter or "", "namespace": row.namespace}


def publish(
    store: StateCache, identity: str, caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int]
) -> None:
    """Store the state of the row at ``place`` under exactly ``tokens``, unless `extract` drops it."""
    states = extract(store, caches, place, row, tokens)
    if states is not None:
        store.publish(state_key(identity, row), list(tokens), states)


def extract(
    store: StateCache, caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int]
) -> list[RowState] | None:
    """Return the state of the row at ``place`` on every layer, or None where it is dropped.

    Dropped: an unwanted or tainted state, and one that does not cover exactly ``tokens`` on every layer.
    """
    if row.fed_tainted or row.error is not None or not row.reuses_prefix or not caches:
        return None
    try:
        if not store.keeps(row):
            return None
        if any(cache.tokens[place] != len(tokens) for cache in caches):
            _log.warning("state_dropped", request_id=row.id, tokens=len(tokens), held=caches[0].tokens[place])
            return None
        states = [cache.extract(place) for cache in caches]
    except Exception as error:  # noqa: BLE001 - the entry is lost, the row is not
        _log.warning("state_not_stored", request_id=row.id, error=repr(error))
        return None
    return states if all(state.tokens == len(tokens) for state in states) else None


def boundary(store: StateCache, row: Row, position: int, minimum: int) -> int | None:
    """Return the prompt position whose state is worth storing: all but the last token, where that is long enough."""
    found = row.prompt_tokens - 1
    if not row.reuses_prefix or found < max(1, minimum) or found <= position:
        return None
    return found if store.keeps(row) else None


def publish_boundary(store: StateCache, identity: str, row: Row, states: Sequence[RowState] | None) -> None:
    """Store the boundary's state of a row whose first token shows that it is sound."""
    if states is not None and row.error is None and row.reason is not FinishReason.CANCELLED:
        store.publish(state_key(identity, row), list(row.prompt_ids[: states[0].tokens]), states)


def restore(store: StateCache, bound: BoundModel, row: Row, ids: Sequence[int]) -> tuple[int, list[BatchCache] | None]:
    """Return the length and one-row caches of a stored prefix of ``ids``, or 0 and None.

    An error of the store costs the prefix.
    """
    if not row.reuses_prefix or len(ids) < 2:
        return 0, None
    try:
        found = store.lookup(state_key(bound.identity, row), ids)
        if found is None:
            return 0, None
        length, states = found
        if not 0 < length < len(ids) or len(states) != len(bound.layers):
            return 0, None
        caches = [layer.layout.restore(state) for layer, state in zip(bound.layers, states, strict=True)]
    except Exception as error:  # noqa: BLE001 - computed again instead
        _log.warning("prefix_not_restored", request_id=row.id, error=repr(error))
        return 0, None
    if any(cache.tokens != (length,) for cache in caches):
        _log.warning("prefix_not_restored", request_id=row.id, error="the stored state has another length")
        return 0, None
    return length, caches
