"""Rows in slots: what layouts share that keep row i of every buffer for row i. It knows no token's column and no format.

A join writes one slot, a leave moves at most the last row into the hole, and nothing copies all rows but growth.
`docs/decisions` says what was measured against the alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import mlx.core as mx

from oarlock.core.contracts.layout import BatchCache, Positions, RowState
from oarlock.layouts.joins import check_cut, check_room, check_slots
from oarlock.layouts.planes import COLUMN_STEP, Planes, copied, grown, resized, round_up


class SlotCache:
    """Rows of a layer, row i in slot i of every plane.

    A subclass says in which columns a row's tokens are (`_held`, `_room`) and how keys and values become planes and
    are read back (`encode`, `decode`).
    """

    rewinds = True

    def __init__(self, slots: int) -> None:
        """Open without rows; ``slots`` are reserved at the first write."""
        self.planes: Planes = {}
        self._reserve = max(1, slots)
        self._ahead = 0  # columns that were reserved: planes that are made, or grow, get no fewer
        self._column = 0
        self._tokens: tuple[int, ...] = ()
        self._starts = Positions(())
        self._written = 0
        self._used_slots = 0  # slots below this may hold what an earlier row left

    # --- what a subclass says -------------------------------------------------------------------------

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return keys and values ``[B, H, N, D]`` as planes of N columns."""
        raise NotImplementedError

    def decode(self, planes: Planes) -> tuple[Any, Any]:
        """Return what attention gets, as keys and as values, for planes as `encode` makes them."""
        raise NotImplementedError

    def storage(self) -> Hashable:
        """Describe the storage: rows join between caches that agree on it."""
        raise NotImplementedError

    def sibling(self, slots: int) -> SlotCache:
        """Return a cache like this one, without rows."""
        raise NotImplementedError

    def row_planes(self, row: int) -> Planes:
        """Return a dispatched copy of a row's planes."""
        raise NotImplementedError

    def state_of(self, row: int, planes: Planes) -> RowState:
        """Return what is stored of a row as ``planes``."""
        raise NotImplementedError

    def reusable(self, tokens: int) -> int:
        """Return the longest prefix, at most ``tokens``, that every row can be cut to."""
        raise NotImplementedError

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns that a forward of ``widths`` reads."""
        raise NotImplementedError

    def _held(self, row: int) -> int:
        """Return how many of the first columns row ``row`` fills."""
        raise NotImplementedError

    def _room(self, columns: int) -> int:
        """Return how many columns to allocate where ``columns`` are needed."""
        return round_up(columns)

    def _span(self, tokens: Sequence[int], *, exact: bool) -> int:
        """Return how many columns rows of ``tokens`` need: after a `reserve`, or at most on the way there."""
        return max(tokens, default=0)

    # --- one forward ------------------------------------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next token: one integer where all rows agree, else int32 ``[B]``."""
        return self._starts.moved(self._written)

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward at ``starts``."""
        if len(widths) != len(self._tokens) or len(starts) != len(self._tokens):
            msg = f"begin got {len(widths)} widths and {len(starts)} starts for {len(self._tokens)} rows"
            raise ValueError(msg)
        self._starts, self._written = starts, 0

    def commit(self, kept: Sequence[int]) -> None:
        """Keep ``kept[i]`` tokens of row i; what stays behind them is overwritten by the next append."""
        after = self._starts.shared(("after", *kept), lambda: self._starts.after(kept))
        self._tokens, self._starts, self._written = after, after, 0

    # --- rows -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held."""
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens per row."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(int(plane.nbytes) for plane in self.planes.values())

    @property
    def live_bytes(self) -> int:
        """Bytes of the columns that rows fill."""
        return self.column_bytes * sum(map(self._held, range(self.rows))) if self.planes else 0

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one slot: as the planes have it, before there are any as `sized` said."""
        return self.nbytes // math.prod(self._first.shape[::2]) if self.planes else self._column

    def sized(self, column_bytes: int) -> Self:
        """Know what a column of a slot will take, and return this cache."""
        self._column = column_bytes
        return self

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return slots times columns: those needed, or the most that growth on the way comes to."""
        slots, needed = len(tokens), self._span(tokens, exact=exact)
        if exact:
            return slots * self._room(needed) * self.column_bytes
        have, columns = self._first.shape[::2] if self.planes else (self._reserve, 0)
        if needed > columns:  # growing last from as many as just do not suffice
            last = max(columns, (needed - 1) // COLUMN_STEP * COLUMN_STEP)
            columns = max(self._ahead, self._room(max(needed, last + last // 4)))
        return (have if slots <= have else max(slots, 2 * slots - 2)) * columns * self.column_bytes

    def arrays(self) -> list[mx.array]:
        """Return the planes, once they exist."""
        return list(self.planes.values())

    def reserve(self, tokens: Sequence[int]) -> None:
        """Cut or enlarge the planes to a slot for each of ``tokens`` and the columns they need."""
        check_room(tokens, self._tokens)
        slots, columns = len(tokens), self._room(self._span(tokens, exact=True))
        self._reserve, self._ahead = slots or self._reserve, columns
        if not columns:
            self.planes, self._used_slots = {}, 0
        elif self.planes and self._first.shape[::2] != (slots, columns):
            self._used_slots = self.rows
            self.planes = {name: resized(plane, self.rows, slots, columns) for name, plane in self.planes.items()}
            mx.eval(self.arrays())

    def compact(self) -> None:
        """Cut the planes to the rows there are and the columns they fill; without any, drop them."""
        self.reserve(self._tokens)

    def add(self, n: int) -> None:
        """Append ``n`` empty rows."""
        self._reserve_slots(self.rows + n, 0)
        self._set_tokens((*self._tokens, *([0] * n)))

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Copy the rows of ``other`` into the next slots. Nothing changes when it raises."""
        if not isinstance(other, SlotCache) or other.storage() != self.storage():
            msg = f"rows of {_named(other)} cannot join rows of {_named(self)}"
            raise TypeError(msg)
        first, count = self.rows, self.rows + other.rows
        check_slots(slots, first, other.rows)
        columns = max(map(other._held, range(other.rows)), default=0)
        if columns:
            self._agree(other)
            self._reserve = max(self._reserve, count)
            self._reserve_columns(columns, other.planes)
            self._reserve_slots(count, columns)
            self._used_slots = max(self._used_slots, count)
            for name, plane in other.planes.items():
                self.planes[name][first:count, :, :columns] = plane[: other.rows, :, :columns]
        else:
            self._reserve_slots(count, 0)
        self._set_tokens((*self._tokens, *other.tokens))

    def take(self, indices: Sequence[int]) -> SlotCache:
        """Return rows ``indices`` as a cache of their own: this very one when it is all of them."""
        return self if list(indices) == list(range(self.rows)) else self._copy(indices)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i. Blocks once where rows move: MLX copies all of them otherwise."""
        moved = [(new, old) for new, old in enumerate(indices) if new != old]
        if moved and self.planes:
            part = self._copy([old for _, old in moved])
            mx.eval(part.arrays())
            columns = part._first.shape[2] if part.planes else 0
            for i, (new, _) in enumerate(moved):
                for name, plane in part.planes.items():
                    self.planes[name][new : new + 1, :, :columns] = plane[i : i + 1]
                self._clear(slice(new, new + 1), columns)  # as in a join
        self._set_tokens(tuple(self._tokens[old] for old in indices))

    def extract(self, row: int) -> RowState:
        """Return a dispatched copy of a row, without reserve."""
        return self.state_of(row, self.row_planes(row))

    def cut(self, tokens: int) -> None:
        """Let rows go back to their first ``tokens``; what stays behind them is overwritten by the next append."""
        check_cut(tokens, self.reusable(tokens), self.tokens)
        self._set_tokens((tokens,) * self.rows)

    # --- storage ----------------------------------------------------------------------------------------

    @property
    def _first(self) -> mx.array:
        """Any plane: slots and columns are those of all."""
        return next(iter(self.planes.values()))

    def _agree(self, other: SlotCache) -> None:
        """Raise ValueError where rows of ``other`` have planes of another geometry or dtype."""
        for name, plane in self.planes.items():
            theirs = other.planes[name]
            if theirs.dtype != plane.dtype:
                msg = f"rows of dtype {theirs.dtype} cannot join rows of {plane.dtype} ({name})"
                raise ValueError(msg)
            if (theirs.shape[1], theirs.shape[3]) != (plane.shape[1], plane.shape[3]):
                msg = f"rows of shape {theirs.shape} cannot join rows of shape {plane.shape} ({name})"
                raise ValueError(msg)

    def _copy(self, indices: Sequence[int]) -> SlotCache:
        """Return rows ``indices`` copied. Dispatched: a pending reader makes the next append copy the whole plane."""
        part = self.sibling(len(indices)).sized(self.column_bytes)
        part._set_tokens(tuple(self._tokens[i] for i in indices))
        columns = max(map(self._held, indices), default=0)
        if self.planes and columns:
            part.planes = {name: copied(plane, indices, columns) for name, plane in self.planes.items()}
            part._used_slots = len(indices)
            mx.async_eval(part.arrays())
        return part

    def _set_tokens(self, tokens: tuple[int, ...]) -> None:
        self._tokens, self._starts, self._written = tokens, Positions(tokens), 0

    def _write(self, new: Planes, at: int | mx.array) -> None:
        """Put planes ``[B, H, N, D]`` at one column for all rows, or at columns int32 ``[B, N]`` of their own."""
        for name, value in new.items():
            rows, _, width, _ = value.shape
            if isinstance(at, int):
                self.planes[name][:rows, :, at : at + width] = value
            elif value.size:  # MLX divides by zero where a scatter's rows have no width
                row = self._starts.shared(("rows", rows), lambda: mx.arange(rows)[:, None])  # noqa: B023 - called at once
                self.planes[name][row, :, at] = value.transpose(0, 2, 1, 3)  # the indexed axes come first: (B, N, H, D)
            self._used_slots = max(self._used_slots, rows)

    def _read(self, rows: int, columns: int) -> Planes:
        """Return the first ``columns`` of the first ``rows``, without a copy."""
        return {name: plane[:rows, :, :columns] for name, plane in self.planes.items()}

    def _reserve_columns(self, needed: int, like: Mapping[str, mx.array]) -> None:
        """Make room for ``needed`` columns: what was reserved, else a quarter more than there are when it must grow."""
        have = self._first.shape[2] if self.planes else 0
        columns = self._ahead if needed <= self._ahead else self._room(max(needed, have + have // 4))
        if not self.planes:
            slots = max(self._reserve, self.rows)
            self.planes = {
                name: mx.zeros((slots, plane.shape[1], columns, plane.shape[3]), plane.dtype)
                for name, plane in like.items()
            }
        elif needed > have:
            self.planes = {name: grown(plane, 2, columns - have) for name, plane in self.planes.items()}

    def _reserve_slots(self, needed: int, column: int) -> None:
        """Make room for ``needed`` rows, doubling so that joins copy little on average, and clear the new ones.

        Zero what earlier rows left there from ``column`` on: a stale NaN would spread through a zero weight.
        """
        if not self.planes:
            return
        if needed > (slots := self._first.shape[0]):
            more = max(needed, 2 * slots) - slots
            self.planes = {name: grown(plane, 0, more) for name, plane in self.planes.items()}
        self._clear(slice(self.rows, min(needed, self._used_slots)), column)

    def _clear(self, slots: slice, column: int) -> None:
        if slots.start >= slots.stop:
            return
        for plane in self.planes.values():
            if column < plane.shape[2]:
                plane[slots, :, column:] = 0


def _named(cache: object) -> str:
    return repr(cache.storage()) if isinstance(cache, SlotCache) else type(cache).__name__
