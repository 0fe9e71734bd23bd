"""What one step did and where its host time went. It observes nobody; `observe` carries the record on."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import attrs
import mlx.core as mx

from oarlock.core.observe import StepRecord


def memory() -> dict[str, int]:
    """Return the allocator's bytes: in use, most ever in use, and kept for reuse. No sync."""
    used, peak, kept = mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()
    return {"active_bytes": used, "peak_bytes": peak, "cache_bytes": kept}


@attrs.define
class Times:
    """Host seconds of one step: building graphs, waiting for the device, delivering tokens."""

    build: float = 0.0
    read: float = 0.0
    emit: float = 0.0

    @contextlib.contextmanager
    def spent(self, on: str) -> Iterator[None]:
        """Add the time of what is done inside to "build", "read" or "emit"."""
        before = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, on, getattr(self, on) + time.perf_counter() - before)


@attrs.frozen
class Forwarded:
    """One forward, or one side of a mixed one: whose rows, how wide, and for which side."""

    ids: tuple[str, ...]
    width: int
    prefill: bool = attrs.field(kw_only=True)
    mixed: bool = attrs.field(default=False, kw_only=True)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.ids) * self.width


@attrs.define
class StepLog:
    """The forwards, membership changes and times since `start`. Draws in flight keep ``times``: it is never replaced.

    ``mixed_forwards`` are counted from the first step on, and so are ``verified_forwards`` with the tokens that rows took
    of them, and their drafts: how many were made and accepted as the first of a window, as the second, and so on.
    """

    clock: Callable[[], float] = time.perf_counter
    forwards: list[Forwarded] = attrs.field(factory=list)
    times: Times = attrs.field(factory=Times)
    joined: int = 0
    left: int = 0
    mixed_forwards: int = 0
    verified_forwards: int = 0
    verified_tokens: int = 0
    drafted: Counter[int] = attrs.field(factory=Counter)
    accepted: Counter[int] = attrs.field(factory=Counter)
    _index: int = attrs.field(default=-1, init=False)
    _gap: float = attrs.field(default=0.0, init=False)
    _began: float = attrs.field(default=0.0, init=False)
    _ended: float | None = attrs.field(default=None, init=False)

    def start(self) -> None:
        """Forget the step before."""
        self._index, self._began = self._index + 1, self.clock()
        self._gap = 0.0 if self._ended is None else self._began - self._ended
        self.forwards.clear()
        self.times.build = self.times.read = self.times.emit = 0.0
        self.joined = self.left = 0

    def decoded(self, ids: Iterable[str], width: int, *, mixed: bool) -> None:
        """Note a decode step's forward."""
        self.mixed_forwards += mixed
        self.forwards.append(Forwarded(tuple(ids), width, prefill=False, mixed=mixed))

    def record(self, *, busy: bool) -> StepRecord:
        """Return the record of the step that ends now. What follows is a gap where the engine is still ``busy``."""
        now = self.clock()
        self._ended = now if busy else None
        prefills = [done for done in self.forwards if done.prefill]
        decodes = [done for done in self.forwards if not done.prefill]
        return StepRecord(
            index=self._index,
            phase="prefill+decode" if prefills and decodes else "prefill" if prefills else "decode",
            decode_ids=decodes[-1].ids if decodes else (),
            prefill_ids=tuple(dict.fromkeys(name for done in prefills for name in done.ids)),
            prefill_tokens=sum(done.tokens for done in prefills),
            mixed_tokens=sum(done.tokens for done in self.forwards if done.mixed),
            joined=self.joined,
            left=self.left,
            build_ms=1e3 * self.times.build,
            read_ms=1e3 * self.times.read,
            emit_ms=1e3 * self.times.emit,
            gap_ms=1e3 * self._gap,
            total_ms=1e3 * (now - self._began),
            **memory(),
        )
