"""One row's state out of a group's caches, and caches of one row out of a state. It trusts no count unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import structlog

from oarlock.core.contracts.composition import SurrenderingCache, on_every_layer, restored
from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_log = structlog.get_logger(__name__)


def state_key(bound: BoundModel, row: Row) -> dict[str, str]:
    """Return what besides the tokens decides a row's state."""
    adapter = bound.adapters.identity(row.request.adapter or "")
    return {"model": bound.identity, "layouts": bound.stored, "adapter": adapter, "namespace": row.namespace}


def extract(
    caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int], *, last: bool = False
) -> list[RowState] | None:
    """Return the state of the row at ``place`` on every layer, or None where it is dropped.

    Dropped: a tainted state, and one that does not cover exactly ``tokens`` on every layer. ``last``: the row is the only
    one, and the caches are dropped after this.
    """
    if row.fed_tainted or row.error is not None or not caches:
        return None
    try:
        if any(cache.tokens[place] != len(tokens) for cache in caches):
            _log.warning("state_dropped", request_id=row.id, tokens=len(tokens), held=caches[0].tokens[place])
            return None
        states = [
            cache.surrender() if last and isinstance(cache, SurrenderingCache) else cache.extract(place)
            for cache in caches
        ]
    except Exception as error:  # noqa: BLE001 - the entry is lost, the row is not
        _log.warning("state_not_stored", request_id=row.id, error=repr(error))
        return None
    return states if all(state.tokens == len(tokens) for state in states) else None


def owned(states: Sequence[RowState]) -> list[RowState]:
    """Return states whose arrays lie in memory in their order and share no blocks: copied where they do not.

    What is copied is dispatched, not awaited.
    """
    found = []
    for state in states:
        arrays = {name: mx.contiguous(array) for name, array in state.arrays().items()}
        mx.async_eval(*arrays.values())
        found.append(RowState(layout=state.layout, tokens=state.tokens, arrays=arrays, meta=state.meta()))
    return found


def restore(
    store: StateCache, bound: BoundModel, row: Row, ids: Sequence[int], own: Sequence[RowState] = ()
) -> tuple[int, list[BatchCache] | None]:
    """Return the length and one-row caches of a stored prefix of ``ids``, or 0 and None.

    ``own`` are states of this very row that cover one; without any the store is asked. An error costs the prefix.
    """
    try:
        found = (own[0].tokens, own) if own else _found(store, bound, row, ids)
        if found is None:
            return 0, None
        length, states = found
        if not 0 < length < len(ids) or len(states) != len(bound.layers):
            return 0, None
        _, caches = restored(bound.layers, states, length)
    except Exception as error:  # noqa: BLE001 - computed again instead
        _log.warning("prefix_not_restored", request_id=row.id, error=repr(error))
        return 0, None
    if any(cache.tokens != (length,) for cache in caches) or not caches:
        _log.warning("prefix_not_restored", request_id=row.id, error=f"the stored state does not cover {length} tokens")
        return 0, None
    return length, caches


def _found(store: StateCache, bound: BoundModel, row: Row, ids: Sequence[int]) -> tuple[int, Sequence[RowState]] | None:
    if not row.reuses_prefix or len(ids) < 2:
        return None
    return store.lookup(state_key(bound, row), ids)


def add_row(
    bound: BoundModel, caches: list[BatchCache], place: int, restored: Sequence[BatchCache] | None, window: int = 1
) -> list[BatchCache]:
    """Return ``caches`` with a row at ``place``, behind the others, empty or restored: on every layer, or it raises.

    The first row opens them for forwards of ``window`` tokens that may be cut. A restored one has room for no more than
    one, and is moved where that is too little.
    """
    if not place:
        if restored is not None and window == 1:
            return list(restored)
        caches = bound.open_caches(slots=1, window=window)

    if restored is None:
        on_every_layer(caches, place, lambda cache, count: cache.add(count), [1] * len(caches))
    else:
        on_every_layer(caches, place, lambda cache, state: cache.join(state, [place]), restored)
    return caches
