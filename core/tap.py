"""What a model's head is given, handed to a proposer that listens: row by row, as it was computed. It reads nothing.

A forward holds it back until it is known which of its tokens are kept. Where nobody listens nothing is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.core as mx
import structlog

from oarlock.core.contracts.proposer import ListeningRows
from oarlock.core.head import seen
from oarlock.core.row import Row

LISTENED = "a proposer listens to hidden states, which are those of whole forwards"
"""Why steps are neither mixed nor compiled then."""
_log = structlog.get_logger(__name__)


@attrs.frozen(eq=False)
class _Held:
    """The states ``[B, W, D]`` of a forward that is not settled, and where its rows stood."""

    cache: Any
    rows: list[Row]
    starts: list[int]
    states: mx.array


@attrs.define(eq=False)
class Tap:
    """The end of a model's body at ``path``, "" where nobody asked for it, and who listens to it."""

    path: str = ""
    listener: ListeningRows | None = None
    _held: _Held | None = attrs.field(default=None, init=False)
    _heard: set[Row] = attrs.field(factory=set, init=False)

    @contextmanager
    def watching(self, caches: Sequence[Any], rows: Sequence[Row], starts: Sequence[int]) -> Iterator[None]:
        """Hold what the forward inside gives to the head, where somebody listens; what was held before is dropped."""
        self._held = None
        if self.listener is None or not rows:
            yield
            return
        with seen() as states:
            yield
        self._held = _Held(caches[0], list(rows), list(starts), states[-1])

    def settled(self, caches: Sequence[Any], kept: Sequence[int]) -> None:
        """Hand over the first ``kept[i]`` states of row i; an error of the listener is its last."""
        held, self._held = self._held, None
        if held is None or self.listener is None or held.cache is not caches[0]:
            return
        ended = {row for row in self._heard if row.done.is_set()}  # those that ended before they joined, too
        self._heard = (self._heard - ended) | set(held.rows)
        try:
            if ended:
                self.listener.drop(ended)
            for row, start, n, states in zip(held.rows, held.starts, kept, held.states, strict=True):
                if n:
                    self.listener.hear(row, start, states[:n])
        except Exception as error:  # noqa: BLE001 - whatever it is, rows can do without
            _log.warning("proposer_failed", error=repr(error))
            self.close()

    def close(self) -> None:
        """Nobody listens any more."""
        self.listener, self._held = None, None
        self._heard.clear()
