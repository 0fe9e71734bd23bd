"""Layouts that differ from `full` and `rotating` in one thing only: as what a token's keys and values are stored.

Whoever has such an idea writes a `Codec` and registers ``CodedLayout(name, codec)``. Rows, rings, rollbacks, states and
budgets are those of the two layouts; where attention could read the codes themselves, `layouts.packed` shows how.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import mlx.core as mx

from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.layouts.full import LeftAligned
from oarlock.layouts.planes import Planes, round_up
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RingCache, ring_of, ring_refusal
from oarlock.layouts.slots import SlotCache

BOTH = ("keys", "values")


class Codec(Protocol):
    """As what keys and values are stored: an attrs class, frozen, whose fields are the layout's options in a config file.

    Fields are strings, numbers or booleans. Each token's code depends on that token alone.
    """

    def encode(self, name: str, array: mx.array) -> Mapping[str, mx.array]:
        """Return the codes of "keys" or "values" ``[B, H, N, D]``: arrays ``[B, H, N, any]`` by names of the codec's own."""
        ...

    def decode(self, name: str, codes: Mapping[str, mx.array], dtype: mx.Dtype) -> mx.array:
        """Return ``[B, H, S, D]`` in ``dtype`` for S tokens of the codes that `encode` made, other tokens' among them."""
        ...


@runtime_checkable
class ChoosyCodec(Protocol):
    """What a codec has besides, that cannot code every layer."""

    def refuses(self, layer: LayerInfo) -> str | None:
        """Return why it cannot, such as a head size, or None."""
        ...


@attrs.frozen
class Coding:
    """A codec under the name of its layout, for layers of one dtype."""

    layout: str
    codec: Any
    dtype: mx.Dtype

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return the codes of both as planes of their tokens."""
        both = zip(BOTH, (keys, values), strict=True)
        return {
            f"{name}.{part}": plane for name, array in both for part, plane in self.codec.encode(name, array).items()
        }

    def decode(self, planes: Planes) -> tuple[mx.array, mx.array]:
        """Return both again."""
        codes: dict[str, Planes] = {name: {} for name in BOTH}
        for name, plane in planes.items():
            which, _, part = name.partition(".")
            codes[which][part] = plane
        keys, values = (self.codec.decode(name, codes[name], self.dtype) for name in BOTH)
        return keys, values

    def meta(self) -> dict[str, str]:
        """Return what restores this, but the layout's name."""
        return {"options": json.dumps(attrs.asdict(self.codec)), "dtype": str(self.dtype).rpartition(".")[2]}


class CodedPlanes(SlotCache):
    """Codes in planes."""

    coding: Coding

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return the codes of both."""
        return self.coding.encode(keys, values)

    def decode(self, planes: Planes) -> tuple[mx.array, mx.array]:
        """Return both again."""
        return self.coding.decode(planes)

    def storage(self) -> Hashable:
        """Describe the storage."""
        return self.coding

    def meta(self) -> dict[str, str]:
        """Return what restores a cache like this one."""
        return {**self.coding.meta(), "column_bytes": str(self.column_bytes)}

    def state_of(self, row: int, planes: Planes) -> RowState:
        """Return what is stored of a row as ``planes``."""
        return RowState(layout=self.coding.layout, tokens=self._tokens[row], arrays=planes, meta=self.meta())


class CodedCache(CodedPlanes, LeftAligned):
    """Every token of every row."""

    def __init__(self, slots: int, coding: Coding) -> None:
        """Open without rows."""
        super().__init__(slots)
        self.coding = coding

    def sibling(self, slots: int) -> CodedCache:
        """Return a cache like this one, without rows."""
        return CodedCache(slots, self.coding)


class CodedRing(CodedPlanes, RingCache):
    """The tokens of every row's window."""

    def __init__(self, slots: int, ring: Ring, coding: Coding) -> None:
        """Open without rows; ``ring`` has none either."""
        super().__init__(slots, ring)
        self.coding = coding

    def sibling(self, slots: int) -> CodedRing:
        """Return a cache like this one, without rows."""
        return CodedRing(slots, self.ring.pick([]), self.coding)

    def storage(self) -> Hashable:
        """Describe the storage."""
        return (self.coding, self.ring.window, self.ring.keep)

    def meta(self) -> dict[str, str]:
        """Return what restores a cache like this one."""
        return {**super().meta(), "window": str(self.ring.window), "keep": str(self.ring.keep)}


