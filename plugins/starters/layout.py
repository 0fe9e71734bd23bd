"""The cache layout `example`: keys and values in half precision, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.layouts.coded import CodedLayout

OARLOCK_API = 1


@attrs.frozen
class Example:
    """``dtype``: "float16" or "bfloat16". Fields of this class are the layout's options in a config file."""

    dtype: str = attrs.field(default="float16", validator=attrs.validators.in_(("float16", "bfloat16")))

    def encode(self, name: str, array: mx.array) -> dict[str, mx.array]:
        """Return as what "keys" or "values" [B, H, N, D] are stored: arrays [B, H, N, any], each token by itself."""
        return {"numbers": array.astype(getattr(mx, self.dtype))}

    def decode(self, name: str, codes: Mapping[str, mx.array], dtype: mx.Dtype) -> mx.array:
        """Return [B, H, S, D] in ``dtype`` for what was stored of S tokens."""
        return codes["numbers"].astype(dtype)


@hookimpl
def register_layouts(register: Callable[[Any], None]) -> None:
    """Register `example`."""
    register(CodedLayout("example", Example))
