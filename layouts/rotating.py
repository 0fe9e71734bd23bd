"""Sliding windows, plain storage: the newest positions of every row, and the first `keep` of them for ever.

It holds buffers; which column is whose, and why a rollback restores nothing, is said in `layouts.rings`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState
from oarlock.layouts.planes import PlainPlanes, Planes, column_bytes, grown, picked, round_up
from oarlock.layouts.rings import Mask, Ring
from oarlock.layouts.slots import SlotCache

OARLOCK_API = 1


@attrs.frozen
class RotatingOptions:
    """`rotating` has no options: window and sinks are the model's."""


class RingCache(SlotCache):
    """Rows that wrap, each at its own column, in whatever format a subclass gives the planes.

    A forward of at most slack + 1 tokens is written in place. A wider one, a block, attends to a copy of the history
    and itself; nothing is stored before `commit`, which lays the rows out anew in temporal order, as mlx-lm does.
    """

    def __init__(self, slots: int, ring: Ring) -> None:
        """Open without rows; ``ring`` has none either."""
        super().__init__(slots)
        self.ring = ring
        self._block: Planes | None = None

    # --- what models see ------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask of the coming forward; models ask before the append."""
        make = self.ring.block_mask if self.ring.is_block(N) else self.ring.mask
        return make(self._starts, N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``[B, H, N, D]`` at each row's own position and return the columns that `make_mask` spoke of."""
        width, new = keys.shape[2], self.encode(keys, values)
        if self.ring.is_block(width):
            self._block = self._behind_history(new)
        else:
            self._reserve_columns(self.ring.extent(self._starts, width), new)
            self._write(new, self.ring.places(self._starts, width))
        self._written = width
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last append returned."""
        if self._block is not None:
            return self.decode(self._block)
        return self.decode(self._read(len(self._starts), self.ring.extent(self._starts, self._written)))

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward at ``starts``."""
        super().begin(widths, starts)
        self._block = None

    def commit(self, kept: Sequence[int]) -> None:
        """Keep ``kept[i]`` tokens of row i."""
        block, self._block = self._block, None
        if block is not None and any(kept):
            self.ring, columns = self.ring.after_block(self._starts, kept)
            if isinstance(columns, slice):  # as a view it would keep the whole block
                columns = mx.arange(columns.start, columns.stop, dtype=mx.int32)
            part = picked(block, self.rows, columns)
            self._reserve_columns(next(iter(part.values())).shape[2], part)
            self._write(part, 0)
        super().commit(kept)

    # --- rows -------------------------------------------------------------------------------------------

    def add(self, n: int) -> None:
        """Append ``n`` empty rows."""
        super().add(n)
        self.ring = self.ring.add(n)

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Copy the rows of ``other`` into the next slots, laid out anew where its slack is another."""
        if isinstance(other, RingCache) and other.storage() == self.storage() and other.ring.slack != self.ring.slack:
            other = other._relaid(self.ring.slack)
        super().join(other, slots)
        assert isinstance(other, RingCache)
        self.ring = attrs.evolve(self.ring, phases=(*self.ring.phases, *other.ring.phases))

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i. Blocks once where rows move."""
        super().keep(indices)
        self.ring = self.ring.pick(indices)

    def reusable(self, tokens: int) -> int:
        """Return ``tokens`` where no row has overwritten what a query there would see; else all that is held, or 0."""
        rows = enumerate(self._tokens)
        return min((self.ring.reusable(row, held, tokens) for row, held in rows), default=0)

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns read: the rings, where they stand, and the width of the forward."""
        return ("ring", self.ring, tuple(self._starts), max(widths, default=0))

    # --- storage ----------------------------------------------------------------------------------------

    def row_planes(self, row: int) -> Planes:
        """Return a dispatched copy of a row in temporal order: what a query to come sees, less than a window."""
        tokens = self._tokens[row]
        if not self.planes or not tokens:
            return {}
        one = {name: plane[row : row + 1] for name, plane in self.planes.items()}
        _, columns = self.ring.pick([row]).relaid([tokens], slack=0)
        part = {name: plane for name, plane in picked(one, 1, columns).items() if plane.shape[2]}
        mx.async_eval(list(part.values()))
        return part

    def adopt(self, arrays: Planes, tokens: int) -> None:
        """Hold one row: planes as `row_planes` returns them, which are shared and never written."""
        self._set_tokens((tokens,))
        columns = next((plane.shape[2] for plane in arrays.values()), 0)
        sinks = min(tokens, self.ring.keep)
        self.ring = attrs.evolve(self.ring, phases=(max(self.ring.keep, tokens - columns + sinks),))
        if arrays:
            more = self._room(columns + 1) - columns
            self.planes = {name: grown(plane, 2, more) for name, plane in arrays.items()}
            self._used_slots = 1

    def _behind_history(self, new: Planes) -> Planes:
        """Return planes ``[B, H, history + N, D]``."""
        if not self.planes or not self.ring.widest(self._starts):
            return new
        history = picked(self.planes, self.rows, self.ring.block_columns(self._starts))
        return {name: mx.concatenate([history[name], plane], axis=2) for name, plane in new.items()}

    def _relaid(self, slack: int) -> RingCache:
        """Return the rows copied in temporal order into a ring with another slack."""
        part = self.sibling(self.rows).sized(self.column_bytes)
        assert isinstance(part, RingCache)
        part._set_tokens(self._tokens)
        part.ring, columns = self.ring.relaid(self._tokens, slack) if self.rows else (part.ring, slice(0, 0))
        if self.planes and any(self._tokens):
            part.planes = picked(self.planes, self.rows, columns)
            part._used_slots = self.rows
        return part

    def _copy(self, indices: Sequence[int]) -> SlotCache:
        part = super()._copy(indices)
        assert isinstance(part, RingCache)
        part.ring = self.ring.pick(indices)
        return part

    def _held(self, row: int) -> int:
        return self.ring.held(row, self._tokens[row])

    def _room(self, columns: int) -> int:
        return min(round_up(columns), self.ring.capacity)


class RotatingCache(PlainPlanes, RingCache):
    """Keys and values as they are."""

    def storage(self) -> Hashable:
        """Describe the storage."""
        return ("rotating", self.ring.window, self.ring.keep)

    def sibling(self, slots: int) -> RotatingCache:
        """Return a cache like this one, without rows."""
        return RotatingCache(slots, self.ring.pick([]))

    def state_of(self, row: int, planes: Planes) -> RowState:
        """Return what is stored of a row as ``planes``, each ``[1, H, at most window - 1, D]`` in temporal order."""
        meta = {"window": str(self.ring.window), "keep": str(self.ring.keep)}
        return RowState(layout="rotating", tokens=self._tokens[row], arrays=planes, meta=meta)


@attrs.frozen
class RotatingLayout:
    """Registers as ``rotating``; holds sliding-window layers of any geometry."""

    name: str = "rotating"
    kinds: frozenset[str] = frozenset({"rotating"})
    options: type = RotatingOptions

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return why a window cannot be held: one without room beside its sinks."""
        return ring_refusal(layer)

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> RotatingCache:
        """Return a cache without rows, with room to roll back ``window`` tokens."""
        return RotatingCache(slots, ring_of(layer, window)).sized(column_bytes(layer))

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row's planes at ``tokens``: at most the window's, without the slack of a method."""
        return column_bytes(layer) * min(round_up(tokens), layer.window)

    def restore(self, state: RowState) -> RotatingCache:
        """Return a one-row cache that copies the state's arrays when it is written to, and never writes them."""
        meta = state.meta()
        cache = RotatingCache(1, Ring(window=int(meta["window"]), keep=int(meta["keep"])))
        cache.adopt(state.arrays(), state.tokens)
        return cache


def ring_of(layer: LayerInfo, window: int) -> Ring:
    """Return a layer's ring without rows, where forwards of up to ``window`` tokens may be rolled back."""
    return Ring(window=layer.window, keep=layer.keep, slack=max(1, window) - 1)


def ring_refusal(layer: LayerInfo) -> str | None:
    """Return why a layer's window cannot be held, or None."""
    if layer.window > layer.keep >= 0:
        return None
    return f"a window of {layer.window} with {layer.keep} sinks leaves no column for the newest token"


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `rotating`."""
    register(RotatingLayout())
