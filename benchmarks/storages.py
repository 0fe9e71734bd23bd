"""Ways to store the rows of full attention, as far as their costs need: a third of SmolLM2's layers.

Each offers the same operations on the same data. None runs a model: a step is append and attention, layer after layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts.full import FullLayout

LAYERS, HEADS, KV_HEADS, SIZE = 10, 9, 3, 64
CAPACITY = 2304
"""Columns reserved everywhere, so that growing stands outside of what is measured."""
INFO = LayerInfo(index=0, path="0", kind="full", kv_heads=KV_HEADS, key_dim=SIZE, value_dim=SIZE, dtype=mx.float32)


class Storage(Protocol):
    """All layers of a group, stored one way."""

    name: str
    lengths: list[int]

    def step(self, width: int = 1) -> mx.array:
        """Append ``width`` tokens to every row on every layer, attend, and return the last layer's outcome, unevaluated."""
        ...

    def joiner(self, length: int) -> list[Any]:
        """Return a row of ``length`` tokens as its prefill leaves it, evaluated."""
        ...

    def join(self, joiner: list[Any], length: int) -> None:
        """Add a row of ``length`` tokens that was prefilled alone."""
        ...

    def leave(self, row: int) -> None:
        """Drop a row; which row takes its place is the storage's choice."""
        ...

    def roll_back(self, kept: Sequence[int], width: int) -> None:
        """After a step of ``width``: row i keeps ``kept[i]`` of its tokens."""
        ...

    def arrays(self) -> list[mx.array]:
        """Return the buffers: evaluated behind every operation but steps, so that nothing is owed to the next one."""
        ...


def tokens(rows: int, width: int, heads: int = KV_HEADS) -> mx.array:
    """Return the same tokens in every row and head, so that all storages hold the same."""
    one = mx.sin(mx.arange(width)[:, None] + mx.arange(SIZE))  # (N, D)
    return mx.contiguous(mx.broadcast_to(one, (rows, heads, width, SIZE)))


def attend(x: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(x, keys, values, scale=SIZE**-0.5, mask=mask)


class Left:
    """`full`: slots in one buffer, rows aligned left, a write position each."""

    name = "full"

    def __init__(self, lengths: Sequence[int], slots: int) -> None:
        self.lengths = list(lengths)
        self.caches = [self._open(lengths, slots) for _ in range(LAYERS)]

    def step(self, width: int = 1) -> mx.array:
        x = tokens(len(self.lengths), width, HEADS)
        starts, widths = Positions(self.lengths), [width] * len(self.lengths)
        for cache in self.caches:
            cache.begin(widths, starts)
        mask = self.caches[0].make_mask(width)
        for cache in self.caches:
            x = attend(x, *cache.update_and_fetch(x[:, :KV_HEADS], x[:, KV_HEADS : 2 * KV_HEADS]), mask)
        if width == 1:
            self.roll_back(widths, width)
        return x

    def join(self, joiner: list[Any], length: int) -> None:
        for cache, other in zip(self.caches, joiner, strict=True):
            cache.join(other, [len(self.lengths)])
        self.lengths.append(length)

    def joiner(self, length: int) -> list[Any]:
        caches = [self._open([length], 1) for _ in range(LAYERS)]
        mx.eval([array for cache in caches for array in cache.arrays()])
        return caches

    def leave(self, row: int) -> None:
        last = len(self.lengths) - 1
        indices = [last if i == row else i for i in range(last)]
        for cache in self.caches:
            cache.keep(indices)
        self.lengths = [self.lengths[i] for i in indices]

    def roll_back(self, kept: Sequence[int], width: int) -> None:
        for cache in self.caches:
            cache.commit(kept)
        self.lengths = [length + n for length, n in zip(self.lengths, kept, strict=True)]

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays()]

    def _open(self, lengths: Sequence[int], slots: int) -> Any:
        cache = FullLayout().open(INFO, None, slots=slots, window=1)
        cache.add(len(lengths))
        cache.begin([CAPACITY] * len(lengths), Positions([0] * len(lengths)))
        cache.update_and_fetch(*(tokens(len(lengths), CAPACITY) for _ in range(2)))
        cache.commit(lengths)
        return cache


