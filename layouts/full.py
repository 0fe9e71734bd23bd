"""Full attention, plain storage: every token of every row stays. It knows nothing of masks beyond causality.

One slot per row in one buffer; rows are aligned left, each with its own write position. So a join writes one slot, a
leave moves at most the last row into the hole, and a rollback is a subtraction. `docs/decisions` says what was
measured against the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState
from oarlock.layouts.masks import causal

OARLOCK_API = 1
COLUMN_STEP = 256
"""Buffers grow in multiples of this many tokens, as mlx-lm's do."""


@attrs.frozen
class FullOptions:
    """`full` has no options."""


class FullCache:
    """Keys and values ``[slots, H, capacity, D]``; row i lives in slot i, its token t in column t."""

    rewinds = True

    def __init__(self, slots: int) -> None:
        """Open without rows; ``slots`` are reserved at the first write."""
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._reserve = max(1, slots)
        self._tokens: tuple[int, ...] = ()
        self._starts = Positions(())
        self._written = 0
        self._used_slots = 0  # slots below this may hold what an earlier row left

    # --- what models see ------------------------------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next token: one integer where all rows agree, else int32 ``[B]``."""
        if self._starts.equal:
            return self._starts[0] + self._written
        return self._starts.array + self._written if self._written else self._starts.array

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask of the coming forward; models ask before the append."""
        return causal(self._starts, N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``[B, H, N, D]`` at each row's own position and return columns 0 to max(starts) + N - 1."""
        width = keys.shape[2]
        self._reserve_columns(self._starts.longest + width, keys, values)
        assert self.keys is not None
        assert self.values is not None
        rows = len(self._starts)
        if self._starts.equal:
            at: Any = (slice(rows), slice(None), slice(self._starts[0], self._starts[0] + width))
            self.keys[at], self.values[at] = keys, values
        else:
            at = (mx.arange(rows)[:, None], slice(None), self._starts.columns(width))  # (B, 1), (B, N)
            self.keys[at] = keys.transpose(0, 2, 1, 3)  # (B, N, H, D): the indexed axes come first
            self.values[at] = values.transpose(0, 2, 1, 3)
        self._written = width
        self._used_slots = max(self._used_slots, rows)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last append returned."""
        assert self.keys is not None
        assert self.values is not None
        at = (slice(len(self._starts)), slice(None), slice(self._starts.longest + self._written))
        return self.keys[at], self.values[at]

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward at ``starts``."""
        if len(widths) != len(self._tokens) or len(starts) != len(self._tokens):
            msg = f"begin got {len(widths)} widths and {len(starts)} starts for {len(self._tokens)} rows"
            raise ValueError(msg)
        self._starts, self._written = starts, 0

    def commit(self, kept: Sequence[int]) -> None:
        """Keep ``kept[i]`` tokens of row i; what stays behind them is overwritten by the next append."""
        self._tokens = tuple(start + n for start, n in zip(self._starts, kept, strict=True))
        self._starts, self._written = Positions(self._tokens), 0

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
        """Bytes of both buffers."""
        return 0 if self.keys is None or self.values is None else int(self.keys.nbytes + self.values.nbytes)

    @property
    def live_bytes(self) -> int:
        """Bytes of the rows' own tokens."""
        if self.keys is None:
            return 0
        slots, _, columns, _ = self.keys.shape
        return self.nbytes // (slots * columns) * sum(self._tokens)

    def arrays(self) -> list[mx.array]:
        """Return the buffers, once they exist."""
        return [array for array in (self.keys, self.values) if array is not None]

    def compact(self) -> None:
        """Cut the buffers to the rows there are and the columns they fill; without rows, drop them."""
        if self.keys is None or self.values is None:
            return
        rows, columns = self.rows, _round_up(max(self._tokens, default=0) or 1)
        self._used_slots = min(self._used_slots, rows)
        if not rows:
            self.keys = self.values = None
        elif rows < self.keys.shape[0] or columns < self.keys.shape[2]:
            self.keys = mx.contiguous(self.keys[:rows, :, :columns])
            self.values = mx.contiguous(self.values[:rows, :, :columns])
            mx.eval(self.keys, self.values)

    def add(self, n: int) -> None:
        """Append ``n`` empty rows."""
        self._reserve_slots(self.rows + n, 0)
        self._set_tokens((*self._tokens, *([0] * n)))

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Copy the rows of ``other`` into the next slots. Nothing changes when it raises."""
        if not isinstance(other, FullCache):
            msg = f"a full cache cannot take rows of {type(other).__name__}"
            raise TypeError(msg)
        first, count = self.rows, self.rows + other.rows
        if list(slots) != list(range(first, count)):
            msg = f"slots are {list(slots)}; the free ones are {list(range(first, count))}"
            raise ValueError(msg)
        columns = max(other.tokens, default=0)
        if columns and other.keys is not None and other.values is not None:
            if self.keys is not None and self.keys.dtype != other.keys.dtype:
                msg = f"rows of dtype {other.keys.dtype} cannot join rows of {self.keys.dtype}"
                raise ValueError(msg)
            self._reserve = max(self._reserve, count)
            self._reserve_columns(columns, other.keys, other.values)
            self._reserve_slots(count, columns)
            assert self.keys is not None
            assert self.values is not None
            self.keys[first:count, :, :columns] = other.keys[: other.rows, :, :columns]
            self.values[first:count, :, :columns] = other.values[: other.rows, :, :columns]
            self._used_slots = max(self._used_slots, count)
        else:
            self._reserve_slots(count, 0)
        self._set_tokens((*self._tokens, *other.tokens))

    def take(self, indices: Sequence[int]) -> FullCache:
        """Return rows ``indices`` as a cache of their own: this very one when it is all of them."""
        return self if list(indices) == list(range(self.rows)) else self._copy(indices)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i. Blocks once where rows move: MLX copies all of them otherwise."""
        moved = [(new, old) for new, old in enumerate(indices) if new != old]
        if moved and self.keys is not None and self.values is not None:
            part, columns = self._copy([old for _, old in moved]), 0
            target = mx.array([new for new, _ in moved], dtype=mx.int32)
            if part.keys is not None and part.values is not None:
                mx.eval(part.keys, part.values)
                columns = part.keys.shape[2]
                self.keys[target, :, :columns] = part.keys
                self.values[target, :, :columns] = part.values
            self._clear(target, columns)  # as in a join
        self._set_tokens(tuple(self._tokens[old] for old in indices))

    def extract(self, row: int) -> RowState:
        """Return a dispatched copy of a row's ``[1, H, tokens, D]``."""
        part, tokens = self._copy([row]), self._tokens[row]
        arrays = {"keys": part.keys, "values": part.values} if tokens else {}
        return RowState(layout="full", tokens=tokens, arrays=arrays)

    def reusable(self, tokens: int) -> int:
        """Return ``tokens``: any prefix of full attention is one."""
        return min(tokens, min(self._tokens, default=0))

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns read: token t in column t, as far as the longest row reaches."""
        return ("left", self._starts.longest + max(widths, default=0))

    # --- storage ----------------------------------------------------------------------------------------

    def _copy(self, indices: Sequence[int]) -> FullCache:
        """Return rows ``indices`` copied. Dispatched: a pending reader makes the next append copy the whole buffer."""
        part = FullCache(len(indices))
        part._set_tokens(tuple(self._tokens[i] for i in indices))
        columns = max(part._tokens, default=0)
        if self.keys is not None and self.values is not None and columns:
            at = mx.array(list(indices), dtype=mx.int32)
            part.keys = mx.take(self.keys[:, :, :columns], at, axis=0)
            part.values = mx.take(self.values[:, :, :columns], at, axis=0)
            part._used_slots = len(indices)
            mx.async_eval(part.keys, part.values)
        return part

    def _set_tokens(self, tokens: tuple[int, ...]) -> None:
        self._tokens, self._starts, self._written = tokens, Positions(tokens), 0

    def _reserve_columns(self, needed: int, keys: mx.array, values: mx.array) -> None:
        """Make room for ``needed`` columns, a quarter more than there are when it must grow."""
        if self.keys is None or self.values is None:
            slots = max(self._reserve, self.rows)
            shape = (slots, keys.shape[1], _round_up(needed))
            self.keys = mx.zeros((*shape, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((*shape, values.shape[3]), values.dtype)
        elif needed > self.keys.shape[2]:
            columns = self.keys.shape[2]
            more = _round_up(max(needed, columns + columns // 4)) - columns
            self.keys, self.values = _grow(self.keys, 2, more), _grow(self.values, 2, more)

    def _reserve_slots(self, needed: int, column: int) -> None:
        """Make room for ``needed`` rows, doubling so that joins copy little on average, and clear the new ones.

        Zero what earlier rows left there from ``column`` on: a stale NaN would spread through a zero weight.
        """
        if self.keys is None or self.values is None:
            return
        if needed > (slots := self.keys.shape[0]):
            more = max(needed, 2 * slots) - slots
            self.keys, self.values = _grow(self.keys, 0, more), _grow(self.values, 0, more)
        self._clear(slice(self.rows, min(needed, self._used_slots)), column)

    def _clear(self, slots: slice | mx.array, column: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        if column < self.keys.shape[2] and not (isinstance(slots, slice) and slots.start >= slots.stop):
            self.keys[slots, :, column:] = 0
            self.values[slots, :, column:] = 0


def _round_up(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


def _grow(buffer: mx.array, axis: int, more: int) -> mx.array:
    shape = list(buffer.shape)
    shape[axis] = more
    return mx.concatenate([buffer, mx.zeros(shape, buffer.dtype)], axis=axis)


@attrs.frozen
class FullLayout:
    """Registers as ``full``; holds unbounded attention layers of any geometry."""

    name: str = "full"
    kinds: frozenset[str] = frozenset({"full"})
    options: type = FullOptions

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return None: every full layer can be held."""
        return None

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> FullCache:
        """Return a cache without rows; any window can be rolled back."""
        return FullCache(slots)

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row's buffers at ``tokens``, reserve included."""
        size = layer.dtype.size if layer.dtype is not None else 2
        return layer.kv_heads * (layer.key_dim + layer.value_dim) * size * _round_up(tokens)

    def restore(self, state: RowState) -> FullCache:
        """Return a one-row cache that copies the state's arrays when it first grows, and never writes them."""
        cache = FullCache(1)
        cache._set_tokens((state.tokens,))
        arrays = state.arrays()
        if arrays:
            more = _round_up(state.tokens + 1) - state.tokens
            cache.keys, cache.values = _grow(arrays["keys"], 2, more), _grow(arrays["values"], 2, more)
            cache._used_slots = 1
        return cache


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `full`."""
    register(FullLayout())