@attrs.frozen
class CodedLayout:
    """A layout for full attention and sliding windows, stored as ``options``, a `Codec`, says."""

    name: str
    options: type
    kinds: frozenset[str] = frozenset({"full", "rotating"})

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return why the codec cannot hold the layer, or None: by itself, or because its codes are no planes."""
        if not layer.key_dim or not layer.value_dim or layer.dtype is None:
            return "the layer showed no keys and values in the traced forward, so there is nothing known to encode"
        if isinstance(options, ChoosyCodec) and (refusal := options.refuses(layer)) is not None:
            return refusal
        if layer.kind == "rotating" and (refusal := ring_refusal(layer)) is not None:
            return refusal
        for name, array in _token(layer).items():
            if (refusal := _misfit(options, name, array)) is not None:
                return refusal
        return None

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> SlotCache:
        """Return a cache without rows; a ring has room to roll back ``window`` tokens."""
        coding = Coding(self.name, options, layer.dtype)
        ring = ring_of(layer, window) if layer.kind == "rotating" else None
        return _cache(slots, ring, coding).sized(_column_bytes(layer, coding))

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row's planes at ``tokens``, reserve included; a ring's without a method's slack."""
        coding = Coding(self.name, options, layer.dtype)
        return _column_bytes(layer, coding) * min(round_up(tokens), layer.window or round_up(tokens))

    def restore(self, state: RowState) -> SlotCache:
        """Return a one-row cache that copies the state's arrays when it is written to, and never writes them."""
        meta = state.meta()
        coding = Coding(self.name, self.options(**json.loads(meta["options"])), getattr(mx, meta["dtype"]))
        ring = Ring(window=int(meta["window"]), keep=int(meta["keep"])) if "window" in meta else None
        cache = _cache(1, ring, coding)
        cache.sized(int(meta["column_bytes"])).adopt(state.arrays(), state.tokens)
        return cache


def _cache(slots: int, ring: Ring | None, coding: Coding) -> CodedCache | CodedRing:
    return CodedCache(slots, coding) if ring is None else CodedRing(slots, ring, coding)


def _token(layer: LayerInfo) -> dict[str, mx.array]:
    """Return keys and values of one token, which nobody evaluates."""
    sizes = zip(BOTH, (layer.key_dim, layer.value_dim), strict=True)
    return {name: mx.zeros((1, layer.kv_heads, 1, size), layer.dtype) for name, size in sizes}


@functools.lru_cache(maxsize=256)
def _column_bytes(layer: LayerInfo, coding: Coding) -> int:
    """Return the bytes of one token's codes; kept, since a budget asks for every row that is to be let in."""
    return sum(int(plane.nbytes) for plane in coding.encode(**_token(layer)).values())


def _misfit(codec: Codec, name: str, array: mx.array) -> str | None:
    """Return what is wrong with the codes of one token, or with what they are decoded to."""
    codes = codec.encode(name, array)
    for part, plane in codes.items():
        if plane.ndim != 4 or plane.shape[:3] != array.shape[:3]:
            return f"{part!r} of {name} {array.shape} was encoded as {plane.shape}; [B, H, N, any] is allowed"
    again = codec.decode(name, codes, array.dtype)
    if (again.shape, again.dtype) == (array.shape, array.dtype):
        return None
    return f"{name} {array.shape} of {array.dtype} were decoded as {again.shape} of {again.dtype}; the same is allowed"
