"""Where a sliding window's positions live: pure column arithmetic, without a buffer.

Position p of a row of phase f lives in column ``keep + (p - f) mod span``; the first ``keep`` positions (attention
sinks) live in columns of their own. Rows have their own phases, so they wrap when they do and share no head.

Why nothing needs to be restored. A forward of N <= slack + 1 tokens writes positions up to start + N - 1, over
positions up to start + N - 1 - span <= start - reach, where span = reach + slack. A query stands at start or later
and sees positions after start - reach. So whatever a rejected or padded token overwrote was outside of every window
to come. And what it left behind is outside too: the next forward from start' >= start takes its column for position
p - span <= start' - reach, or overwrites it first.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.planes import Columns

Mask = mx.array | str | None


@attrs.frozen(kw_only=True, cache_hash=True)
class Ring:
    """The rows' rings: ``window`` columns of which ``keep`` are sinks, ``slack`` more, and each row's phase.

    A row's first position beside the sinks is its phase or later; it holds at least the newest ``reach - 1``.
    """

    window: int
    keep: int = 0
    slack: int = 0
    phases: tuple[int, ...] = ()

    @property
    def capacity(self) -> int:
        """Columns of a full ring."""
        return self.window + self.slack

    @property
    def span(self) -> int:
        """Columns that turn."""
        return self.window + self.slack - self.keep

    @property
    def reach(self) -> int:
        """How many positions a query sees beside the sinks, its own included."""
        return self.window - self.keep

    def is_block(self, width: int) -> bool:
        """Return whether a forward is too wide to be written in place."""
        return width > self.slack + 1

    def add(self, n: int) -> Ring:
        """Return the ring with ``n`` more rows, empty."""
        return attrs.evolve(self, phases=(*self.phases, *([self.keep] * n)))

    def pick(self, indices: Sequence[int]) -> Ring:
        """Return the ring of some rows, in this order."""
        return attrs.evolve(self, phases=tuple(self.phases[i] for i in indices))

    def held(self, row: int, tokens: int) -> int:
        """Return how many of the first columns a row of ``tokens`` fills."""
        return min(tokens, self.keep) + min(max(0, tokens - self.phases[row]), self.span)

    def reusable(self, row: int, held: int, tokens: int) -> int:
        """Return ``tokens`` if the window before it is whole in a row of ``held`` tokens, ``held`` if it is that, else 0.

        A rejected token may have overwritten what stands ``reach`` behind the end, so that does not count as held.
        """
        if tokens >= held:
            return held
        whole = held - self.phases[row] < self.reach
        oldest = self.phases[row] if whole else held - self.reach + 1
        return tokens if max(self.keep, tokens - self.reach + 1) >= oldest else 0

    # --- tokens written in place ------------------------------------------------------------------------

    def extent(self, starts: Positions, width: int) -> int:
        """Return how many columns a forward of ``width`` tokens in place reads."""
        return max(self._ends(starts, width), default=0)

    def _ends(self, starts: Positions, width: int) -> tuple[int, ...]:
        make = lambda: tuple(self.held(row, start + width) for row, start in enumerate(starts))  # noqa: E731
        return starts.shared((self, "ends", width), make)

    def places(self, starts: Positions, width: int) -> int | mx.array:
        """Return where ``width`` tokens go: the one first column of all rows, or int32 ``[B, width]``."""
        return starts.shared((self, "places", width), lambda: self._places(starts, width))

    def _places(self, starts: Positions, width: int) -> int | mx.array:
        first = {self._column(row, start) for row, start in enumerate(starts)}
        if len(first) == 1 and (column := first.pop()) + width <= self.capacity:
            return column
        positions = starts.columns(width)  # (B, N)
        columns = self.keep + (positions - self._phases(starts)) % self.span
        return mx.where(positions < self.keep, positions, columns) if self.keep else columns

    def mask(self, starts: Positions, width: int, window: int | None, as_array: bool) -> Mask:
        """Return the mask of ``width`` tokens written in place, over columns 0 to `extent`.

        None or "causal" where the columns read are, in every row, all visible or the row's tokens in order: mlx-lm's
        serial graph. Else boolean ``[B, 1, width, S]``.
        """
        columns = self.extent(starts, width)
        seen = self.window if window is None else min(window, self.window)
        if columns <= seen and min(self._ends(starts, width), default=0) == columns:
            if width == 1:
                return None
            if not as_array and starts.equal and isinstance(self.places(starts, width), int):
                return "causal"
        return starts.shared((self, "mask", width, seen), lambda: self._mask(starts, width, columns, seen))

    def _mask(self, starts: Positions, width: int, columns: int, seen: int) -> mx.array:
        phases = self._phases(starts)
        column = mx.arange(columns, dtype=mx.int32)[None] - self.keep  # (1, S); sinks are negative
        last = starts.array[:, None] + (width - 1)
        held = phases + column + self.span * mx.floor_divide(last - phases - column, self.span)  # (B, S)
        whole = held >= phases
        if self.keep:
            held, whole = mx.where(column < 0, column + self.keep, held), whole | (column < 0)
        return self._visible(starts.columns(width), held, whole, seen - self.keep)

    def _visible(self, queries: mx.array, held: mx.array, whole: mx.array, reach: int) -> mx.array:
        """Return what queries at int32 ``[B, N]`` see of columns that hold positions ``[B, S]`` where ``whole``."""
        query, position = queries[:, None, :, None], held[:, None, None, :]
        near = position > query - reach
        return whole[:, None, None, :] & (position <= query) & (near | (position < self.keep) if self.keep else near)

    # --- blocks: wider than what can be written in place --------------------------------------------------

    def history(self, row: int, start: int) -> int:
        """Return how many columns before ``start`` a block attends to: sinks, then the newest ``reach - 1``."""
        return min(start, self.keep) + max(0, start - self._earliest(row, start))

    def widest(self, starts: Positions) -> int:
        """Return the longest history of all rows; shorter ones are padded on their left."""
        return max((self.history(row, start) for row, start in enumerate(starts)), default=0)

    def _even(self, starts: Positions) -> bool:
        """Return whether all histories are equally long."""
        return len({self.history(row, start) for row, start in enumerate(starts)}) <= 1

    def block_columns(self, starts: Positions) -> Columns:
        """Return the columns of the rows' histories in temporal order, right-aligned."""
        return starts.shared((self, "block"), lambda: self._block_columns(starts))

    def _block_columns(self, starts: Positions) -> Columns:
        rows, width = len(starts), self.widest(starts)
        if len({(self._earliest(row, starts[row]), self.phases[row], starts[row]) for row in range(rows)}) == 1:
            return self.order(0, starts[0], self._earliest(0, starts[0]))
        each = [self.order(row, start, self._earliest(row, start)) for row, start in enumerate(starts)]
        return _stacked(each, width, left=True)

    def block_mask(self, starts: Positions, width: int, window: int | None, as_array: bool) -> Mask:
        """Return the mask of a block of ``width`` over its rows' histories and itself.

        Equal rows without sinks get exactly what mlx-lm's serial ring gives.
        """
        seen = window or self.window
        history = self.widest(starts)
        if starts.equal and self._even(starts) and history + width <= seen and not as_array:
            return "causal"
        return starts.shared((self, "block mask", width, seen), lambda: self._block_mask(starts, width, history, seen))

    def _block_mask(self, starts: Positions, width: int, history: int, seen: int) -> mx.array:
        columns = mx.arange(history + width, dtype=mx.int32)
        if starts.equal and self._even(starts) and not self.keep:
            queries = columns[history:, None]  # (N, 1): a column is a position but for a constant
            return (queries >= columns) & (queries < columns + seen)
        own = mx.array([self.history(row, start) for row, start in enumerate(starts)], dtype=mx.int32)[:, None]
        place = columns[None] - (history - own)  # (B, S); padding is negative
        held = starts.array[:, None] - own + place
        if self.keep:
            held = mx.where(place < self.keep, mx.minimum(place, held), held)
        return self._visible(starts.columns(width), held, place >= 0, seen - self.keep)

    def after_block(self, starts: Positions, kept: Sequence[int]) -> tuple[Ring, Columns]:
        """Return the ring laid out anew behind a block, and which of the block's columns it holds from column 0 on."""
        history = self.widest(starts)
        phases, rows = [], []
        for row, (start, n) in enumerate(zip(starts, kept, strict=True)):
            end = start + n
            phase = max(self._earliest(row, start), end - self.span)
            sinks, first = min(end, self.keep), history - self.history(row, start)
            newest = slice(history + n - max(0, end - phase), history + n)
            rows.append([slice(first, first + sinks), newest] if sinks else [newest])
            phases.append(phase)
        ring = attrs.evolve(self, phases=tuple(phases))
        if len({tuple((part.start, part.stop) for part in parts) for parts in rows}) == 1:
            return ring, rows[0][0] if len(rows[0]) == 1 else _vector(*rows[0])
        each = [_vector(*parts) for parts in rows]
        return ring, _stacked(each, max(columns.size for columns in each), left=False)

    # --- rows in temporal order -----------------------------------------------------------------------------

    def order(self, row: int, tokens: int, oldest: int) -> Columns:
        """Return where a row of ``tokens`` has its sinks and its positions from ``oldest`` on, in temporal order."""
        begin, count = self._column(row, oldest), max(0, tokens - oldest)
        parts = [slice(0, min(tokens, self.keep)), slice(begin, min(begin + count, self.capacity))]
        parts.append(slice(self.keep, self.keep + count - (parts[1].stop - begin)))
        parts = [part for part in parts if part.start < part.stop]
        if len(parts) == 2 and parts[0].stop == parts[1].start:
            parts = [slice(parts[0].start, parts[1].stop)]
        return (parts or [slice(0, 0)])[0] if len(parts) < 2 else _vector(*parts)

    def relaid(self, tokens: Sequence[int], slack: int) -> tuple[Ring, Columns]:
        """Return the ring of rows of ``tokens`` with another slack, laid out anew, and the columns it takes in order.

        Only what a query to come sees is taken: the position before that may be what a rejected token left.
        """
        phases = [self._earliest(row, n) for row, n in enumerate(tokens)]
        each = [_vector(self.order(row, n, phases[row])) for row, n in enumerate(tokens)]
        ring = attrs.evolve(self, slack=slack, phases=tuple(phases))
        return ring, _stacked(each, max(columns.size for columns in each), left=False)

    def _earliest(self, row: int, start: int) -> int:
        """Return the first position beside the sinks that a block at ``start`` attends to."""
        return max(self.phases[row], start - self.reach + 1)

    def _column(self, row: int, position: int) -> int:
        return position if position < self.keep else self.keep + (position - self.phases[row]) % self.span

    def _phases(self, starts: Positions) -> mx.array:
        """Return the phases as int32 ``[B, 1]``."""
        make = lambda: mx.array(list(self.phases), dtype=mx.int32)[:, None]  # noqa: E731
        return starts.shared((self, "phases"), make)


def _vector(*parts: Columns) -> mx.array:
    """Return columns as one int32 vector."""
    each = [mx.arange(part.start, part.stop, dtype=mx.int32) if isinstance(part, slice) else part for part in parts]
    return each[0] if len(each) == 1 else mx.concatenate(each)


def _stacked(each: Sequence[Columns], width: int, *, left: bool) -> mx.array:
    """Return int32 ``[B, width]``, column 0 where a row has fewer: on its left, or behind."""
    vectors = [_vector(columns) for columns in each]
    rows = [mx.pad(v, (width - v.size, 0) if left else (0, width - v.size)) for v in vectors]
    return mx.stack(rows)
