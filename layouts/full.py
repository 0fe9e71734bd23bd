"""Full attention, plain storage: every token of every row stays. It knows nothing of masks beyond causality.

Rows are aligned left, each with its own write position, so a rollback is a subtraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.layouts.masks import shared_mask
from oarlock.layouts.planes import PlainPlanes, Planes, column_bytes, grown, round_up
from oarlock.layouts.rowwise import RowwiseKeyValues, worth
from oarlock.layouts.slots import SlotCache
from oarlock.layouts.traced import TracedColumns

OARLOCK_API = 1
READS = ("auto", "padded", "rows")


@attrs.frozen
class FullOptions:
    """``reads``: "rows" reads rows one by one where lengths differ, "padded" never; "auto" where that saves more than it costs."""

    reads: str = attrs.field(default="auto", validator=attrs.validators.in_(READS))


class LeftAligned(SlotCache):
    """Token t of a row lives in column t, in whatever format a subclass gives it."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask of the coming forward; models ask before the append."""
        return shared_mask(self._starts, N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``[B, H, N, D]`` at each row's own position and return columns 0 to max(starts) + N - 1."""
        width, new = keys.shape[2], self.encode(keys, values)
        self._reserve_columns(self._starts.longest + width, new)
        self._write(new, self._starts[0] if self._starts.equal else self._starts.columns(width))
        self._written = width
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last append returned."""
        return self.decode(self._read(len(self._starts), self._starts.longest + self._written))

    def fixed_columns(self, tokens: int) -> int | None:
        """Return how many columns there are, at least ``tokens``, or None where no row has any."""
        if not self.planes:
            return None
        self._reserve_columns(tokens, self.planes)
        self._used_slots = max(self._used_slots, self.rows)
        return self._first.shape[2]

    def traced(self, planes: Planes, positions: mx.array, columns: int) -> TracedColumns:
        """Return what stands for this cache in a trace, see `contracts.composition.TraceableCache`."""
        return TracedColumns(self, planes, positions, columns)

    def reusable(self, tokens: int) -> int:
        """Return ``tokens``: any prefix of full attention is one."""
        return min(tokens, min(self._tokens, default=0))

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns read: token t in column t, as far as the longest row reaches."""
        return ("left", self._starts.longest + max(widths, default=0))

    def row_planes(self, row: int) -> Planes:
        """Return a dispatched copy of a row's planes, without reserve."""
        return self._copy([row]).planes

    def surrender(self) -> RowState:
        """Return the only row on these very planes, unless more than a quarter of them is reserve."""
        tokens = self._tokens[0]
        if not self.planes or 5 * tokens < 4 * math.prod(self._first.shape[::2]):
            return self.extract(0)
        planes = self._read(1, tokens)
        mx.async_eval(*planes.values())
        return self.state_of(0, planes)

    def adopt(self, arrays: Planes, tokens: int) -> None:
        """Hold one row: planes of ``tokens`` columns, which are shared and never written."""
        self._set_tokens((tokens,))
        if arrays:
            more = self._room(tokens + 1) - tokens
            self.planes = {name: grown(plane, 2, more) for name, plane in arrays.items()}
            self._used_slots = 1

    def _held(self, row: int) -> int:
        return self._tokens[row]


class FullCache(PlainPlanes, LeftAligned):
    """Keys and values as they are. ``reads``: as in `FullOptions`."""

    def __init__(self, slots: int, reads: str = "padded") -> None:
        """Open without rows; ``slots`` are reserved at the first write."""
        super().__init__(slots)
        self._reads = reads

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last append returned: planes, or handles where rows are better read one by one."""
        keys, values = super().keys_and_values()
        starts = self._starts
        if self._reads == "padded" or starts.equal or (self._reads == "auto" and not worth(starts, self.column_bytes)):
            return keys, values
        return RowwiseKeyValues.pair(keys, values, starts, self._written)

    def storage(self) -> Hashable:
        """Describe the storage."""
        return "full"

    def sibling(self, slots: int) -> FullCache:
        """Return a cache like this one, without rows."""
        return FullCache(slots, self._reads)

    def state_of(self, row: int, planes: Planes) -> RowState:
        """Return what is stored of a row as ``planes``, each ``[1, H, tokens, D]``."""
        return RowState(layout="full", tokens=self._tokens[row], arrays=planes, meta={"reads": self._reads})


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
        reads = (options or FullOptions()).reads if layer.attendable else "padded"
        return FullCache(slots, reads).sized(column_bytes(layer))

    def attends(self, layer: LayerInfo, options: Any) -> bool:
        """Return whether attention takes handles, where rows are read one by one."""
        return layer.attendable and (options or FullOptions()).reads != "padded"

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row's planes at ``tokens``, reserve included."""
        return column_bytes(layer) * round_up(tokens)

    def restore(self, state: RowState) -> FullCache:
        """Return a one-row cache that copies the state's arrays when it first grows, and never writes them."""
        cache = FullCache(1, state.meta().get("reads", "padded"))
        cache.adopt(state.arrays(), state.tokens)
        return cache


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `full`."""
    register(FullLayout())
