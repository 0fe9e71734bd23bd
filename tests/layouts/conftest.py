"""A cache beside a plain list of tokens per row: whatever is done to one is done to the other, and they must agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.full import FullCache, FullLayout
from oarlock.layouts.packed import Format
from oarlock.layouts.quantized import QuantizedCache, QuantizedLayout, QuantizedRing
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache, RotatingLayout

VOCABULARY = 64
HEADS, KEY, VALUE = 2, 4, 6  # key and value sizes differ on purpose
_draw = np.random.default_rng(7)
KEYS = _draw.normal(size=(VOCABULARY, HEADS, KEY)).astype(np.float32)
VALUES = _draw.normal(size=(VOCABULARY, HEADS, VALUE)).astype(np.float32)
QUERIES = _draw.normal(size=(VOCABULARY, HEADS, KEY)).astype(np.float32)
PADDING = 63
"""The token that fills up a window behind a narrow row; no row is ever given it."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A storage under test: how it is opened and restored, what tokens give it, what attention must see of them.

    ``window`` None: everything is seen. Else a query sees the first ``keep`` positions and the newest others, ``window``
    in all; ``slack`` is how many more columns there are. ``plain`` makes keys and values of a state's arrays.
    """

    open: Callable = lambda slots: FullCache(slots)
    layout: Any = dataclasses.field(default_factory=FullLayout)
    given: tuple = (KEYS, VALUES, QUERIES)
    stored: tuple = (KEYS, VALUES)
    window: int | None = None
    keep: int = 0
    slack: int = 0
    plain: Callable = dict

    def visible(self, place):
        """The positions that a query at ``place`` sees."""
        reach = place + 1 if self.window is None else self.window - self.keep
        return [p for p in range(place + 1) if p < self.keep or p > place - reach]

    def held(self, tokens):
        """The positions that a stored row of ``tokens`` has."""
        reach = tokens + 1 if self.window is None else self.window - self.keep
        return [p for p in range(tokens) if p < self.keep or p > tokens - reach]

    def columns(self, lengths, width):
        """How many columns a forward reads."""
        longest = max(lengths)
        if self.window is None:
            return longest + width
        if width > self.slack + 1:
            return min(longest, self.window - 1) + width
        return None  # it depends on the phases

    def solo(self, tokens, n):
        """What the last ``n`` tokens of one row see, in float64: (HEADS, n, VALUE)."""
        keys, values = (table[tokens].astype(np.float64) for table in self.stored)
        seen = []
        for place in range(len(tokens) - n, len(tokens)):
            at = self.visible(place)
            query = self.given[2][tokens[place]].astype(np.float64)
            scores = np.einsum("hd,thd->ht", query, keys[at]) * query.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            seen.append(np.einsum("ht,thd->hd", weights, values[at]))
        return np.stack(seen, axis=1)


FULL = Kind()


class Mirror:
    """``cache`` and ``lists``, the tokens that its rows must hold."""

    def __init__(self, cache=None, dtype=mx.float32, tolerance=1e-5, kind=FULL):
        self.cache = cache if cache is not None else kind.open(1)
        self.kind = kind
        self.lists = []
        self.dtype, self.tolerance = dtype, tolerance
        self._next = 0

    def tokens(self, n):
        """Fresh token ids: no two neighbours alike, none the padding."""
        self._next += n
        return [(11 * i + 3) % PADDING for i in range(self._next - n, self._next)]

    def add(self, n):
        self.cache.add(n)
        self.lists += [[] for _ in range(n)]

    def step(self, widths, kept=None):
        """One forward; every real token must see its row's past and nothing else. Then keep ``kept`` (None: all)."""
        kept = list(widths) if kept is None else kept
        new = [self.tokens(width) for width in widths]
        seen = self.forward(new)
        for row, (before, fresh) in enumerate(zip(self.lists, new, strict=True)):
            if fresh:
                wanted = self.kind.solo(before + fresh, len(fresh))
                got = seen[row, :, : len(fresh)]
                np.testing.assert_allclose(got, wanted, atol=self.tolerance, rtol=self.tolerance)
        self.cache.commit(kept)
        self.lists = [before + fresh[:n] for before, fresh, n in zip(self.lists, new, kept, strict=True)]
        assert self.cache.tokens == tuple(map(len, self.lists))

    def forward(self, new):
        """Begin, ask for mask and positions, append, attend: what a model does. Returns [B, HEADS, N, VALUE]."""
        starts = Positions(map(len, self.lists))
        width = max(map(len, new))
        self.cache.begin(list(map(len, new)), starts)
        mask = self.cache.make_mask(width)
        offset = self.cache.offset
        assert (offset.tolist() if isinstance(offset, mx.array) else [offset] * len(new)) == list(starts)
        ids = np.array([fresh + [PADDING] * (width - len(fresh)) for fresh in new])  # (B, N)
        keys, values, queries = (_heads(table, ids, self.dtype) for table in self.kind.given)
        scale = queries.shape[-1] ** -0.5
        keys, values = self.cache.update_and_fetch(keys, values)
        assert keys.dtype == values.dtype == self.dtype
        assert keys.shape[2] == values.shape[2] == (self.kind.columns(starts, width) or keys.shape[2])
        if isinstance(keys, mx.array):
            seen = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        else:
            seen = keys.attend(queries, scale, mask, None)
        return np.array(seen.astype(mx.float32))

    def join(self, other):
        first = self.cache.rows
        self.cache.join(other.cache, range(first, first + other.cache.rows))
        self.lists += [list(tokens) for tokens in other.lists]

    def keep(self, indices):
        self.cache.keep(indices)
        self.lists = [self.lists[i] for i in indices]

    def take(self, indices):
        part = Mirror(self.cache.take(indices), self.dtype, self.tolerance, self.kind)
        part.lists = [list(self.lists[i]) for i in indices]
        return part

    def restored(self, row, layout=None):
        """Extract a row and make a cache of it."""
        cache = (layout or self.kind.layout).restore(self.cache.extract(row))
        part = Mirror(cache, self.dtype, self.tolerance, self.kind)
        part.lists = [list(self.lists[row])]
        return part

    def check(self):
        """Every row holds its tokens, read back one by one."""
        assert self.cache.rows == len(self.lists)
        assert self.cache.tokens == tuple(map(len, self.lists))
        for row, tokens in enumerate(self.lists):
            arrays = self.kind.plain(self.cache.extract(row).arrays())
            held = np.array(tokens, dtype=int)[self.kind.held(len(tokens))]
            assert list(arrays) == (["keys", "values"] if held.size else [])
            for array, table in zip(arrays.values(), self.kind.stored, strict=False):
                assert array.shape[2] == held.size
                got = np.array(array.astype(mx.float32))[0].transpose(1, 0, 2)  # (T, HEADS, D)
                np.testing.assert_allclose(got, table[held], atol=self.tolerance, rtol=self.tolerance)


