"""Rows' states to the state cache and back from it. It trusts no count that it has not checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import structlog

from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.result import FinishReason
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


@attrs.frozen
class _Entry:
    row: Row
    tokens: Sequence[int]
    states: Sequence[RowState]


class Publisher:
    """Stores rows' states once the device has answered for them, and holds them until then.

    A row ends while the step behind its last token is computed, and its state has that step's column. If the step fails
    the state is wrong, whoever reads it later.
    """

    def __init__(self, store: StateCache, identity: str, minimum: int) -> None:
        self.store = store
        self._identity = identity
        self._minimum = minimum
        self._held: list[_Entry] = []

    def boundary(self, row: Row, position: int) -> int | None:
        """Return the prompt position whose state is worth storing: all but the last token, where that is long enough."""
        found = row.prompt_tokens - 1
        if not row.reuses_prefix or found < max(1, self._minimum) or found <= position:
            return None
        return found if self.store.keeps(row) else None

    def take(self, caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int]) -> None:
        """Take the state of a row that is over; a short one that shared its forwards only where a session goes on."""
        short = row.merged and row.prompt_tokens < self._minimum and row.request.session is None
        if row.reason is not FinishReason.CANCELLED and not short:
            self.hold(row, tokens, extract(self.store, caches, place, row, tokens))

    def hold(self, row: Row, tokens: Sequence[int], states: Sequence[RowState] | None) -> None:
        """Take ``states``, which cover the first of ``tokens``; None is what `extract` dropped."""
        if states is not None:
            self._held.append(_Entry(row, tokens[: states[0].tokens], states))

    def awaited(self, row: Row) -> bool:
        """Return whether a state is held that ``row`` may begin with."""
        held = [each for each in self._held if each.tokens[0] == row.prompt_ids[0]] if row.reuses_prefix else []
        return any(self._key(each.row) == self._key(row) for each in held)

    @contextlib.contextmanager
    def settling(self) -> Iterator[Sequence[_Entry]]:
        """Store what is held now if the body, which reads what was dispatched so far, raises nothing; else drop it."""
        held, self._held = self._held, []
        yield held
        for each in held:
            if each.row.error is None and each.row.reason is not FinishReason.CANCELLED:
                self.store.publish(self._key(each.row), list(each.tokens), each.states)

    def settle(self) -> None:
        """Store what is held: nothing is in flight."""
        with self.settling():
            pass

    def evaluate(self) -> None:
        """Wait for what is held, and store it: no step will be read after it."""
        if self._held:
            with self.settling() as held:
                mx.eval([array for each in held for state in each.states for array in state.arrays().values()])

    def drop(self) -> None:
        """Forget what is held: it cannot be trusted."""
        self._held = []

    def _key(self, row: Row) -> dict[str, str]:
        return state_key(self._identity, row)
