"""Rows' states to the state cache: what is worth storing, and when it may be stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from oarlock.core.checkpoints import Checkpoints
from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.result import FinishReason
from oarlock.core.row import Row
from oarlock.core.states import extract, owned, state_key

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


@attrs.frozen
class _Entry:
    row: Row
    tokens: Sequence[int]
    states: Sequence[RowState]
    owned: Sequence[RowState] = ()
    """The same with arrays of their own, where they are to outlive the process."""


class Publisher:
    """Stores rows' states once the device has answered for them, and holds them until then.

    A row ends while the step behind its last token is computed, and its state has that step's column. If the step fails
    the state is wrong, whoever reads it later.
    """

    def __init__(self, store: StateCache, bound: BoundModel) -> None:
        self.store = store
        self.checkpoints = Checkpoints(store, bound)
        self._bound = bound
        self._minimum = bound.config.state_cache.publish_min_tokens
        self._held: list[_Entry] = []
        self._closed = False

    def boundaries(self, row: Row, position: int, waiting: Iterable[Row] = ()) -> list[int]:
        """Return the prompt positions ahead whose state is worth storing, where long enough, in ascending order.

        They are the last but one, and the longest prefix that a waiting row has too.
        """
        last, least = row.prompt_tokens - 1, max(1, self._minimum, position + 1)
        if last < least or not self._keeps(row):
            return []
        shared = [min(self._common(row, other), other.prompt_tokens - 1) for other in waiting]
        longest = max((n for n in shared if n < last), default=last)
        return sorted(n for n in {last, longest} if n >= least)

    def coming(self, preparing: Iterable[Row], row: Row) -> bool:
        """Return whether rows on their way are computing so much of what ``row`` begins with that it waits for it."""
        least = max(1, self._minimum)
        wanted = (other for other in preparing if self._keeps(other))
        return any(self._common(other, row) - other.cached_tokens >= least for other in wanted)

    def _common(self, row: Row, other: Row) -> int:
        """Return how many tokens ``other`` could begin with of ``row``'s state."""
        namespace = other.namespace if other.admitted_number else other.request.namespace  # a callable equals none
        if not (row.reuses_prefix and other.reuses_prefix) or self._key(row) != self._key(other) | {
            "namespace": namespace
        }:
            return 0
        pairs = enumerate(zip(row.prompt_ids, other.prompt_ids, strict=False))
        return next((i for i, (one, two) in pairs if one != two), min(row.prompt_tokens, other.prompt_tokens))

    def take(
        self, caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int], *, last: bool = False
    ) -> None:
        """Take the state of a row that is over; a short one that shared its forwards only where a session goes on.

        ``last``: the caches are dropped after this.
        """
        short = row.merged and row.prompt_tokens < self._minimum and row.request.session is None
        if row.reason is not FinishReason.CANCELLED and not short:
            self.hold(row, tokens, self.extract(caches, place, row, tokens, last=last and not row.merged))

    def extract(
        self, caches: Sequence[BatchCache], place: int, row: Row, tokens: Sequence[int], *, last: bool = False
    ) -> list[RowState] | None:
        """Return the state of a row that is worth storing; see `core.states.extract`."""
        return extract(caches, place, row, tokens, last=last) if self._keeps(row) else None

    def hold(self, row: Row, tokens: Sequence[int], *each: Sequence[RowState] | None) -> None:
        """Take states, each of which covers the first of ``tokens``; None is what `extract` dropped."""
        lasts = self.store.persists and self._bound.adapters.lasting(row.request.adapter or "")
        for states in filter(None, each):
            self._held.append(_Entry(row, tokens[: states[0].tokens], states, owned(states) if lasts else ()))

    def awaited(self, row: Row) -> bool:
        """Return whether a state is held that ``row`` may begin with."""
        held = [each for each in self._held if each.tokens[0] == row.prompt_ids[0]] if row.reuses_prefix else []
        return any(self._key(each.row) == self._key(row) for each in held)

    @contextlib.contextmanager
    def settling(self) -> Iterator[Sequence[_Entry]]:
        """Store what is held now if the body, which reads what was dispatched so far, raises nothing; else drop it."""
        held, self._held = self._held, []
        with self.checkpoints.settling():
            yield held
        for each in held:
            if each.row.error is None and each.row.reason is not FinishReason.CANCELLED:
                self.store.publish(self._key(each.row), list(each.tokens), each.states)
                if each.owned:
                    self.store.persist(self._key(each.row), list(each.tokens), each.owned)

    def settle(self) -> None:
        """Store what is held: nothing is in flight."""
        with self.settling():
            pass

    def evaluate(self) -> None:
        """Wait for what is held, and store it: no step will be read after it."""
        if self._held:
            with self.settling() as held:
                mx.eval([a for each in held for state in each.owned or each.states for a in state.arrays().values()])

    def drop(self) -> None:
        """Forget what is held: it cannot be trusted."""
        self._held = []
        self.checkpoints.drop()

    def close(self) -> None:
        """Let the state cache go, once."""
        if not self._closed:
            self._closed = True
            self.checkpoints.discard()
            self.store.close()

    def _keeps(self, row: Row) -> bool:
        return row.reuses_prefix and self.store.keeps(row)

    def _key(self, row: Row) -> dict[str, str]:
        return state_key(self._bound, row)
