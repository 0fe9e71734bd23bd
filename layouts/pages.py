"""The blocks of one layer, as arrays: keys and values, and how attention reads them. Who owns a block is not theirs.

A plane is ``[1, H, blocks * size, D]``: block b is columns ``b * size`` to ``(b + 1) * size``, so a row whose blocks lie
side by side is a slice, and rows at equal distances are one view.
"""

from __future__ import annotations

import threading
import weakref

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.layouts.blocks import Arrangement, Blocks, Share
from oarlock.layouts.tables import Plan, as_index, columns_of

Pair = tuple[mx.array, mx.array]
SIZES = (16, 32, 64, 128, 256)
READS = ("auto", "gather", "rows")


@attrs.frozen
class PagedOptions:
    """``block_size``: tokens a block. ``reads``: "rows" attends row by row, "gather" copies; "auto" prefers rows."""

    block_size: int = attrs.field(default=32, validator=attrs.validators.in_(SIZES))
    reads: str = attrs.field(default="auto", validator=attrs.validators.in_(READS))


def attends(layer: LayerInfo, options: PagedOptions) -> bool:
    """Return whether attention goes row by row where no view covers all rows: wherever it can, unless told to gather."""
    return layer.attendable and options.reads != "gather"


class Pages:
    """One layer's planes. Made at the first write; they follow the blocks' arrangement when they are next used."""

    def __init__(self, layer: LayerInfo, blocks: Blocks, *, attends: bool) -> None:
        """Open without arrays. ``attends``: attention of rows that no view covers is done row by row."""
        self.layer, self.blocks, self.attends = layer, blocks, attends
        self.number = blocks.enlist(self)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._arrangement: Arrangement = blocks.arrangement

    @property
    def nbytes(self) -> int:
        """Bytes of both planes."""
        self.follow()
        return sum(int(plane.nbytes) for plane in (self.keys, self.values) if plane is not None)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.nbytes // self.blocks.capacity if self.nbytes else 0

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of so many tokens."""
        return self.block_bytes // self.blocks.size * tokens

    def check(self, keys: mx.array, values: mx.array) -> None:
        """Refuse a row of another geometry or dtype."""
        for plane, new in ((self.keys, keys), (self.values, values)):
            if plane is None:
                continue
            if plane.dtype != new.dtype:
                msg = f"rows of dtype {new.dtype} cannot join rows of {plane.dtype}"
                raise ValueError(msg)
            if (plane.shape[1], plane.shape[3]) != (new.shape[1], new.shape[3]):
                msg = f"got shape {new.shape}, heads and size of the others are {plane.shape[1]} and {plane.shape[3]}"
                raise ValueError(msg)

    def follow(self) -> None:
        """Move the blocks to where they belong by now: one copy of each plane, whatever happened since."""
        if self._arrangement is self.blocks.arrangement:
            return
        source = np.arange(self._arrangement.capacity, dtype=np.int32)
        while self._arrangement.after is not None and self._arrangement.target is not None:
            target, self._arrangement = self._arrangement.target, self._arrangement.after
            here, stays = np.zeros(self._arrangement.capacity, np.int32), target >= 0
            here[target[stays]] = source[stays]
            source = here
        if self.keys is None or self.values is None:
            return
        if not self.blocks.capacity:
            self.keys = self.values = None
            return
        moved = mx.array(source)
        self.keys, self.values = self._gather(self.keys, moved), self._gather(self.values, moved)

    def write(self, plan: Plan, keys: mx.array, values: mx.array, copied: Pair | None) -> None:
        """Write the window ``[B, H, N, D]``; padding is dropped, and first ``copied`` blocks go to their new owner."""
        self._make(keys, values)
        at, source = plan.slots(), plan.source()
        stale = None if self.attends else plan.stale()
        to = plan.copies()[1] if copied is not None else None
        for side, (plane, new) in enumerate(((self.keys, keys), (self.values, values))):
            assert plane is not None
            if not new.size:  # MLX divides by zero where a scatter's rows have no width
                continue
            if copied is not None:
                plane[:, :, to] = copied[side]
            rows, heads, width, size = new.shape
            flat = new if rows == 1 else new.transpose(1, 0, 2, 3).reshape(1, heads, rows * width, size)
            plane[:, :, at] = flat if source is None else mx.take(flat, source, axis=2)
            if stale is not None:
                plane[:, :, stale] = 0

    def put(self, share: Share, start: int, keys: mx.array, values: mx.array) -> None:
        """Write tokens ``[1, H, T, D]`` from ``start`` to the end of a row, into blocks of its own."""
        self._make(keys, values)
        size, stop = self.blocks.size, start + keys.shape[2]
        at = as_index(columns_of(share.ids, start, stop, size))
        stale = columns_of(share.ids, stop, share.ids.size * size, size)
        for plane, new in ((self.keys, keys), (self.values, values)):
            assert plane is not None
            if not new.size:
                continue
            plane[:, :, at] = new
            if stale.size and not self.attends:
                plane[:, :, as_index(stale)] = 0

    def tail(self, share: Share, tokens: int) -> Pair | None:
        """Return a copy of the tokens in a row's last block, dispatched; None where it is full."""
        count = tokens % self.blocks.size
        copies = self.blocks_of(mx.array(share.ids[-1:])) if count else None
        return (copies[0][:, :, :count], copies[1][:, :, :count]) if copies is not None else None

    def blocks_of(self, ids: mx.array) -> Pair | None:
        """Return copies of blocks ``[1, H, n * size, D]``, dispatched: a pending reader makes a write copy the plane."""
        self.follow()
        if self.keys is None or self.values is None:
            return None
        copies = (self._gather(self.keys, ids), self._gather(self.values, ids))
        mx.async_eval(*copies)
        return copies

    def row(self, share: Share, tokens: int) -> Pair:
        """Return one row ``[1, H, tokens, D]``: a view where its blocks lie side by side, else a copy."""
        self.follow()
        first = share.first
        return self.run(first, tokens) if first is not None else self.apart(mx.array(share.ids), tokens)

    def run(self, first: int, tokens: int) -> Pair:
        """Return ``tokens`` from block ``first`` on ``[1, H, tokens, D]``, without a copy."""
        assert self.keys is not None
        assert self.values is not None
        at = slice(first * self.blocks.size, first * self.blocks.size + tokens)
        return self.keys[:, :, at], self.values[:, :, at]

    def apart(self, ids: mx.array, tokens: int) -> Pair:
        """Return the first ``tokens`` of blocks ``ids`` ``[1, H, tokens, D]``, copied."""
        assert self.keys is not None
        assert self.values is not None
        return self._gather(self.keys, ids)[:, :, :tokens], self._gather(self.values, ids)[:, :, :tokens]

    def view(self, plan: Plan, first: int, step: int) -> Pair:
        """Return all rows ``[B, H, S, D]`` without a copy; they lie ``step`` blocks apart."""
        assert self.keys is not None
        assert self.values is not None
        rows, size, columns = len(plan.rows), self.blocks.size, plan.starts.longest + plan.width
        if rows == 1:
            return self.row(plan.rows[0], columns)
        at = slice(first * size, (first + rows * step) * size)
        return (
            _by_row(self.keys[0, :, at], rows)[:, :, :columns],
            _by_row(self.values[0, :, at], rows)[:, :, :columns],
        )

    def gathered(self, plan: Plan) -> Pair:
        """Return all rows ``[B, H, S, D]`` aligned left, copied."""
        assert self.keys is not None
        assert self.values is not None
        rows, columns, grid = len(plan.rows), plan.starts.longest + plan.width, plan.grid()
        return (
            _by_row(self._gather(self.keys, grid)[0], rows)[:, :, :columns],
            _by_row(self._gather(self.values, grid)[0], rows)[:, :, :columns],
        )

    def _gather(self, plane: mx.array, ids: mx.array) -> mx.array:
        """Return blocks ``ids`` of a plane, side by side: one copy, since a row of the flat plane is a block."""
        _, heads, columns, width = plane.shape
        blocks = columns // self.blocks.size
        at = (mx.arange(heads, dtype=mx.int32)[:, None] * blocks + ids).reshape(-1)
        flat = plane.reshape(heads * blocks, self.blocks.size * width)
        return mx.take(flat, at, axis=0).reshape(1, heads, ids.size * self.blocks.size, width)

    def _make(self, keys: mx.array, values: mx.array) -> None:
        """Make the planes, or check that what comes is of their geometry."""
        self.follow()
        columns = self.blocks.capacity * self.blocks.size
        if self.keys is None or self.values is None:
            self.keys = mx.zeros((1, keys.shape[1], columns, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((1, values.shape[1], columns, values.shape[3]), values.dtype)
        self.check(keys, values)


@attrs.frozen(kw_only=True)
class PagedState(RowState):
    """A stored row: a counted share of its full blocks, which nobody writes, and a copy of the tokens behind them.

    Its arrays are copied when they are asked for: ask on the thread that drives the engine.
    """

    pages: Pages = attrs.field(eq=False)
    share: Share = attrs.field(eq=False)
    tail: Pair | None = attrs.field(eq=False)

    def arrays(self) -> dict[str, mx.array]:
        """Return ``[1, H, tokens, D]`` of both, copied and dispatched."""
        parts = [self.tail] if self.tail is not None else []
        if (full := self.share.ids.size * self.pages.blocks.size) > 0:
            parts.insert(0, self.pages.row(self.share, full))
        if not parts:
            return {}
        keys, values = (mx.contiguous(mx.concatenate([part[side] for part in parts], axis=2)) for side in (0, 1))
        mx.async_eval(keys, values)
        return {"keys": keys, "values": values}

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, shared or not."""
        return self.pages.bytes_of(self.tokens)


class Library:
    """The pages of bound layers, for as long as a cache or a stored row lives. Layers of one model share their blocks."""

    def __init__(self) -> None:
        """Know no layer."""
        self._pages: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()
        self._latest: dict[int, tuple[weakref.ref[Blocks], int, tuple[int, ...]]] = {}

    def pages(self, layer: LayerInfo, options: PagedOptions) -> Pages:
        """Return the one that this very layer has, or a new one of ``options.block_size`` and ``options.reads``."""
        pages = self._pages.get(id(layer))
        if pages is None:
            blocks = self._blocks(layer, options.block_size)
            pages = Pages(layer, blocks, attends=attends(layer, options))
            self._pages[id(layer)] = pages
        return pages

    def _blocks(self, layer: LayerInfo, size: int) -> Blocks:
        """Return the blocks of the layers in front of this one, or new ones for the first layer of a model."""
        place, thread = tuple(map(int, layer.path.split("."))), threading.get_ident()
        latest = self._latest.get(size)
        blocks = latest[0]() if latest is not None and latest[1] == thread and latest[2] < place else None
        if blocks is None:
            blocks = Blocks(size)
        self._latest[size] = (weakref.ref(blocks), thread, place)
        return blocks


def _by_row(plane: mx.array, rows: int) -> mx.array:
    """Return ``[H, rows * n, D]`` as ``[rows, H, n, D]``, without a copy."""
    heads, columns, width = plane.shape
    return plane.reshape(heads, rows, columns // rows, width).transpose(1, 0, 2, 3)
