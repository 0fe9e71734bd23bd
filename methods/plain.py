"""Plain decoding: one token per row and step, pipelined. It owns the unread register, not the rows' lifetimes.

The next step is built from tokens that nobody has read yet and dispatched; then the previous step's tokens are read
and emitted while it computes. Where rows are constrained by their own tokens these are read first, and emitted last;
what must follow them is forwarded with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.composition import on_every_layer
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.contracts.method import Draw, Drawn, MethodHost
from oarlock.core.row import Row

OARLOCK_API = 1


@attrs.frozen
class PlainOptions:
    """`plain` has no options."""


class PlainDecoding:
    """The rows' caches and the register: sampled, dispatched, unread."""

    window = 1

    def __init__(self, host: MethodHost) -> None:
        self._host = host
        self._caches: list[BatchCache] = []
        self._register: Draw | None = None
        self._pipeline = host.config.scheduler.pipeline

    @property
    def running_tokens(self) -> int:
        """One token per row: what must follow is not forwarded in a step that takes work along."""
        return len(self._host.rows)

    def caches(self) -> Sequence[BatchCache]:
        """Return the caches of the running rows."""
        return self._caches

    def join(self, row: Row, caches: Sequence[BatchCache], first: Draw | None = None) -> None:
        """Adopt a lone row's caches by reference, or copy them into the next slots."""
        self.flush()
        running = self._host.rows
        if not running:
            self._caches = list(caches)
            self._register = first
            return
        _join_all(self._caches, caches, len(running))
        for each in (*running, row):
            each.merged = True

    def advance(self, work: Any = None) -> None:
        """Build and dispatch the next step, then read and emit the previous one; constrained rows have it read first."""
        previous = self._register
        drawn: Sequence[Drawn] = ()
        spans: Sequence[Sequence[int]] = ()
        if self._host.constrained:
            if previous is not None:
                self._host.follow(drawn := previous.read())
            spans = self._spans(work)
        live = [row.live for row in self._host.rows]
        if any(live):
            self._register = self._step(previous, live, work, spans)
            if previous is None:
                for row in self._host.rows:
                    row.fed.append(row.current)
        else:
            self._register = None
        if drawn or spans:
            self._deliver(drawn, spans, fed=self._register is not None)
        elif previous is not None:
            self._emit(previous, fed=self._register is not None)
        if not self._pipeline:
            self.flush()

    def flush(self) -> None:
        """Read and emit what is unread. Its tokens are fed later, as each row's current one."""
        register, self._register = self._register, None
        if register is not None:
            self._emit(register, fed=False)

    def keep(self, indices: Sequence[int], discard: bool) -> None:
        """Filter caches and register in lockstep; without rows both are dropped."""
        if not indices:
            self.abort()
            return
        for cache in self._caches:
            cache.keep(indices)
        if self._register is not None:
            self._register.keep(indices)

    def abort(self) -> None:
        """Drop caches and register."""
        self._caches, self._register = [], None

    def close(self) -> None:
        """Drop everything."""
        self.abort()

    def _spans(self, work: Any) -> Sequence[Sequence[int]]:
        """Return what must follow all rows, as many tokens for each, or nothing: a step with ``work`` takes one a row."""
        if work is not None or any(row.matcher is None for row in self._host.rows):
            return ()
        spans = []
        for span in self._ahead():
            if not span:
                return ()
            spans.append(span)
        width = min(map(len, spans))
        return self._host.forced([span[:width] for span in spans])

    def _ahead(self) -> Iterator[Sequence[int]]:
        """Yield what must follow each row, as far as its storage takes it in one forward."""
        for tokens, span in zip(self._caches[0].tokens, self._host.known(), strict=True):
            yield span[: self._host.longest_append(tokens, 1 + len(span)) - 1]

    def _step(self, register: Draw | None, live: Sequence[bool], work: Any, spans: Sequence[Sequence[int]]) -> Draw:
        """Forward every row once, with what must follow, and sample the live ones. A forward that raises changes nothing."""
        rows = self._host.rows
        if register is not None:
            ids = register.tokens[:, None]  # (B, 1)
        else:
            ids = mx.array([[row.current] for row in rows], dtype=mx.uint32)
        widths = [1 + len(span) for span in spans] or [1] * len(rows)
        if spans:
            padded = [[*span, *[0] * (max(widths) - 1 - len(span))] for span in spans]
            ids = mx.concatenate([ids, mx.array(padded, dtype=mx.uint32)], axis=1)  # (B, W)
        logits = self._host.forward(self._caches, ids, widths, work)  # (B, W, V)
        self._host.settle(self._caches, ids, widths, widths)
        for row, span in zip(rows, spans, strict=bool(spans)):
            row.sampled += len(span)
        if min(widths) == max(widths):
            return self._host.sample(logits[:, -1], live)
        return self._host.sample(logits[mx.arange(len(rows)), mx.array(widths) - 1], live)

    def _emit(self, register: Draw, *, fed: bool) -> None:
        """Read a register and deliver it."""
        self._deliver(register.read(), (), fed=fed)

    def _deliver(self, drawn: Sequence[Drawn], spans: Sequence[Sequence[int]], *, fed: bool) -> None:
        """Account what entered the caches, deliver what was drawn and what had to follow, and drop the rows that are over."""
        for row, each in zip(self._host.rows, drawn, strict=bool(drawn)):
            if fed and each.real:
                row.fed.append(each.token)
            elif fed:
                row.fed_tainted = True
            self._host.emit(row, each)
        for row, span in zip(self._host.rows, spans, strict=bool(spans)):
            row.fed.extend(span if fed else ())
            for token in span:
                self._host.emit(row, Drawn(token, forced=True))
        self._host.retire()


def _join_all(caches: Sequence[BatchCache], joiner: Sequence[BatchCache], place: int) -> None:
    """Put one row behind the others on every layer, or on none."""
    on_every_layer(caches, place, lambda cache, other: cache.join(other, [place]), joiner)


@attrs.frozen
class Plain:
    """Registers as ``plain``."""

    name: str = "plain"
    options: type = PlainOptions

    def open(self, host: MethodHost, options: Any) -> PlainDecoding:
        """Return a method without rows."""
        return PlainDecoding(host)


@hookimpl
def register_methods(register: Callable[[object], None]) -> None:
    """Register `plain`."""
    register(Plain())
