"""A model small enough to know by heart: its next token is a hash of every token at its position.

Keys hold the token ids themselves, values a number made of token and position. Attention sums the values that the
mask lets through, so a token that is lost, doubled, shifted, or read from a neighbour changes the scores; a NaN in a
masked column spreads as it does through a softmax weight of zero. `next_token` is the same in plain Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache

from oarlock.core.mixed import MixedCache

VOCABULARY = 61
PRIME = 251
POSITIONS = 512


@functools.cache
def weight(position: int) -> int:
    """Return what a position multiplies its token with."""
    return (7 * position * position + 3 * position + 1) % PRIME or 5


@functools.cache
def value(token: int, position: int, shift: int = 0) -> int:
    """Return the number that a token leaves at its position; ``shift`` is the adapter's."""
    return (token + 1 + shift) * weight(position) % PRIME


def next_token(history: Sequence[int], shift: int = 0, layers: int = 1) -> int:
    """Return the greedy token after ``history``: every layer adds the sum of its values, times its number from 1."""
    total = sum(value(token, position, shift) for position, token in enumerate(history))
    return total * (layers * (layers + 1) // 2) % VOCABULARY


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask=None) -> mx.array:
    """Sum the values that the mask lets each query see, (B, 1, W, 1). It bears the name that models give it."""
    if mask is None:
        return values.sum(axis=2, keepdims=True)  # one token each, all of the past
    if isinstance(mask, str):
        width, columns = queries.shape[2], values.shape[2]
        mask = mx.arange(columns - width, columns)[:, None] >= mx.arange(columns)  # (W, S)
    return mask.astype(mx.float32) @ values


class StubModel(nn.Module):
    """Attention without weights over the cache that it is given, one or more layers deep.

    ``before`` and ``between`` are called while a forward is built: before anything, and between the first layer's
    append and what follows. They may raise. ``spoiled`` answers per line of the ids whether its values are to be NaN,
    ``lost`` whether the device fails: the forward's values and scores are zeros then, and what is read next raises.
    All four get the caches and the ids; none is called by the serial caches of bind.
    """

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = [None] * layers
        self.shift = 0
        self.before: Callable[[Sequence, mx.array], None] | None = None
        self.between: Callable[[Sequence, mx.array], None] | None = None
        self.spoiled: Callable[[Sequence, mx.array], list[bool] | None] | None = None
        self.lost: Callable[[Sequence, mx.array], bool] | None = None
        self._weights = mx.array([weight(position) for position in range(POSITIONS)], dtype=mx.int32)
        self._tokens = mx.arange(VOCABULARY)
        mx.eval(self._weights, self._tokens)

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def __call__(self, ids: mx.array, cache: Sequence) -> mx.array:
        watched = not isinstance(cache[0], KVCache)
        if watched and self.before is not None:
            self.before(cache, ids)
        spoiled = self.spoiled(cache, ids) if watched and self.spoiled is not None else None
        lost = watched and self.lost is not None and self.lost(cache, ids)
        width = ids.shape[1]
        mask = cache[0].make_mask(width, return_array=False, window_size=None)
        total = None
        for number, layer in enumerate(cache, 1):
            read = self._attend(layer, ids, mask, spoiled, lost) * number  # (B, W, 1)
            total = read if total is None else total + read
            if number == 1 and watched and self.between is not None:
                self.between(cache, ids)
        scores = -mx.abs(self._tokens - mx.remainder(total, VOCABULARY))  # (B, W, V), 0 at the next token
        return mx.zeros_like(scores) if lost else scores

    def _attend(self, cache, ids: mx.array, mask, spoiled: list[bool] | None, lost: bool) -> mx.array:
        width, start = ids.shape[1], cache.offset
        positions = mx.arange(width) + (start if isinstance(start, int) else start[:, None])  # (W,) or (B, W)
        values = (ids.astype(mx.int32) + 1 + self.shift) * self._weights[positions] % PRIME
        values = values.astype(mx.float32)[:, None, :, None]  # (B, 1, W, 1)
        if spoiled is not None:
            values = mx.where(mx.array(spoiled)[:, None, None, None], mx.nan, values)
        values = mx.zeros_like(values) if lost else values
        queries = ids.astype(mx.float32)[:, None, :, None]  # only their number counts
        keys, values = cache.update_and_fetch(queries, values)
        return scaled_dot_product_attention(queries, keys, values, cache, scale=1.0, mask=mask)[:, 0]  # (B, W, 1)


def sides(cache: Sequence, ids: mx.array) -> list[tuple]:
    """Return the first layer's cache and the ids [B, W] of every group of rows in a forward that is about to append."""
    if not isinstance(cache[0], MixedCache):
        return [(cache[0], ids)]
    return [(side.caches[0], side.ids) for side in cache[0].sides]


def first_tokens(cache, ids: mx.array) -> list[int]:
    """Return the first prompt token of every row of a side: it says whose row it is."""
    begun = list(cache.tokens)
    fresh = begun if all(begun) else ids[:, 0].tolist()
    first = cache.keys[: len(begun), 0, 0, 0].tolist() if any(begun) else begun
    return [int(old) if start else new for old, new, start in zip(first, fresh, begun, strict=True)]
