"""The decoding method `example`: one token a row and step, read before the next step is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.composition import on_every_layer
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.contracts.method import Draw, MethodHost
from oarlock.core.row import Row

OARLOCK_API = 1


@attrs.frozen
class ExampleOptions:
    """Fields of this class are the method's options in a config file; it has none yet."""


class ExampleDecoding:
    """The caches of the rows that run together. What a row is, and when it is over, the host knows."""

    window = 1
    """A step's tokens a row that may be taken back in part; 1: none is."""

    def __init__(self, host: MethodHost) -> None:
        """Begin without rows."""
        self._host = host
        self._caches: list[BatchCache] = []
        self._first: Draw | None = None

    @property
    def running_tokens(self) -> int:
        """Tokens that the next step forwards."""
        return len(self._host.rows)

    def caches(self) -> Sequence[BatchCache]:
        """Return the caches of the running rows, one a layer."""
        return self._caches

    def join(self, row: Row, caches: Sequence[BatchCache], first: Draw | None = None) -> None:
        """Take a row in behind the others, on every layer or on none; ``first``: its first token, unread."""
        self.flush()
        running = self._host.rows
        if not running:
            self._caches, self._first = list(caches), first
            return
        place = len(running)
        on_every_layer(self._caches, place, lambda cache, other: cache.join(other, [place]), caches)
        for each in (*running, row):
            each.merged = True

    def advance(self, work: Any = None) -> None:
        """Forward every row's last token, sample, read and deliver. A forward that raises has changed nothing."""
        self.flush()
        rows = self._host.rows
        if not any(live := [row.live for row in rows]):
            return
        ids = mx.array([[row.current] for row in rows], dtype=mx.uint32)  # (B, 1)
        ones = [1] * len(rows)
        logits = self._host.forward(self._caches, ids, ones, work)  # (B, 1, V)
        self._host.settle(self._caches, ids, ones, ones)
        for row in rows:
            row.fed.append(row.current)
        self._deliver(self._host.sample(logits[:, -1], live))

    def flush(self) -> None:
        """Deliver what is unread: a first token, since steps leave nothing."""
        first, self._first = self._first, None
        if first is not None:
            self._deliver(first)

    def keep(self, indices: Sequence[int], discard: bool) -> None:
        """Let only some rows stay, in this order."""
        if not indices:
            self.abort()
        for cache in self._caches:
            cache.keep(indices)
        if self._first is not None:
            self._first.keep(indices)

    def abort(self) -> None:
        """Drop everything."""
        self._caches, self._first = [], None

    def close(self) -> None:
        """Drop everything for good."""
        self.abort()

    def _deliver(self, draw: Draw) -> None:
        """Read: the one wait of a step. Constraints follow first, so that their masks are filled meanwhile."""
        drawn = draw.read()
        if self._host.constrained:
            self._host.follow(drawn)
        for row, each in zip(self._host.rows, drawn, strict=True):
            self._host.emit(row, each)
        self._host.retire()


@attrs.frozen
class Example:
    """Registers as `example`."""

    name: str = "example"
    options: type = ExampleOptions

    def open(self, host: MethodHost, options: ExampleOptions) -> ExampleDecoding:
        """Return the method for one group of rows."""
        return ExampleDecoding(host)


@hookimpl
def register_methods(register: Callable[[Any], None]) -> None:
    """Register `example`."""
    register(Example())
