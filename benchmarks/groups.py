"""Rows on all layers of SmolLM2's geometry, in any registered layout, without a model. It times nothing.

Rows come as an engine makes them: each is prefilled alone in chunks, then it joins; nothing is reserved for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache
from storages import KV_HEADS, SIZE, tokens

from oarlock.core import manager
from oarlock.core.choices import parse_options
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions

LAYERS, CHUNK = 30, 512
PLUGINS = manager.build()
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "rotating": {"name": "rotating"},
    "quantized, 8 bits": {"name": "quantized", "bits": 8, "group_size": 64},
    "quantized, 4 bits": {"name": "quantized", "bits": 4, "group_size": 64},
    "paged": {"name": "paged"},
    "delayed": {"name": "delayed"},
}
"""What is compared, as a configuration names it."""


class Group:
    """Rows of one layout; ``window``: of its layers, where they have one."""

    def __init__(self, choice: Mapping[str, Any], dtype: mx.Dtype, *, window: int = 0) -> None:
        self._layout = PLUGINS.resolve("layout", choice["name"])
        given = {key: value for key, value in choice.items() if key != "name"}
        self._options = parse_options(self._layout.options, given, choice["name"])
        kind = "full" if "full" in self._layout.kinds else "rotating"
        shape = {"kv_heads": KV_HEADS, "key_dim": SIZE, "value_dim": SIZE, "dtype": dtype, "attendable": True}
        self._layers = [
            LayerInfo(index=i, path=str(i), kind=kind, window=window, **shape)  # type: ignore[arg-type]
            for i in range(LAYERS)
        ]
        if refusals := [why for layer in self._layers if (why := self._layout.refuses(layer, self._options))]:
            msg = f"{choice['name']}: {refusals[0]}"
            raise ValueError(msg)
        self._dtype, self.caches = dtype, self._open()

    def fill(self, lengths: Sequence[int]) -> None:
        """Let one row of each length join."""
        for length in lengths:
            self.join(self.row(length))
            mx.eval(self.arrays())

    def row(self, length: int) -> list[BatchCache]:
        """Return a row of its own, evaluated."""
        caches = self._open()
        for cache in caches:
            cache.add(1)
        for start in range(0, length, CHUNK):
            self._append(caches, min(CHUNK, length - start))
            mx.eval([array for cache in caches for array in cache.arrays()])
        return caches

    def append(self) -> None:
        """Add a token to every row, as a step does."""
        self._append(self.caches, 1)
        mx.eval(self.arrays())

    def join(self, caches: Sequence[BatchCache]) -> None:
        for cache, other in zip(self.caches, caches, strict=True):
            cache.join(other, [cache.rows])

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its place, as in an engine."""
        last = self.caches[0].rows - 1
        indices = [last if i == row else i for i in range(last)]
        for cache in self.caches:
            cache.keep(indices)

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays()]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, reserve included: of the arrays, whatever the caches say of themselves."""
        return sum(int(array.nbytes) for array in self.arrays())

    def _open(self) -> list[BatchCache]:
        return [self._layout.open(layer, self._options, slots=1, window=1) for layer in self._layers]

    def _append(self, caches: Sequence[BatchCache], width: int) -> None:
        rows = caches[0].rows
        starts, widths = Positions(caches[0].tokens), [width] * rows
        new = tokens(rows, width).astype(self._dtype)
        for cache in caches:
            cache.begin(widths, starts)
        for cache in caches:
            cache.update_and_fetch(new, new)  # type: ignore[attr-defined]
        for cache in caches:
            cache.commit(widths)


class PaddedGroup:
    """mlx-lm's batch cache, on as many layers: `extend` and `filter`."""

    def __init__(self, lengths: Sequence[int], dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self.caches = [self._merged(lengths) for _ in range(LAYERS)]
        mx.eval(self.arrays())

    def row(self, length: int) -> list[BatchKVCache]:
        """Return a row of its own, evaluated."""
        caches = [self._merged([length]) for _ in range(LAYERS)]
        mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
        return caches

    def append(self) -> None:
        """Add a token to every row."""
        for cache in self.caches:
            new = tokens(len(cache.offset), 1).astype(self._dtype)
            cache.update_and_fetch(new, new)
        mx.eval(self.arrays())

    def join(self, caches: Sequence[BatchKVCache]) -> None:
        for cache, other in zip(self.caches, caches, strict=True):
            cache.extend(other)

    def leave(self, row: int) -> None:
        keep = [i for i in range(len(self.caches[0].offset)) if i != row]
        for cache in self.caches:
            cache.filter(keep)

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in (cache.keys, cache.values, cache.offset)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(cache.nbytes for cache in self.caches)

    def _merged(self, lengths: Sequence[int]) -> BatchKVCache:
        serial = [KVCache() for _ in lengths]
        for cache, length in zip(serial, lengths, strict=True):
            new = tokens(1, length).astype(self._dtype)
            cache.update_and_fetch(new, new)
        return BatchKVCache.merge(serial)
