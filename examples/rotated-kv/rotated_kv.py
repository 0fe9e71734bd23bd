"""Rotated quantization of keys and values: a random rotation, then a short code for every number.

After the rotation a vector's numbers are nearly normal, whatever it was, so one table of codes serves all heads and
layers (the idea of TurboQuant, Zandieh et al., 2025).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import LayerInfo
from oarlock.layouts.coded import CodedLayout

OARLOCK_API = 1


@functools.cache
def rotation(size: int) -> mx.array:
    """Return an orthogonal matrix [size, size], always the same one."""
    matrix, _ = mx.linalg.qr(mx.random.normal((size, size), key=mx.random.key(size)), stream=mx.cpu)
    mx.eval(matrix)
    return matrix


@functools.cache
def levels(bits: int) -> mx.array:
    """Return the values of the codes, ascending: the middles of equally probable slices of a normal distribution."""
    count = 2**bits
    table = mx.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    mx.eval(table)
    return table


@attrs.frozen
class Rotated:
    """``bits`` a number: 4, two to a byte, or 8. Beside the codes of a vector stands its length."""

    bits: int = attrs.field(default=4, validator=attrs.validators.in_((4, 8)))

    def refuses(self, layer: LayerInfo) -> str | None:
        """Return why a layer cannot be held: two codes to a byte need an even head size."""
        odd = [size for size in (layer.key_dim, layer.value_dim) if size % 2]
        return f"its head size {odd[0]} is not even" if odd else None

    def encode(self, name: str, array: mx.array) -> dict[str, mx.array]:
        """Return codes uint8 ``[..., D * bits / 8]`` and norms float32 ``[..., 1]``."""
        x = array.astype(mx.float32)
        norms = mx.linalg.norm(x, axis=-1, keepdims=True)
        normal = (x / mx.maximum(norms, 1e-12)) @ rotation(x.shape[-1]) * math.sqrt(x.shape[-1])
        slices = mx.floor((1 + mx.erf(normal / math.sqrt(2))) * 2 ** (self.bits - 1))
        codes = mx.clip(slices, 0, 2**self.bits - 1).astype(mx.uint8)
        return {"codes": codes if self.bits == 8 else codes[..., ::2] + codes[..., 1::2] * 16, "norms": norms}

    def decode(self, name: str, codes: Mapping[str, mx.array], dtype: mx.Dtype) -> mx.array:
        """Return what `encode` was given, nearly."""
        short, norms = codes["codes"], codes["norms"]
        if self.bits == 4:
            short = mx.stack([short % 16, short // 16], axis=-1).reshape(*short.shape[:-1], -1)
        x = levels(self.bits)[short] @ rotation(short.shape[-1]).T
        return (x * norms / math.sqrt(short.shape[-1])).astype(dtype)


@hookimpl
def register_layouts(register: Callable[[Any], None]) -> None:
    """Register `rotated`."""
    register(CodedLayout("rotated", Rotated))
