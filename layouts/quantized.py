"""Full attention and sliding windows in 2 to 8 bits a number, quantized from the first token on.

What a token is stored as does not depend on chunks or company, and equals what mlx-lm's `QuantizedKVCache` stores.
Packing runs along the head, so rows and columns move as they do in any other storage. How packed planes attend is
`layouts.packed`'s business; `docs/decisions/quantized-reads.md` says what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.layouts.full import LeftAligned
from oarlock.layouts.packed import BITS, GROUPS, Format, KeysValues
from oarlock.layouts.planes import NamedPlanes, Planes, round_up
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RingCache, ring_of, ring_refusal
from oarlock.layouts.slots import SlotCache

OARLOCK_API = 1
NAME = "quantized"


@attrs.frozen
class QuantizedOptions:
    """``bits`` a number; ``group_size``: how many neighbours share a scale and a bias."""

    bits: int = attrs.field(default=8, validator=attrs.validators.in_(BITS))
    group_size: int = attrs.field(default=64, validator=attrs.validators.in_(GROUPS))


class PackedPlanes(NamedPlanes, SlotCache):
    """Keys and values, each packed with its scales and biases. Attention gets a handle, or arrays where it must."""

    format: Format
    attends: bool

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Quantize both."""
        return self.format.encode(keys, values)

    def decode(self, planes: Planes) -> tuple[Any, Any]:
        """Return handles, or both dequantized."""
        if self.attends:
            return KeysValues.pair(planes, self.format)
        return self.format.decode(planes)

    def packing(self, rows: SlotCache) -> SlotCache:
        """Return the rows of a plain cache packed as they lie: every token stays in its column."""
        part = self.sibling(rows.rows)
        part._set_tokens(rows.tokens)
        columns = max(map(rows._held, range(rows.rows)), default=0)
        if rows.planes and columns:
            part.planes = self.encode(**rows._read(rows.rows, columns))
            part._used_slots = rows.rows
        return part

    def meta(self) -> dict[str, str]:
        """Return what restores a cache like this one."""
        return {**self.format.meta(), "attends": str(int(self.attends))}

    def state_of(self, row: int, planes: Planes) -> RowState:
        """Return what is stored of a row as ``planes``, packed as it is."""
        return RowState(layout=NAME, tokens=self._tokens[row], arrays=planes, meta=self.meta())


class QuantizedCache(LeftAligned, PackedPlanes):
    """Every token of every row."""

    def __init__(self, slots: int, format_: Format, *, attends: bool) -> None:
        """Open without rows."""
        super().__init__(slots)
        self.format, self.attends = format_, attends

    def storage(self) -> Hashable:
        """Describe the storage."""
        return (NAME, self.format)

    def sibling(self, slots: int) -> QuantizedCache:
        """Return a cache like this one, without rows."""
        return QuantizedCache(slots, self.format, attends=self.attends)


class QuantizedRing(RingCache, PackedPlanes):
    """The window of every row."""

    def __init__(self, slots: int, ring: Ring, format_: Format, *, attends: bool) -> None:
        """Open without rows."""
        super().__init__(slots, ring)
        self.format, self.attends = format_, attends

    def storage(self) -> Hashable:
        """Describe the storage."""
        return (NAME, self.format, self.ring.window, self.ring.keep)

    def sibling(self, slots: int) -> QuantizedRing:
        """Return a cache like this one, without rows."""
        return QuantizedRing(slots, self.ring.pick([]), self.format, attends=self.attends)

    def packing(self, rows: SlotCache) -> SlotCache:
        """Return the rows of a plain ring of the same slack packed as they lie."""
        part = super().packing(rows)
        assert isinstance(part, QuantizedRing)
        assert isinstance(rows, RingCache)
        part.ring = rows.ring
        return part

    def meta(self) -> dict[str, str]:
        """Return what restores a cache like this one."""
        return {**super().meta(), "window": str(self.ring.window), "keep": str(self.ring.keep)}


@attrs.frozen
class QuantizedLayout:
    """Registers as ``quantized``; holds full and sliding-window layers whose head sizes are multiples of the group."""

    name: str = NAME
    kinds: frozenset[str] = frozenset({"full", "rotating"})
    options: type = QuantizedOptions

    def refuses(self, layer: LayerInfo, options: QuantizedOptions) -> str | None:
        """Return which head size cannot be packed, and what could."""
        refusal = _format(options).refuses(layer)
        if refusal is not None:
            return refusal
        return ring_refusal(layer) if layer.kind == "rotating" else None

    def attends(self, layer: LayerInfo, options: QuantizedOptions) -> bool:
        """Return whether attention takes handles: elsewhere planes are dequantized when they are read."""
        return layer.attendable

    def open(
        self, layer: LayerInfo, options: QuantizedOptions, *, slots: int, window: int
    ) -> QuantizedCache | QuantizedRing:
        """Return a cache without rows; a ring has room to roll back ``window`` tokens."""
        format_ = _format(options)
        column = format_.column_bytes(layer)
        if layer.kind == "rotating":
            return QuantizedRing(slots, ring_of(layer, window), format_, attends=layer.attendable).sized(column)
        return QuantizedCache(slots, format_, attends=layer.attendable).sized(column)

    def bytes_at(self, layer: LayerInfo, options: QuantizedOptions, tokens: int) -> int:
        """Return the bytes of one row's planes at ``tokens``, reserve included; a ring's without a method's slack."""
        return _format(options).column_bytes(layer) * min(round_up(tokens), layer.window or round_up(tokens))

    def restore(self, state: RowState) -> SlotCache:
        """Return a one-row cache that copies the state's arrays when it is written to, and never writes them."""
        cache = packed_of(state.meta())
        cache.adopt(state.arrays(), state.tokens)
        return cache


def packed_of(meta: Mapping[str, str]) -> QuantizedCache | QuantizedRing:
    """Return a cache without rows like the one whose `PackedPlanes.meta` this is."""
    format_, attends = Format.from_meta(meta), meta["attends"] == "1"
    if "window" not in meta:
        return QuantizedCache(1, format_, attends=attends)
    return QuantizedRing(1, Ring(window=int(meta["window"]), keep=int(meta["keep"])), format_, attends=attends)


def _format(options: QuantizedOptions) -> Format:
    return Format(bits=options.bits, group_size=options.group_size)


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `quantized`."""
    register(QuantizedLayout())
