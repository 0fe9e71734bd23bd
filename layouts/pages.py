"""The blocks of one layer, as arrays: keys and values, plain or packed. Who owns a block is not theirs.

A plane is ``[1, H, blocks * size, D]``: block b is columns ``b * size`` to ``(b + 1) * size``, so a row whose blocks lie
side by side is a slice, and rows at equal distances are one view. Packed, there are six planes, each with a D of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.layouts.blocks import Arrangement, Blocks, Share
from oarlock.layouts.packed import GROUPS, Format, KeysValues
from oarlock.layouts.planes import Planes, column_bytes
from oarlock.layouts.tables import Plan, as_index, columns_of

SIZES = (16, 32, 64, 128, 256)
READS = ("auto", "gather", "rows")
BITS = (4, 8)


@attrs.frozen
class PagedOptions:
    """``block_size``: tokens a block. ``reads``: "rows" attends row by row, "gather" copies; "auto" prefers rows.

    ``bits`` a number, None for those of the model; of packed numbers, ``group_size`` neighbours share a scale and a bias.
    """

    block_size: int = attrs.field(default=32, validator=attrs.validators.in_(SIZES))
    reads: str = attrs.field(default="auto", validator=attrs.validators.in_(READS))
    bits: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.in_(BITS)))
    group_size: int = attrs.field(default=64, validator=attrs.validators.in_(GROUPS))

    @property
    def format(self) -> Format | None:
        """How numbers are packed; None where they are not."""
        return None if self.bits is None else Format(bits=self.bits, group_size=self.group_size)


def attends(layer: LayerInfo, options: PagedOptions) -> bool:
    """Return whether attention goes row by row where no view covers all rows: wherever it can, unless told to gather."""
    return layer.attendable and options.reads != "gather"


def bytes_of(layer: LayerInfo, format_: Format | None) -> int:
    """Return the bytes of one token's keys and values."""
    return column_bytes(layer) if format_ is None else format_.column_bytes(layer)