class Padded:
    """mlx-lm's batch cache: rows aligned right, one write column for all."""

    name = "left-padded"

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.caches = [self._open(lengths) for _ in range(LAYERS)]

    def step(self, width: int = 1) -> mx.array:
        x = tokens(len(self.lengths), width, HEADS)
        mask = self.caches[0].make_mask(width)
        for cache in self.caches:
            x = attend(x, *cache.update_and_fetch(x[:, :KV_HEADS], x[:, KV_HEADS : 2 * KV_HEADS]), mask)
        if width == 1:
            self.lengths = [length + 1 for length in self.lengths]
        return x

    def join(self, joiner: list[Any], length: int) -> None:
        for cache, other in zip(self.caches, joiner, strict=True):
            cache.extend(other)
        self.lengths.append(length)

    def joiner(self, length: int) -> list[Any]:
        caches = [self._open([length]) for _ in range(LAYERS)]
        mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
        return caches

    def leave(self, row: int) -> None:
        keep = [i for i in range(len(self.lengths)) if i != row]
        for cache in self.caches:
            cache.filter(keep)
        self.lengths = [self.lengths[i] for i in keep]

    def roll_back(self, kept: Sequence[int], width: int) -> None:
        padding = [width - n for n in kept]
        for cache in self.caches:
            cache.prepare(right_padding=padding)
            cache.finalize()
        self.lengths = [length + n for length, n in zip(self.lengths, kept, strict=True)]

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in (cache.keys, cache.values, cache.offset)]

    def _open(self, lengths: Sequence[int]) -> BatchKVCache:
        serial = [KVCache() for _ in lengths]
        for cache, length in zip(serial, lengths, strict=True):
            cache.update_and_fetch(tokens(1, length), tokens(1, length))
        return BatchKVCache.merge(serial)


class Separate:
    """A buffer for each row. Attention gathers them into one array (``gather``), or runs one kernel a row."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.name, self.gather = "one buffer a row", True
        self.lengths = list(lengths)
        self.buffers = [[self._open() for _ in range(LAYERS)] for _ in lengths]  # a row's layers stand together

    def step(self, width: int = 1) -> mx.array:
        x = tokens(len(self.lengths), width, HEADS)
        longest = max(self.lengths) + width
        columns = mx.arange(longest)
        ends = mx.array(self.lengths)[:, None] + mx.arange(1, width + 1)  # (B, W)
        mask = (columns < ends[:, :, None])[:, None]  # (B, 1, W, S)
        for layer in range(LAYERS):
            rows = []
            for row, start in enumerate(self.lengths):
                buffer = self.buffers[row][layer]
                for side in (0, 1):
                    heads = slice(side * KV_HEADS, (side + 1) * KV_HEADS)
                    buffer[side][:, :, start : start + width] = x[row : row + 1, heads]
                end = longest if self.gather else start + width
                rows.append([array[:, :, :end] for array in buffer])
            if self.gather:
                x = attend(x, *(mx.concatenate([row[side] for row in rows]) for side in (0, 1)), mask)
            else:
                causal = None if width == 1 else "causal"
                x = mx.concatenate([attend(x[i : i + 1], *row, causal) for i, row in enumerate(rows)])
        if width == 1:
            self.lengths = [length + 1 for length in self.lengths]
        return x

    def join(self, joiner: list[Any], length: int) -> None:
        self.buffers.append(joiner)
        self.lengths.append(length)

    def joiner(self, length: int) -> list[Any]:
        caches = [self._open() for _ in range(LAYERS)]
        mx.eval(caches)
        return caches

    def leave(self, row: int) -> None:
        del self.buffers[row], self.lengths[row]

    def roll_back(self, kept: Sequence[int], width: int) -> None:
        self.lengths = [length + n for length, n in zip(self.lengths, kept, strict=True)]

    def arrays(self) -> list[mx.array]:
        return [array for row in self.buffers for buffer in row for array in buffer]

    def _open(self) -> list[mx.array]:
        return [tokens(1, CAPACITY), tokens(1, CAPACITY)]
