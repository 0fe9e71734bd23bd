"""Chunked attention: a token attends to its own block of ``chunk`` positions only. Positions are the model's own matter.

What stands before the block of every row is dropped when a new block begins, so a row holds about one block. The
model that has such layers (it asks for ``start_position`` and trims by itself) takes one position for all rows: bind
keeps rows of different length apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache, LayerInfo, RowState
from oarlock.layouts.joins import check_room
from oarlock.layouts.planes import PlainPlanes, column_bytes, grown, round_up
from oarlock.layouts.slots import SlotCache

OARLOCK_API = 1


@attrs.frozen
class ChunkedOptions:
    """`chunked` has no options."""


class ChunkedCache(PlainPlanes, SlotCache):
    """Token t of a row lives in column t - ``start_position``, which is one number for all rows."""

    def __init__(self, slots: int, chunk: int, start_position: int = 0) -> None:
        """Open without rows for blocks of ``chunk`` positions."""
        super().__init__(slots)
        self.chunk, self.start_position = chunk, start_position

    # --- what models see ------------------------------------------------------------------------------

    def maybe_trim_front(self) -> None:
        """Drop the blocks that no row's next token is in. Models call it as a forward begins."""
        first = min(self._starts, default=0) // self.chunk * self.chunk
        if first > self.start_position:
            self._shift(first)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask of the coming forward, always as an array: a query sees its block up to itself."""
        columns = mx.arange(self.start_position, self._starts.longest + N)
        queries = self._starts.columns(N)[:, None, :, None]  # (B, 1, N, 1)
        return (queries >= columns) & (queries // self.chunk == columns // self.chunk)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``[B, H, N, D]`` at each row's own position and return the columns there are."""
        width, new, first = keys.shape[2], self.encode(keys, values), self.start_position
        self._reserve_columns(self._starts.longest + width - first, new)
        self._write(new, self._starts[0] - first if self._starts.equal else self._starts.columns(width) - first)
        self._written = width
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last append returned."""
        return self.decode(self._read(len(self._starts), self._starts.longest + self._written - self.start_position))

    # --- rows -------------------------------------------------------------------------------------------

    def add(self, n: int) -> None:
        """Append ``n`` empty rows, whose first column is the first."""
        self._shift(0)
        super().add(n)

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Copy the rows of ``other`` into the next slots, all in the columns of the earlier start."""
        if isinstance(other, ChunkedCache) and other.rows:
            first = min(self._needed(), other._needed()) if self.rows else other._needed()
            self._shift(first)
            if other.start_position != first and any(map(other._held, range(other.rows))):  # else it has no columns
                other = other._copy(range(other.rows))
                other._shift(first)
        super().join(other, slots)

    def extract(self, row: int) -> RowState:
        """Return a dispatched copy of a row's columns ``[1, H, held, D]``, and where they start."""
        meta = {"chunk": str(self.chunk), "start": str(self.start_position)}
        return RowState(layout="chunked", tokens=self._tokens[row], arrays=self._copy([row]).planes, meta=meta)

    def reusable(self, tokens: int) -> int:
        """Return ``tokens`` where the block of the next one is each row's last, else 0: a join drops those before."""
        longest = min(tokens, min(self._tokens, default=0))
        return longest if longest // self.chunk * self.chunk >= max(map(self._block, self._tokens), default=0) else 0

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns read: from the common start as far as the longest row reaches."""
        return ("chunked", self.start_position, self._starts.longest + max(widths, default=0))

    def reserve(self, tokens: Sequence[int]) -> None:
        """Make room, and drop the blocks before those of the rows' last tokens."""
        check_room(tokens, self._tokens)
        self._shift(self._needed())
        super().reserve(tokens)

    # --- storage ----------------------------------------------------------------------------------------

    def storage(self) -> Hashable:
        """Describe the storage."""
        return ("chunked", self.chunk)

    def sibling(self, slots: int) -> ChunkedCache:
        """Return a cache like this one, without rows."""
        return ChunkedCache(slots, self.chunk, self.start_position)

    def _copy(self, indices: Sequence[int]) -> ChunkedCache:
        part = super()._copy(indices)
        assert isinstance(part, ChunkedCache)
        return part

    def _needed(self) -> int:
        """Return where the earliest block begins in which a row's last token is."""
        return max(self.start_position, self._block(min(self._tokens, default=0)))

    def _block(self, tokens: int) -> int:
        """Return where the block begins in which the last of ``tokens`` is."""
        return max(0, tokens - 1) // self.chunk * self.chunk

    def _held(self, row: int) -> int:
        return self._tokens[row] - self.start_position

    def _span(self, tokens: Sequence[int], *, exact: bool) -> int:
        """Return the columns from the block that rows end in, or, on the way, from where they stand or may join.

        Rows that end in different blocks need all between; a row that goes on needs a block, since models trim.
        """
        last, joining = max(tokens, default=0), len(tokens) > self.rows
        if not exact:
            return last - (0 if joining else self.start_position)
        first = 0 if joining else self._needed()
        apart = last - self._block(min(tokens, default=0))
        return max(min(self.chunk, last - first), apart, max(self._tokens, default=0) - self._needed())

    def _shift(self, first: int) -> None:
        """Let the first column be position ``first``: drop what is before it, or put zeros there, which none attends."""
        drop, self.start_position = first - self.start_position, first
        held = max(map(self._held, range(self.rows)), default=0)
        if drop and held <= 0:
            self.planes = {}
        elif drop:
            self.planes = {name: _moved(plane, drop, self._room(held)) for name, plane in self.planes.items()}


def _moved(plane: mx.array, by: int, columns: int) -> mx.array:
    """Return ``columns`` of a plane from column ``by`` on, zeros where it has none."""
    part = plane[:, :, max(0, by) : max(0, by + columns)]
    before = max(0, -by)
    whole = mx.pad(part, [(0, 0), (0, 0), (before, columns - before - part.shape[2]), (0, 0)])
    return mx.contiguous(whole)  # where nothing was put around it, it is a view


@attrs.frozen
class ChunkedLayout:
    """Registers as ``chunked``; holds attention in blocks of positions."""

    name: str = "chunked"
    kinds: frozenset[str] = frozenset({"chunked"})
    options: type = ChunkedOptions

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return None: every chunked layer can be held."""
        return None

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> ChunkedCache:
        """Return a cache without rows; any window can be rolled back, since blocks are dropped before a forward."""
        return ChunkedCache(slots, layer.chunk).sized(column_bytes(layer))

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row's planes at ``tokens``, reserve included: at most one block and one prompt chunk."""
        return column_bytes(layer) * round_up(min(tokens, layer.chunk))

    def restore(self, state: RowState) -> ChunkedCache:
        """Return a one-row cache that copies the state's arrays, and never writes them."""
        meta, arrays = state.meta(), state.arrays()
        cache = ChunkedCache(1, int(meta["chunk"]), int(meta["start"]))
        cache._set_tokens((state.tokens,))
        if arrays:
            more = round_up(cache._held(0) + 1) - cache._held(0)
            cache.planes = {name: grown(plane, 2, more) for name, plane in arrays.items()}
            cache._used_slots = 1
        return cache


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `chunked`."""
    register(ChunkedLayout())