def _heads(table, ids, dtype):
    """Look up ids [B, N] and return [B, HEADS, N, D]."""
    return mx.array(table[ids].transpose(0, 2, 1, 3)).astype(dtype)


@pytest.fixture
def mirror():
    """Make a `Mirror` around a cache; ``lengths`` fills it with rows of these lengths, each forwarded alone."""

    def make(cache=None, *, lengths=(), dtype=mx.float32, tolerance=1e-5, kind=FULL):
        made = Mirror(cache, dtype, tolerance, kind)
        for length in lengths:
            alone = Mirror(kind.open(1), dtype, tolerance, kind)
            alone._next = made._next
            alone.add(1)
            if length:
                alone.step([length])
            made._next = alone._next
            made.join(alone)
        return made

    return make


@pytest.fixture
def ring_kind():
    """Make the `Kind` of a ring; ``cache_type`` stands in for the cache that is proved right."""

    def make(window=8, keep=0, slack=0, cache_type=RotatingCache):
        def ring(slots):
            return cache_type(slots, Ring(window=window, keep=keep, slack=slack))

        return Kind(open=ring, layout=RotatingLayout(), window=window, keep=keep, slack=slack)

    return make


WIDE_KEY, WIDE_VALUE = 32, 64
WIDE = tuple(
    _draw.normal(size=(VOCABULARY, HEADS, size)).astype(np.float32) for size in (WIDE_KEY, WIDE_VALUE, WIDE_KEY)
)
"""Keys, values and queries that can be packed in groups of 32."""


@pytest.fixture
def packed_kind():
    """Make the `Kind` of a quantized cache: a ring where a ``window`` is given, handles where it ``attends``."""

    def make(bits=4, window=None, keep=0, slack=0, *, attends=True, cache_type=None):
        packing = Format(bits=bits, group_size=32)
        stored = tuple(np.array(packing.unpack("x", packing.pack("x", mx.array(table)))) for table in WIDE[:2])

        def full(slots):
            return (cache_type or QuantizedCache)(slots, packing, attends=attends)

        def ring(slots):
            ring = Ring(window=window, keep=keep, slack=slack)
            return (cache_type or QuantizedRing)(slots, ring, packing, attends=attends)

        def plain(arrays):
            return {name: packing.unpack(name, arrays) for name in ("keys", "values") if arrays}

        return Kind(
            open=full if window is None else ring, layout=QuantizedLayout(), given=WIDE, stored=stored,
            window=window, keep=keep, slack=slack, plain=plain,
        )  # fmt: skip

    return make