class Pages:
    """One layer's planes. Made at the first write; they follow the blocks' arrangement when they are next used."""

    def __init__(self, layer: LayerInfo, blocks: Blocks, format_: Format | None = None, *, attends: bool) -> None:
        """Open without arrays. ``attends``: attention of rows that no view covers is done row by row."""
        self.layer, self.blocks, self.format, self.attends = layer, blocks, format_, attends
        self.number = blocks.enlist(self)
        self.planes: Planes = {}
        self._arrangement: Arrangement = blocks.arrangement

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        self.follow()
        return sum(int(plane.nbytes) for plane in self.planes.values())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: as the planes have it, before there are any as the layer says."""
        if nbytes := self.nbytes:
            return nbytes // self.blocks.capacity
        return bytes_of(self.layer, self.format) * self.blocks.size

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of so many tokens."""
        return self.block_bytes // self.blocks.size * tokens

    def meta(self) -> dict[str, str]:
        """Return what restores rows into blocks like these."""
        packed = self.format.meta() if self.format is not None else {}
        return {"path": self.layer.path, "block_size": str(self.blocks.size), **packed}

    # --- what numbers are stored as -----------------------------------------------------------------------

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return both by name, packed where this layer is."""
        return {"keys": keys, "values": values} if self.format is None else self.format.encode(keys, values)

    def decode(self, planes: Planes) -> tuple[mx.array, mx.array]:
        """Return keys and values as arrays."""
        return (planes["keys"], planes["values"]) if self.format is None else self.format.decode(planes)

    def handed(self, planes: Planes) -> tuple[Any, Any]:
        """Return what attention gets: handles on packed planes where it takes them, else arrays."""
        if self.format is not None and self.layer.attendable:
            return KeysValues.pair(planes, self.format)
        return self.decode(planes)

    def outline(self, name: str) -> tuple[int, int, mx.Dtype]:
        """Return heads, head size and dtype of the keys or values as attention knows them."""
        plane, packed = self.planes[name if self.format is None else f"{name}.scales"], self.format
        return plane.shape[1], plane.shape[3] * (packed.group_size if packed is not None else 1), plane.dtype

    def check_format(self, format_: Format | None) -> None:
        """Refuse rows that are stored in another format: they would have to be packed anew."""
        if format_ != self.format:
            msg = f"rows stored {named(format_)} cannot be put into blocks {named(self.format)}"
            raise ValueError(msg)

    def check(self, new: Planes) -> None:
        """Refuse a row of another geometry or dtype."""
        for name, plane in self.planes.items():
            if plane.dtype != new[name].dtype:
                msg = f"rows of dtype {new[name].dtype} cannot join rows of {plane.dtype}"
                raise ValueError(msg)
            heads, size = plane.shape[1], plane.shape[3]
            if (heads, size) != (new[name].shape[1], new[name].shape[3]):
                msg = f"got shape {new[name].shape}, heads and size of the others are {heads} and {size}"
                raise ValueError(msg)

    # --- writes -------------------------------------------------------------------------------------------

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
        if not self.blocks.capacity:
            self.planes = {}
        elif self.planes:
            self.planes = self._gathered(mx.array(source))

    def write(self, plan: Plan, keys: mx.array, values: mx.array, copied: Planes) -> None:
        """Write the window ``[B, H, N, D]``; padding is dropped, and first ``copied`` blocks go to their new owner."""
        planes = self.encode(keys, values)
        self._make(planes)
        at, source = plan.slots(), plan.source()
        stale = None if self.attends else plan.stale()
        to = plan.copies()[1] if copied else None
        for name, new in planes.items():
            plane = self.planes[name]
            if not new.size:  # MLX divides by zero where a scatter's rows have no width
                continue
            if copied:
                plane[:, :, to] = copied[name]
            rows, heads, width, size = new.shape
            flat = new if rows == 1 else new.transpose(1, 0, 2, 3).reshape(1, heads, rows * width, size)
            plane[:, :, at] = flat if source is None else mx.take(flat, source, axis=2)
            if stale is not None:
                plane[:, :, stale] = 0

    def put(self, share: Share, start: int, planes: Planes) -> None:
        """Write tokens ``[1, H, T, D]`` from ``start`` to the end of a row, into blocks of its own."""
        self._make(planes)
        size, stop = self.blocks.size, start + next(iter(planes.values())).shape[2]
        at = as_index(columns_of(share.ids, start, stop, size))
        stale = columns_of(share.ids, stop, share.ids.size * size, size)
        for name, new in planes.items():
            plane = self.planes[name]
            if not new.size:
                continue
            plane[:, :, at] = new
            if stale.size and not self.attends:
                plane[:, :, as_index(stale)] = 0

    # --- reads: planes ``[1, H, T, D]``, or ``[B, H, S, D]`` of all rows ------------------------------------

    def tail(self, share: Share, tokens: int) -> Planes:
        """Return a copy of the tokens in a row's last block, dispatched; nothing where it is full."""
        count = tokens % self.blocks.size
        copies = self.blocks_of(mx.array(share.ids[-1:])) if count else {}
        return {name: copy[:, :, :count] for name, copy in copies.items()}

    def blocks_of(self, ids: mx.array) -> Planes:
        """Return copies of blocks, dispatched: a pending reader makes a write copy the plane."""
        self.follow()
        copies = self._gathered(ids)
        mx.async_eval(*copies.values())
        return copies

    def row(self, share: Share, tokens: int) -> Planes:
        """Return ``tokens`` of one row: a view where its blocks lie side by side, else a copy."""
        self.follow()
        first = share.first
        return self.run(first, tokens) if first is not None else self.apart(mx.array(share.ids), tokens)

    def run(self, first: int, tokens: int) -> Planes:
        """Return ``tokens`` from block ``first`` on, without a copy."""
        at = slice(first * self.blocks.size, first * self.blocks.size + tokens)
        return {name: plane[:, :, at] for name, plane in self.planes.items()}

    def apart(self, ids: mx.array, tokens: int) -> Planes:
        """Return the first ``tokens`` of blocks ``ids``, copied."""
        return {name: copy[:, :, :tokens] for name, copy in self._gathered(ids).items()}

    def view(self, plan: Plan, first: int, step: int) -> Planes:
        """Return all rows without a copy; they lie ``step`` blocks apart."""
        rows, size, columns = len(plan.rows), self.blocks.size, plan.starts.longest + plan.width
        if rows == 1:
            return self.row(plan.rows[0], columns)
        at = slice(first * size, (first + rows * step) * size)
        return {name: _by_row(plane[0, :, at], rows)[:, :, :columns] for name, plane in self.planes.items()}

    def gathered(self, plan: Plan) -> Planes:
        """Return all rows aligned left, copied."""
        rows, columns, copies = len(plan.rows), plan.starts.longest + plan.width, self._gathered(plan.grid())
        return {name: _by_row(copy[0], rows)[:, :, :columns] for name, copy in copies.items()}

    def _gathered(self, ids: mx.array) -> Planes:
        return {name: self._gather(plane, ids) for name, plane in self.planes.items()}

    def _gather(self, plane: mx.array, ids: mx.array) -> mx.array:
        """Return blocks ``ids`` of a plane, side by side: one copy, since a row of the flat plane is a block."""
        _, heads, columns, width = plane.shape
        blocks = columns // self.blocks.size
        at = (mx.arange(heads, dtype=mx.int32)[:, None] * blocks + ids).reshape(-1)
        flat = plane.reshape(heads * blocks, self.blocks.size * width)
        return mx.take(flat, at, axis=0).reshape(1, heads, ids.size * self.blocks.size, width)

    def _make(self, new: Planes) -> None:
        """Make the planes, or check that what comes is of their geometry."""
        self.follow()
        columns = self.blocks.capacity * self.blocks.size
        if not self.planes:
            self.planes = {
                name: mx.zeros((1, plane.shape[1], columns, plane.shape[3]), plane.dtype) for name, plane in new.items()
            }
        self.check(new)


