"""How far rows are, for another process to go on from: when that is taken, and when it may be stored.

It writes nothing: the state cache does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.state_cache import Checkpoint, StateCache
from oarlock.core.row import Row
from oarlock.core.states import extract, owned, state_key

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

DECIDE = ("min_tokens", "stop", "stop_sequences", "include_stop", "constraint")
"""Fields of a request, beside its sampling and what a row resolves, that decide its tokens."""


def request_key(bound: BoundModel, row: Row) -> dict[str, str]:
    """Return what decides a row's tokens, with the id by which they are asked for again."""
    asked: dict[str, Any] = {name: getattr(row.request, name) for name in DECIDE}
    asked |= {"sampling": attrs.asdict(row.request.sampling, recurse=False), "method": row.key.method}
    asked |= {"max_tokens": row.max_tokens, "stop_ids": sorted(row.stop_ids)}
    prompt = " ".join(map(str, row.prompt_ids))
    text = json.dumps(asked, sort_keys=True, default=dict)
    return {**state_key(bound, row), "id": row.id, "prompt": prompt, "request": text}


class Checkpoints:
    """The states that were taken of rows and wait for the device's answer; and whose rows have ended."""

    def __init__(self, store: StateCache, bound: BoundModel) -> None:
        self._store = store
        self._bound = bound
        self._held: list[tuple[Row, Sequence[RowState]]] = []
        self._over: list[dict[str, str]] = []

    def take(self, caches: Sequence[BatchCache], rows: Sequence[Row]) -> None:
        """Take the states of the rows that are due. What they cover was delivered; what was drawn behind it was not."""
        for place, row in enumerate(rows):
            interval = row.request.checkpoint_interval
            if interval is None or row.over or not 1 <= row.checkpoint_at <= row.generated:
                continue
            states = extract(caches, place, row, row.coverage)
            if states is not None:
                self._held.append((row, owned(states)))
                row.checkpoint_at = (row.generated // interval + 1) * interval

    def prompt(self, caches: Sequence[BatchCache], place: int, row: Row, ids: Sequence[int]) -> None:
        """Store the state of a row whose prefill has come to the end of ``ids``, at once: this waits for the device."""
        states = owned(extract(caches, place, row, ids) or ())
        if states:
            mx.eval([array for state in states for array in state.arrays().values()])
            self._put(row, states)

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Store what was taken if the body, which reads what was dispatched behind it, raises nothing; else drop it."""
        held, self._held = self._held, []
        yield
        for row, states in held:
            if not row.over and len(row.known_ids) > states[0].tokens:
                self._put(row, states)

    def drop(self) -> None:
        """Forget what was taken: it cannot be trusted."""
        self._held = []

    def resume(self, row: Row, replay: Callable[[Row, Checkpoint], None]) -> Sequence[RowState]:
        """Give a new row the draws of an earlier process, ``replay`` what that delivered, and return what states it left."""
        interval = row.request.checkpoint_interval
        found = self._store.resume(request_key(self._bound, row)) if interval and not row.preempted else None
        if found is None or interval is None:
            return ()
        row.seed, row.cached_tokens = found.seed, found.cached_tokens
        row.checkpoint_at = (len(found.tokens) // interval + 1) * interval if found.tokens else 1
        replay(row, found)
        return found.states

    def ended(self, row: Row) -> None:
        """Note that a row has its result: what was stored of it goes once whoever waits has had time to take it."""
        self._over.append(request_key(self._bound, row))

    def discard(self) -> None:
        """Forget the rows that had ended before: called between steps."""
        over, self._over = self._over, []
        for key in over:
            self._store.discard(key)

    def _put(self, row: Row, states: Sequence[RowState]) -> None:
        at = Checkpoint(
            seed=row.seed,
            tokens=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            cached_tokens=row.cached_tokens,
            states=tuple(states),
        )
        self._store.checkpoint(request_key(self._bound, row), at)
