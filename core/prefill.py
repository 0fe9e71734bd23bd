"""The prefill cohort: rows whose prompts are processed together, in shared forwards without padding.

It plans, forwards and hands over; it decodes nothing. Rows keep their own chunk ends whoever stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from oarlock.core import forward as forwards
from oarlock.core.budget import Holding
from oarlock.core.compaction import compacted
from oarlock.core.contracts.layout import BatchCache, RowState
from oarlock.core.contracts.method import Draw
from oarlock.core.group import ExecutionGroup
from oarlock.core.mixed import Work
from oarlock.core.planner import Chunk, shared_width
from oarlock.core.preparing import Preparing, ending, spans
from oarlock.core.recording import Forwarded, memory
from oarlock.core.recovery import Recovery
from oarlock.core.result import FinishReason
from oarlock.core.row import Row
from oarlock.core.sampling import SamplerGroup
from oarlock.core.states import add_row, restore
from oarlock.core.tracing import shared


class PrefillCohort:
    """Rows being prefilled together, and their caches in the same order."""

    def __init__(self, group: ExecutionGroup, conclude: Callable[[Row], None]) -> None:
        self._group = group
        self._bound = group.bound
        self._states = group.states
        self._conclude = conclude
        self._recovery: Recovery = group.recovery
        self._settings = group.config.scheduler
        self._preparing: list[Preparing] = []
        self._caches: list[BatchCache] = []
        self.published = self.eager = False  # the last advance delivered a token; first tokens are read at once
        self.accepts = True  # rows may be added; False for prepared inputs, whose forward is their own

    @property
    def rows(self) -> Sequence[Row]:
        """Rows that have not joined or left yet."""
        return [each.row for each in self._preparing]

    @property
    def token_weight(self) -> int:
        """Prompt tokens of the rows, restored ones apart: not the remaining work."""
        return sum(row.prompt_tokens - row.cached_tokens for row in self.rows)

    def takes(self, row: Row) -> bool:
        """Return whether ``row`` may be prefilled beside those that are here."""
        alone = row.request.inputs is not None or self._states.coming(self.rows, row)
        return not self._preparing or (self.accepts and not alone)

    def admit(self, row: Row, waiting: Sequence[Row] = (), own: Sequence[RowState] = ()) -> None:
        """Add a row behind the others, or raise and change nothing. What ``waiting`` rows begin with too is stored.

        ``own`` are states of the row, with which it goes on.
        """
        ids = row.known_ids
        row.spans.begin("prefill.total", tokens=len(ids))
        with shared([row], "cache.lookup_restore", len(ids)):
            position, restored = restore(self._states.store, self._bound, row, ids, own)
        with shared([row], "prefill.batch_setup", position):
            self._caches = add_row(self._bound, self._caches, len(self._preparing), restored, self._group.window)
        row.restart()
        if not (row.generated or own):
            row.cached_tokens = position
        ends = self._states.boundaries(row, position, waiting)
        size = row.request.prefill_chunk or self._settings.prefill_chunk
        self._preparing.append(Preparing(row, ids, position, size, ends, stored=position))
        self.accepts = row.request.inputs is None

    def advance(self, work: Work | None = None) -> bool:
        """Forward until a chunk yields, a prompt ends, or nothing is left; True when the cohort is empty.

        Where ``work`` was taken along it goes on from its logits and forwards nothing: the next step takes more along.
        An error of a shared forward costs the guilty rows only. Whatever else goes wrong is raised.
        """
        self.published = False
        scores = work.take_back() if work is not None else None
        if work is not None and scores is not None:
            self._forwarded(work.width, lambda: scores, mixed=True)
        else:
            self._states.store.boundary()
            self._drop_cancelled()
            self._recovery.run(self._forwards, lambda: self.rows, self._reject)
        return not self._preparing

    def offer(self) -> Work | None:
        """Return the next forward for a decode step to take along, None without rows; `advance` must follow."""
        self._states.store.boundary()
        self._drop_cancelled()
        pace, most = self._group.pace, self._group.room
        pace.start()
        pace.before()
        most = min(most, pace.tokens()) if pace.bound else most
        if not self._preparing:
            return None
        ids = self._next(most)
        ends = self._ends(ids.shape[1])
        return Work.of(self._caches, ids, self.rows, ends, partial(spans, list(self._preparing)))

    def holding(self) -> Holding:
        """Return what the rows hold after the next advance: a chunk, and a last token split off behind it."""
        after = [min(len(each.ids), each.position + each.chunk_size + 1) for each in self._preparing]
        return Holding(self._caches, self.rows, after)

    def evict(self, row: Row) -> None:
        """Drop a row and its state."""
        self._keep([each for each in self._preparing if each.row is not row])

    def surrender(self) -> list[Row]:
        """Drop all state, settle the rows that are over, and return the others: what they hold cannot be trusted."""
        rows, self._preparing, self._caches = self.rows, [], []
        for row in [row for row in rows if row.over]:
            self._conclude(row)
        return [row for row in rows if not row.over]

    def fail(self, error: BaseException) -> None:
        """Reject every row of the cohort and drop its state."""
        preparing, self._preparing, self._caches = self._preparing, [], []
        for each in preparing:
            each.row.error = each.row.error or (None if each.row.reason else error)
            self._conclude(each.row)
        self._group.retire()  # those that had joined already

    def _forwards(self) -> None:
        pace = self._group.pace
        pace.start()
        while self._preparing:
            waited_for = pace.bound > 0 and bool(self._group.rows)
            if self._forward(pace.tokens() if waited_for else None):
                return
            if waited_for and pace.tokens() < len(self._preparing):
                return

    def _forward(self, budget: int | None) -> bool:
        """Do one shared forward of at most ``budget`` tokens, but one a row; True where the advance ends with it."""
        ids = self._next(budget)
        width, widths = ids.shape[1], [ids.shape[1]] * len(ids)
        self._group.pace.before()
        with self._group.log.times.spent("build"), spans(self._preparing, width):
            logits = forwards.forward(self._bound, self._caches, ids, widths, self.rows)
            forwards.settle(self._bound, self._caches, ids, widths, widths, self.rows)
        ends = self._ends(width)
        return self._forwarded(width, lambda: logits[mx.array(ends, dtype=mx.int32), -1])

    def _next(self, budget: int | None) -> mx.array:
        """Plan the next shared forward and return its ids [rows, width]."""
        bound, tail_split = self._bound, self._settings.tail_split
        chunks = [each.planned(bound.longest_append, tail_split=tail_split) for each in self._preparing]
        width = shared_width([each.position for each in self._preparing], chunks, budget)
        return mx.array([each.ids[each.position : each.position + width] for each in self._preparing], dtype=mx.uint32)

    def _ends(self, width: int) -> list[int]:
        """Return the places of the rows whose prompt ends with a forward of ``width`` tokens."""
        return [self._preparing.index(each) for each, chunk in ending(self._preparing, width) if chunk.final]

    def _forwarded(self, width: int, project: Callable[[], mx.array], *, mixed: bool = False) -> bool:
        """Go on from a forward of ``width`` tokens a row; True where the advance ends with it.

        ``project`` returns the scores [n, V] of the rows whose prompt ended, in their order.
        """
        rows, reached = len(self._preparing), ending(self._preparing, width)
        finals = [each for each, chunk in reached if chunk.final]
        zeros, times, pace = [each.row for each in finals], self._group.log.times, self._group.pace
        done = Forwarded(tuple(row.id for row in self.rows), width, prefill=True, mixed=mixed)
        self._group.log.forwards.append(done)
        for each in self._preparing:
            each.position += width
        waits = bool(pace.bound) or self._group.emitter.observers.attribution
        # Otherwise the first tokens' evaluation covers the caches; whoever reads a mixed step's tokens waits for both.
        if waits or len(finals) < len(self._preparing):
            evaluate = mx.async_eval if mixed and not waits else mx.eval
            with times.spent("read"), shared(self.rows, "prefill.evaluate", width):
                evaluate([array for cache in self._caches for array in cache.arrays()])
        if finals and waits:
            with times.spent("read"), shared(zeros, "token_zero.head", 1, **memory()):
                mx.eval(project())
        if pace.bound:
            pace.after(rows * width)
        ends = bool(finals)
        for each, chunk in reached:
            each.chunk = None
            each.row.spans.end("prefill.chunk")
            if not chunk.final:
                ends = ends or chunk.yields
                self._drained(each, chunk)
        if finals:
            with shared(zeros, "prefill.complete", 1):
                self._complete(finals, project)
        return ends

    def _drained(self, each: Preparing, chunk: Chunk) -> None:
        """Maintain a row at a chunk end: give the allocator's pool back, store a boundary snapshot."""
        with shared([each.row], "prefill.kv_maintenance", chunk.end):
            mx.clear_cache()
        if chunk.snapshot:
            place, tokens = self._preparing.index(each), each.row.prompt_ids[: chunk.end]
            with shared([each.row], "prefill.checkpoint", chunk.end):
                each.boundaries.append(self._states.extract(self._caches, place, each.row, tokens))
        if each.due(chunk):
            self._states.checkpoints.prompt(self._caches, self._preparing.index(each), each.row, each.ids[: chunk.end])

    def _complete(self, finals: Sequence[Preparing], project: Callable[[], mx.array]) -> None:
        """Sample, deliver and hand over the rows whose prompt is done."""
        rows = [each.row for each in finals]
        for row in rows:
            row.spans.end("prefill.total")
            if not row.generated:
                row.spans.begin("token_zero.total", **memory())
            if row.cancelled:
                row.reason = FinishReason.CANCELLED
        bound = self._bound
        samplers = SamplerGroup(bound.samplers, self._settings.vectorised_sampling, bound.processors)
        samplers.set_rows(rows)
        times = self._group.log.times
        with times.spent("build"), shared(rows, "prefill.project", 1):
            scores = project()
        with shared(rows, "token_zero.sample", 1, **memory()):
            with times.spent("build"):
                draw = samplers.draw(scores, [not row.over for row in rows], times)
            self._group.flush()
            deferred = self._defers(rows)
            drawn = [] if deferred else draw.read()
        if deferred:
            rows[0].sampled += 1
            self._hand_over(finals, draw)
            return
        with times.spent("emit"):
            for row, first in zip(rows, drawn, strict=True):
                row.sampled += first.real
                before = row.generated
                self._group.emitter.emit(row, first)
                self.published = self.published or row.generated > before
        mx.clear_cache()
        self._hand_over(finals, None)
        self._states.settle()

    def _defers(self, rows: Sequence[Row]) -> bool:
        """Return whether the first token stays unread until the next decode step."""
        settings, row = self._settings, rows[0]
        if settings.early_first_token or self.eager or self._group.emitter.observers.attribution or self._group.rows:
            return False
        return len(rows) == 1 and not row.over and bool(settings.pipeline) and row.request.constraint is None

    def _hand_over(self, finals: Sequence[Preparing], first: Draw | None) -> None:
        """Join finished rows to the group one by one, then drop them from the cohort in one keep."""
        for each in finals:
            row, place = each.row, self._preparing.index(each)
            self._states.hold(row, each.ids, *each.boundaries)
            if row.over:
                self._states.take(self._caches, place, row, each.ids)
                self._conclude(row)
                continue
            try:
                self._group.join(row, [cache.take([place]) for cache in self._caches], first)
            except Exception as error:  # noqa: BLE001 - a failed merge costs the joiner alone
                row.error = error
                self._conclude(row)
        self._keep([each for each in self._preparing if each not in finals])

    def _drop_cancelled(self) -> None:
        """Drop rows between forwards."""
        with shared(self.rows, "prefill.row_sync", 0):
            gone = [each for each in self._preparing if each.row.cancelled]
            for each in gone:
                each.row.reason = FinishReason.CANCELLED
                self._conclude(each.row)
            self._keep([each for each in self._preparing if each not in gone])

    def _reject(self, guilty: dict[int, Exception]) -> None:
        gone = [self._preparing[place] for place in guilty]
        for each, error in zip(gone, guilty.values(), strict=True):
            each.row.error = error
            self._conclude(each.row)
        self._keep([each for each in self._preparing if each not in gone])

    def _keep(self, survivors: Sequence[Preparing]) -> None:
        if len(survivors) == len(self._preparing):
            return
        if not survivors:
            self._preparing, self._caches = [], []
            return
        places = [self._preparing.index(each) for each in survivors]
        indices = compacted(places, len(self._preparing))
        for cache in self._caches:
            cache.keep(indices)
        self._preparing = [self._preparing[i] for i in indices]