@attrs.frozen(kw_only=True)
class PagedState(RowState):
    """A stored row: a counted share of its full blocks, which nobody writes, and a copy of the tokens behind them.

    Its arrays are copied when they are asked for: ask on the thread that drives the engine.
    """

    pages: Pages = attrs.field(eq=False)
    share: Share = attrs.field(eq=False)
    tail: Planes = attrs.field(eq=False)

    def arrays(self) -> dict[str, mx.array]:
        """Return every plane ``[1, H, tokens, D]``, copied and dispatched."""
        parts = [self.tail] if self.tail else []
        if (full := self.share.ids.size * self.pages.blocks.size) > 0:
            parts.insert(0, self.pages.row(self.share, full))
        if not parts:
            return {}
        arrays = {name: mx.contiguous(mx.concatenate([part[name] for part in parts], axis=2)) for name in parts[0]}
        mx.async_eval(*arrays.values())
        return arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, shared or not."""
        return self.pages.bytes_of(self.tokens)


def format_of(meta: Mapping[str, str]) -> Format | None:
    """Return the format that `PagedState.meta` described; None for plain numbers."""
    return Format.from_meta(meta) if "bits" in meta else None


def named(format_: Format | None) -> str:
    """Say how numbers are stored."""
    return "plainly" if format_ is None else f"in {format_.bits} bits a number and groups of {format_.group_size}"


def _by_row(plane: mx.array, rows: int) -> mx.array:
    """Return ``[H, rows * n, D]`` as ``[rows, H, n, D]``, without a copy."""
    heads, columns, width = plane.shape
    return plane.reshape(heads, rows, columns // rows, width).transpose(1, 0, 2, 3)
