"""Packed planes and attention over them: affine groups along the head. It knows no rows and no columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core.contracts.layout import LayerInfo
from oarlock.layouts.planes import Planes

BITS = (2, 3, 4, 6, 8)
GROUPS = (32, 64, 128)
PARTS = ("", ".scales", ".biases")
PACKED_WIDTH = 2
"""Up to so many tokens a row, products with packed planes are faster than unpacking: docs/decisions says by how much."""


@attrs.frozen(kw_only=True)
class Format:
    """How a number is stored: ``bits`` of it, and of ``group_size`` neighbours one scale and one bias."""

    bits: int
    group_size: int

    def pack(self, name: str, array: mx.array) -> Planes:
        """Return ``[..., D]`` as its packed integers, scales and biases."""
        parts = mx.quantize(array, group_size=self.group_size, bits=self.bits)
        return {name + part: plane for part, plane in zip(PARTS, parts, strict=True)}

    def unpack(self, name: str, planes: Planes) -> mx.array:
        """Return the array again, in the dtype of the scales."""
        packed, scales, biases = (planes[name + part] for part in PARTS)
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return both packed."""
        return {**self.pack("keys", keys), **self.pack("values", values)}

    def decode(self, planes: Planes) -> tuple[mx.array, mx.array]:
        """Return both again."""
        return self.unpack("keys", planes), self.unpack("values", planes)

    def refuses(self, layer: LayerInfo) -> str | None:
        """Return which head size of ``layer`` cannot be packed, and what could; None where both can."""
        for name, size in (("key", layer.key_dim), ("value", layer.value_dim)):
            if not size:
                return f"the layer showed no {name}s in the traced forward, so there is nothing known to pack"
            if size % self.group_size:
                fits = [str(group) for group in GROUPS if not size % group]
                allowed = f"group_size may be {' or '.join(fits)}" if fits else f"it is a multiple of none of {GROUPS}"
                return f"its {name} size {size} is no multiple of group_size {self.group_size}; {allowed}"
        return None

    def product(self, left: mx.array, name: str, planes: Planes) -> mx.array:
        """Multiply ``left`` [..., M, D] by packed keys, or ``left`` [..., M, S] by packed values [..., S, D]."""
        packed, scales, biases = (planes[name + part] for part in PARTS)
        options: dict[str, Any] = {"transpose": name == "keys", "bits": self.bits, "group_size": self.group_size}
        return mx.quantized_matmul(left, packed, scales, biases, **options)

    def bytes_of(self, size: int, scale: int) -> int:
        """Return the bytes of ``size`` numbers whose scales have ``scale`` bytes each."""
        return size * self.bits // 8 + 2 * size // self.group_size * scale

    def column_bytes(self, layer: LayerInfo) -> int:
        """Return the bytes of one token's keys and values."""
        scale = layer.dtype.size if layer.dtype is not None else 2
        return layer.kv_heads * sum(self.bytes_of(size, scale) for size in (layer.key_dim, layer.value_dim))

    def meta(self) -> dict[str, str]:
        """Return what restores this."""
        return {"bits": str(self.bits), "group_size": str(self.group_size)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> Format:
        """Return the format that `meta` described."""
        return cls(bits=int(meta["bits"]), group_size=int(meta["group_size"]))


def multiplies(queries: mx.array, width: int) -> bool:
    """Return whether products with packed planes are faster than unpacking for ``width`` tokens a row.

    They read the fewest bytes. More tokens share what is unpacked; so does a CPU in 16 bits, whose packed products are
    slow.
    """
    return width <= PACKED_WIDTH and (queries.dtype == mx.float32 or mx.default_device() != mx.cpu)


def attended(queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Attend to what a cache handed out: handles do it themselves, arrays by MLX."""
    if isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    seen: mx.array = keys.attend(queries, scale, mask, sinks)
    return seen


class KeysValues:
    """A `KeyValues` handle over packed planes ``[B, H, S, ...]`` of one forward."""

    def __init__(self, planes: Planes, format_: Format, name: str) -> None:
        """Stand for the array ``name`` of ``planes``."""
        scales = planes[f"{name}.scales"]
        self.shape = (*scales.shape[:3], scales.shape[3] * format_.group_size)
        self.dtype = scales.dtype
        self._planes, self._format = planes, format_

    @classmethod
    def pair(cls, planes: Planes, format_: Format) -> tuple[KeysValues, KeysValues]:
        """Return the handles of keys and of values."""
        return cls(planes, format_, "keys"), cls(planes, format_, "values")

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` [B, heads, N, D]."""
        if multiplies(queries, queries.shape[2]):
            return self._packed(queries, scale, mask, sinks)
        keys, values = self._format.decode(self._planes)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def _packed(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attend by products with packed planes; the mask is None, "causal", boolean or added."""
        batch, heads, width, _ = queries.shape
        kv_heads = self.shape[1]
        grouped = (batch, kv_heads, heads // kv_heads, width)
        scores = self._product((queries * scale).reshape(*grouped, -1), "keys")  # (B, KV, R, N, S)
        if mask is not None:
            mask = _causal(width, self.shape[2]) if isinstance(mask, str) else mask
            mask = _per_group(mask, kv_heads, grouped[2])
            low = mx.finfo(scores.dtype).min
            scores = mx.where(mask, scores, low) if mask.dtype == mx.bool_ else scores + mask
        if sinks is not None:
            sink = mx.broadcast_to(sinks.astype(scores.dtype).reshape(1, kv_heads, -1, 1, 1), (*grouped, 1))
            scores = mx.concatenate([sink, scores], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        out = self._product(weights if sinks is None else weights[..., 1:], "values")
        return out.reshape(batch, heads, width, -1)

    def _product(self, left: mx.array, name: str) -> mx.array:
        parts = (name + part for part in PARTS)
        return self._format.product(left, name, {part: mx.expand_dims(self._planes[part], 2) for part in parts})


def _causal(width: int, columns: int) -> mx.array:
    return mx.arange(columns - width, columns)[:, None] >= mx.arange(columns)


def _per_group(mask: mx.array, kv_heads: int, repeats: int) -> mx.array:
    """Return a mask that broadcasts to [B, heads, N, S] as one that does to [B, KV, R, N, S]."""
    if mask.ndim < 3:
        return mask
    heads = mask.shape[-3]
    groups = (kv_heads, repeats) if heads > 1 else (1, 1)
    return mask.reshape(*mask.shape[:-3], *groups, *mask.shape[-2:])
