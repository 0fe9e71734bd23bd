"""A cache beside a plain list of tokens per row: whatever is done to one is done to the other, and they must agree."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.full import FullCache, FullLayout

VOCABULARY = 64
HEADS, KEY, VALUE = 2, 4, 6  # key and value sizes differ on purpose
_draw = np.random.default_rng(7)
KEYS = _draw.normal(size=(VOCABULARY, HEADS, KEY)).astype(np.float32)
VALUES = _draw.normal(size=(VOCABULARY, HEADS, VALUE)).astype(np.float32)
QUERIES = _draw.normal(size=(VOCABULARY, HEADS, KEY)).astype(np.float32)
PADDING = 63
"""The token that fills up a window behind a narrow row; no row is ever given it."""


def solo(tokens, n):
    """What the last ``n`` tokens of one row see, in float64: (HEADS, n, VALUE)."""
    keys, values = KEYS[tokens].astype(np.float64), VALUES[tokens].astype(np.float64)
    seen = []
    for place in range(len(tokens) - n, len(tokens)):
        scores = np.einsum("hd,thd->ht", QUERIES[tokens[place]].astype(np.float64), keys[: place + 1]) * KEY**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        seen.append(np.einsum("ht,thd->hd", weights, values[: place + 1]))
    return np.stack(seen, axis=1)


class Mirror:
    """``cache`` and ``lists``, the tokens that its rows must hold."""

    def __init__(self, cache=None, dtype=mx.float32, tolerance=1e-5):
        self.cache = cache if cache is not None else FullCache(1)
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
                wanted = solo(before + fresh, len(fresh))
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
        keys, values = self.cache.update_and_fetch(_heads(KEYS, ids, self.dtype), _heads(VALUES, ids, self.dtype))
        assert keys.dtype == values.dtype == self.dtype
        assert keys.shape[2] == values.shape[2] == starts.longest + width
        queries = _heads(QUERIES, ids, self.dtype)
        seen = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=KEY**-0.5, mask=mask)
        return np.array(seen.astype(mx.float32))

    def join(self, other):
        first = self.cache.rows
        self.cache.join(other.cache, range(first, first + other.cache.rows))
        self.lists += [list(tokens) for tokens in other.lists]

    def keep(self, indices):
        self.cache.keep(indices)
        self.lists = [self.lists[i] for i in indices]

    def take(self, indices):
        part = Mirror(self.cache.take(indices), self.dtype, self.tolerance)
        part.lists = [list(self.lists[i]) for i in indices]
        return part

    def restored(self, row, layout=None):
        """Extract a row and make a cache of it."""
        part = Mirror((layout or FullLayout()).restore(self.cache.extract(row)), self.dtype, self.tolerance)
        part.lists = [list(self.lists[row])]
        return part

    def check(self):
        """Every row holds its tokens, read back one by one."""
        assert self.cache.rows == len(self.lists)
        assert self.cache.tokens == tuple(map(len, self.lists))
        for row, tokens in enumerate(self.lists):
            arrays = self.cache.extract(row).arrays()
            assert set(arrays) == ({"keys", "values"} if tokens else set())
            for array, table in zip(arrays.values(), (KEYS, VALUES), strict=False):
                got = np.array(array.astype(mx.float32))[0].transpose(1, 0, 2)  # (T, HEADS, D)
                np.testing.assert_allclose(got, table[tokens], atol=self.tolerance, rtol=self.tolerance)


def _heads(table, ids, dtype):
    """Look up ids [B, N] and return [B, HEADS, N, D]."""
    return mx.array(table[ids].transpose(0, 2, 1, 3)).astype(dtype)


@pytest.fixture
def mirror():
    """Make a `Mirror` around a cache; ``lengths`` fills it with rows of these lengths, each forwarded alone."""

    def make(cache=None, *, lengths=(), dtype=mx.float32, tolerance=1e-5):
        made = Mirror(cache, dtype, tolerance)
        for length in lengths:
            alone = Mirror(FullCache(1), dtype, tolerance)
            alone._next = made._next
            alone.add(1)
            if length:
                alone.step([length])
            made._next = alone._next
            made.join(alone)
        return made

    return make
