"""mlx-lm's serial caches, storing what a layout stores: the other side of a comparison. It knows no layout.

mlx-lm quantizes full attention only, and not in every model. Elsewhere its plain caches are given what a packed one would
be read as, so that everything but the storage is still its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache


def quantized(model: Any, bits: int, group_size: int, *, theirs: bool = True) -> list[Any]:
    """Return caches for one row that are quantized from the first token on, states and keys without values apart.

    ``theirs``: full attention in mlx-lm's own `QuantizedKVCache`, which not every model can read. Windows, and with
    ``theirs`` False all attention, in its plain caches, of keys and values that were quantized and dequantized.
    """

    def stored(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(stored, cache.caches))
        if type(cache) is KVCache and theirs:
            return QuantizedKVCache(group_size, bits)
        if type(cache) in (KVCache, RotatingKVCache):
            cache.__class__ = type("Rounded", (_Rounded, type(cache)), {"kept": (group_size, bits)})
        return cache

    return [stored(cache) for cache in make_prompt_cache(model)]


def rounded(caches: Iterable[Any]) -> bool:
    """Return whether any of ``caches`` is a plain one that is given quantized numbers."""
    return any(
        rounded(cache.caches) if isinstance(cache, CacheList) else isinstance(cache, _Rounded) for cache in caches
    )


class _Rounded:
    """A plain cache that stores what a packed one would be read as. mlx-lm looks for an attribute ``bits``: it has none."""

    kept: tuple[int, int]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if values.shape[-1]:  # keys without values choose columns, and nobody quantizes them
            keys, values = self._round(keys), self._round(values)
        return super().update_and_fetch(keys, values)  # type: ignore[misc]  # a cache of mlx-lm is the other base

    def _round(self, array: mx.array) -> mx.array:
        group_size, bits = self.kept
        packed = mx.quantize(array, group_size=group_size, bits=bits)
        return mx.dequantize(*packed, group_size=group_size, bits=bits)
