"""The rows that decode together, and what a method is lent. It queues nothing and prefills nothing."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import structlog

from oarlock.core import forward as forwards
from oarlock.core.budget import Holding
from oarlock.core.compaction import compacted
from oarlock.core.compiled import CompiledRows
from oarlock.core.config import EngineConfig
from oarlock.core.constraints import ReadsFirst
from oarlock.core.contracts.constraint import MAX_FORCED
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.contracts.method import Draw, Drawn, StoringMethod
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.emission import Emitter
from oarlock.core.mixed import Work
from oarlock.core.pace import Pace
from oarlock.core.publication import Publisher
from oarlock.core.recording import StepLog
from oarlock.core.recovery import Recovery
from oarlock.core.result import FinishReason
from oarlock.core.row import Row
from oarlock.core.sampling import PendingDraw, SamplerGroup
from oarlock.core.windows import Windows

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_log = structlog.get_logger(__name__)
CLEAR_EVERY = 256
"""Decode advances between two clearings of the allocator's pool."""


class ExecutionGroup(ReadsFirst, Windows):
    """Running rows of one compatibility key, their method, and the step that advances them.

    Implements `contracts.method.MethodHost`.
    """

    def __init__(
        self, bound: BoundModel, store: StateCache, emitter: Emitter, released: Callable[[Row, bool], None]
    ) -> None:
        self.bound, self.emitter = bound, emitter
        self.recovery = Recovery(bound)
        self.compiled = CompiledRows(bound, self.recovery)
        self.log = StepLog()
        self.pace = Pace(bound.config.scheduler.stall_bound_ms / 1e3, emitter.clock)
        self.states = Publisher(store, bound)
        self._released = released
        self._rows: list[Row] = []
        self._samplers = SamplerGroup(bound.samplers, bound.config.scheduler.vectorised_sampling, bound.processors)
        self._advances = 0

    # --- what a method is lent ---------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[Row]:
        """The running rows, in the order of the caches."""
        return self._rows

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self.bound.config

    def open_caches(self, *, slots: int = 1, window: int = 1) -> list[BatchCache]:
        """Return one empty cache per layer."""
        return self.bound.open_caches(slots=slots, window=window)

    def forward(
        self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], work: Work | None = None
    ) -> mx.array:
        """Forward and count it, with ``work`` where that can be; see `core.forward.forward`."""
        before = time.perf_counter()
        logits = self._along(work, caches, ids, widths) if work is not None else None
        mixed = logits is not None
        if work is None:
            logits = self.compiled.forward(caches, ids, widths, self._rows)
        if logits is None:
            logits = forwards.forward(self.bound, caches, ids, widths, self._rows)
        self.log.times.build += time.perf_counter() - before
        self.log.decoded([row.id for row in self._rows], ids.shape[1], mixed=mixed)
        return logits

    def _along(self, work: Work, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int]) -> mx.array | None:
        """Forward both sides at once. If that raises, nothing has happened, and each goes alone by its own rule."""
        try:
            return work.along(self.bound, caches, ids, widths, self._rows)
        except Exception as error:  # noqa: BLE001 - whose it is shows when each goes alone
            self.recovery.recoveries += 1
            _log.warning("mixed_forward_failed", error=repr(error))
            return None

    def settle(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], kept: Sequence[int]) -> None:
        """Close a forward; see `core.forward.settle`."""
        forwards.settle(self.bound, caches, ids, widths, kept, self._rows)

    def sample(self, logits: mx.array, live: Sequence[bool]) -> PendingDraw:
        """Sample one token per running row and count it for the live ones."""
        with self.log.times.spent("build"):
            self._samplers.set_rows(self._rows)
            draw = self._samplers.draw(logits, live, self.log.times)
        for row, real in zip(self._rows, draw.real, strict=True):
            row.sampled += real
        return draw

    def emit(self, row: Row, drawn: Drawn) -> bool:
        """Deliver one token; False when the row is over."""
        before = time.perf_counter()
        goes_on = self.emitter.emit(row, drawn)
        if not goes_on:
            self._conclude(row)
        self.log.times.emit += time.perf_counter() - before
        return goes_on

    def finish(self, row: Row, reason: FinishReason) -> None:
        """End a row without another token."""
        self.emitter.finish(row, reason)
        self._conclude(row)

    def retire(self) -> None:
        """Take the states of the rows that are over and drop them: after all were emitted, before anything moves."""
        survivors = [i for i, row in enumerate(self._rows) if not row.over]
        if len(survivors) == len(self._rows) or self._method is None:
            return
        for place, row in enumerate(self._rows):
            if row.over:
                self.states.take(self._method.caches(), place, row, row.coverage, last=len(self._rows) == 1)
        self._keep(survivors, discard=False)

    # --- what the driver asks ------------------------------------------------------------------------------

    @property
    def kv_bytes(self) -> Mapping[str, int]:
        """Bytes allocated for the running rows, by the layout that holds them."""
        held: Counter[str] = Counter()
        caches = self._method.caches() if self._method is not None else ()
        for layer, cache in zip(self.bound.layers, caches, strict=False):
            held[layer.layout.name] += cache.nbytes
        return held

    @property
    def kv_live_bytes(self) -> int:
        """Bytes of them that hold tokens of rows."""
        return sum(cache.live_bytes for cache in self._method.caches()) if self._method is not None else 0

    def use_method(self, name: str) -> None:
        """Open ``name`` unless it is open; the group is empty when it changes."""
        if self._method is not None and self._method_name == name:
            return
        self.close_method()
        self._method = opened = self.bound.open_method(name, self)
        self._storing = opened if isinstance(opened, StoringMethod) else None
        self._method_name = name

    def join(self, row: Row, caches: Sequence[BatchCache], first: Draw | None = None) -> None:
        """Add a prefilled row. A failing flush is the group's; a failing merge the joiner's, and raises."""
        assert self._method is not None
        self.flush()
        self._method.join(row, caches, first)
        self._rows.append(row)
        if first is not None:
            self._samplers.set_rows(self._rows)
            self._samplers.push(first)
        self.log.joined += 1

    def flush(self) -> None:
        """Read and emit what is in flight."""
        if self._method is not None and self._rows:
            self._method.flush()
            self.states.settle()

    @property
    def mixes(self) -> bool:
        """Whether the next step may take work along: model and rows allow it, and the method hands it on."""
        carries = self._method is not None and self._method.running_tokens is not None
        return carries and self.bound.mixing.on and all(row.request.inputs is None for row in self._rows)

    @property
    def room(self) -> int:
        """Tokens that the budget of a mixed forward leaves beside the next step's."""
        running = self._method.running_tokens if self._method is not None else None
        return int(self.config.scheduler.mixed_token_budget) - (running or 0)

    def advance(self, work: Work | None = None) -> None:
        """Advance every running row once. An error of a forward costs the guilty rows; all else is raised.

        ``work`` may be taken along by the step's forward.
        """
        assert self._method is not None
        self._advances += 1
        if self._advances % CLEAR_EVERY == 1:
            self.states.store.boundary()
        self._drop_cancelled()
        if self._rows:
            with self.states.settling():
                self.recovery.run(partial(self._method.advance, work), lambda: self._rows, self._reject)
        self.states.checkpoints.take(self._method.caches(), self._rows)
        if self.emitter.observers.attribution:
            with self.log.times.spent("read"):
                mx.synchronize()
        if self._advances % CLEAR_EVERY == 0:
            # What a model writes and never reads is no part of a step's evaluation: its graph would only grow.
            self.evaluate()
            mx.clear_cache()
        if not self._rows:
            self.states.evaluate()

    def evaluate(self) -> None:
        """Wait until the caches are computed."""
        assert self._method is not None
        mx.eval([array for cache in self._method.caches() for array in cache.arrays()])

    def holding(self) -> Holding:
        """Return what the running rows hold after the next step."""
        caches = self._method.caches() if self._method is not None else ()
        if not caches or not self._rows:
            return Holding()
        assert self._method is not None
        ahead = max(1, (self._method.running_tokens or 0) // len(self._rows)) + (MAX_FORCED if self.constrained else 0)
        return Holding(caches, self._rows, [tokens + ahead for tokens in caches[0].tokens])

    def evict(self, row: Row) -> bool:
        """Drop a running row and its state; False where what was in flight ended a row: there may be room by that."""
        before = len(self._rows)
        self.flush()
        if len(self._rows) < before:
            return False
        self._keep([place for place, other in enumerate(self._rows) if other is not row], discard=True)
        return True

    def surrender(self) -> list[Row]:
        """Drop all state, settle the rows that are over, and return the others: what they hold cannot be trusted."""
        rows, _ = self.detach()
        for row in rows:
            if row.over:
                self._conclude(row)
        return [row for row in rows if not row.over]

    def detach(self) -> tuple[list[Row], list[BatchCache]]:
        """Give up the running rows with their caches; nothing may be in flight that is still wanted."""
        rows, self._rows = self._rows, []
        self.states.drop()
        caches: list[BatchCache] = []
        if self._method is not None:
            caches = list(self._method.caches())
            self._method.abort()
        self._samplers.set_rows(())
        self.log.left += len(rows)
        return rows, caches

    def fail(self, error: BaseException) -> None:
        """Reject every running row with ``error``; nothing of theirs is stored, but what rows before them left is."""
        with contextlib.suppress(Exception):  # then those states are lost as well
            self.states.evaluate()
        rows, _ = self.detach()
        for row in rows:
            row.error = row.error or (None if row.reason else error)
            self._conclude(row)

    def _drop_cancelled(self) -> None:
        """Let cancelled rows go before the step is built; what they have in flight is never read."""
        gone = [row for row in self._rows if row.cancelled]
        for row in gone:
            self.finish(row, FinishReason.CANCELLED)
        if gone:
            self.retire()

    def _reject(self, guilty: dict[int, Exception]) -> None:
        """Reject rows by place and drop them; first they get what was sampled before, and may be over with it."""
        rejected = [(self._rows[place], error) for place, error in guilty.items()]
        self.flush()
        for row, error in rejected:
            if not row.over:
                row.error, row.fed_tainted = error, True
                self._conclude(row)
        self.retire()

    def _keep(self, survivors: Sequence[int], *, discard: bool) -> None:
        assert self._method is not None
        indices = compacted(survivors, len(self._rows))
        self._method.keep(indices, discard=discard)
        self.log.left += len(self._rows) - len(indices)
        self._rows = [self._rows[i] for i in indices]
        self._samplers.keep(self._rows)

    def _conclude(self, row: Row) -> None:
        if self.emitter.conclude(row):
            self._released(row, row.error is None and row.reason is not FinishReason.CANCELLED)
