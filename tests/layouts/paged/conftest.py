"""Groups of `paged` rows over several layers beside plain lists of tokens, and what must hold of the blocks throughout."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import KeyValues, LayerInfo, Positions
from oarlock.layouts.paged import PagedLayout, PagedOptions

VOCABULARY, HEADS, KEY, VALUE, LAYERS = 64, 2, 4, 6, 2  # key and value sizes differ on purpose
_draw = np.random.default_rng(11)
KEYS = _draw.normal(size=(LAYERS, VOCABULARY, HEADS, KEY)).astype(np.float32)
VALUES = _draw.normal(size=(LAYERS, VOCABULARY, HEADS, VALUE)).astype(np.float32)
QUERIES = _draw.normal(size=(LAYERS, VOCABULARY, HEADS, KEY)).astype(np.float32)
PADDING = 63
"""The token behind a narrow row of a window; no row is ever given it."""


def solo(layer, tokens, n):
    """What the last ``n`` tokens of one row see on one layer, in float64: (HEADS, n, VALUE)."""
    keys, values = KEYS[layer][tokens].astype(np.float64), VALUES[layer][tokens].astype(np.float64)
    seen = []
    for place in range(len(tokens) - n, len(tokens)):
        scores = np.einsum("hd,thd->ht", QUERIES[layer][tokens[place]], keys[: place + 1]) * KEY**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        seen.append(np.einsum("ht,thd->hd", weights, values[: place + 1]))
    return np.stack(seen, axis=1)


def heads(table, ids):
    """Look up ids [B, N] and return [B, HEADS, N, D]."""
    return mx.array(table[ids].transpose(0, 2, 1, 3))


class Pool:
    """One engine's layers: every group that it opens takes blocks from one pool."""

    def __init__(self, size=16, attends=False, layout=None, layers=LAYERS):
        self.layout = layout or PagedLayout()
        self.options = PagedOptions(block_size=size) if size in (16, 32) else Small(size)
        self.layers = [
            LayerInfo(
                index=i, path=str(i), kind="full", kv_heads=HEADS, key_dim=KEY, value_dim=VALUE, dtype=mx.float32,
                attendable=attends,
            )
            for i in range(layers)
        ]  # fmt: skip
        for layer in self.layers:
            self.layout.refuses(layer, self.options)
        self.next = 0

    def group(self, *lengths):
        group = Group(self, [self.layout.open(layer, self.options, slots=1, window=1) for layer in self.layers])
        for length in lengths:
            row = Group(self, [self.layout.open(layer, self.options, slots=1, window=1) for layer in self.layers])
            row.add(1)
            if length:
                row.step([length])
            group.join(row)
        return group

    def tokens(self, n):
        """Fresh token ids, none the padding."""
        self.next += n
        return [(11 * i + 3) % PADDING for i in range(self.next - n, self.next)]


class Small:
    """Options of a block size that users cannot choose: edges come sooner."""

    reads = "auto"
    format = None

    def __init__(self, size):
        self.block_size = size


class Group:
    """One cache a layer, and ``lists``: the tokens that the rows must hold on each."""

    def __init__(self, pool, caches, lists=()):
        self.pool, self.caches, self.lists = pool, caches, [list(tokens) for tokens in lists]

    @property
    def blocks(self):
        return self.caches[0]._blocks

    @property
    def tables(self):
        return [cache._table for cache in self.caches]

    def add(self, n):
        for cache in self.caches:
            cache.add(n)
        self.lists += [[] for _ in range(n)]

    def step(self, widths, kept=None, new=None):
        """One forward; every real token must see its row's past and nothing else. Then keep ``kept`` (None: all)."""
        kept = list(widths) if kept is None else kept
        new = [self.pool.tokens(width) for width in widths] if new is None else new
        seen = self.forward(new)
        for layer, row in np.ndindex(len(self.caches), len(new)):
            if new[row]:
                wanted = solo(layer, self.lists[row] + new[row], len(new[row]))
                np.testing.assert_allclose(seen[layer][row, :, : len(new[row])], wanted, atol=1e-5, rtol=1e-5)
        self.commit(kept)
        self.lists = [before + fresh[:n] for before, fresh, n in zip(self.lists, new, kept, strict=True)]
        assert all(cache.tokens == tuple(map(len, self.lists)) for cache in self.caches)

    def forward(self, new, until=None):
        """What core and model do with a window; ``until``: layers that run before the model raises."""
        starts, width = Positions(map(len, self.lists)), max(map(len, new))
        ids = np.array([fresh + [PADDING] * (width - len(fresh)) for fresh in new])  # (B, N)
        for cache in self.caches:
            cache.begin(list(map(len, new)), starts)
        mask, seen = self.caches[0].make_mask(width), []
        for layer, cache in enumerate(self.caches[:until]):
            offset = cache.offset
            assert (offset.tolist() if isinstance(offset, mx.array) else [offset] * len(new)) == list(starts)
            keys, values = cache.update_and_fetch(heads(KEYS[layer], ids), heads(VALUES[layer], ids))
            assert keys.shape[2] == values.shape[2] == starts.longest + width
            seen.append(np.array(self.attend(heads(QUERIES[layer], ids), keys, values, mask)))
        return seen

    @staticmethod
    def attend(queries, keys, values, mask):
        if isinstance(keys, KeyValues):
            return keys.attend(queries, KEY**-0.5, mask, None)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=KEY**-0.5, mask=mask)

    def commit(self, kept):
        for cache in self.caches:
            cache.commit(kept)

    def join(self, other):
        for cache, theirs in zip(self.caches, other.caches, strict=True):
            cache.join(theirs, range(cache.rows, cache.rows + theirs.rows))
        self.lists += [list(tokens) for tokens in other.lists]

    def keep(self, indices):
        for cache in self.caches:
            cache.keep(indices)
        self.lists = [self.lists[i] for i in indices]

    def take(self, indices):
        return Group(self.pool, [cache.take(indices) for cache in self.caches], [self.lists[i] for i in indices])

    def states(self, row):
        return [cache.extract(row) for cache in self.caches]

    def restored(self, states, tokens):
        return Group(self.pool, [self.pool.layout.restore(state) for state in states], [tokens])

    def check(self):
        """Every row holds its tokens on every layer."""
        for layer, cache in enumerate(self.caches):
            assert cache.tokens == tuple(map(len, self.lists))
            for row, tokens in enumerate(self.lists):
                if not tokens:
                    continue
                arrays = cache._pages.decode(cache._pages.row(cache._table.rows[row], len(tokens)))
                for array, table in zip(arrays, (KEYS, VALUES), strict=True):
                    got = np.array(array)[0].transpose(1, 0, 2)  # (T, HEADS, D)
                    np.testing.assert_array_equal(got, table[layer][tokens])

    def check_blocks(self, *others):
        """Owners are counted, free and used add up, and the blocks are decided once for all layers."""
        blocks = self.blocks
        used = blocks.used
        assert used + np.count_nonzero(blocks.counts == 0) == blocks.capacity == len(blocks.counts)
        owned = np.zeros(blocks.capacity, int)
        for group in (self, *others):
            assert all(table is group.tables[0] for table in group.tables)
            for share, tokens in zip(group.tables[0].rows, group.tables[0].tokens, strict=True):
                assert share.ids.size == -(-tokens // blocks.size)
                owned[share.ids] += 1
        blocks.settle()
        assert owned.tolist() == blocks.counts.tolist()


@pytest.fixture(params=[False, True], ids=["gather", "rows"])
def attends(request):
    """Both ways to read."""
    return request.param


@pytest.fixture
def pool(attends):
    """Make a `Pool`."""

    def make(size=16, **options):
        return Pool(size, **{"attends": attends, **options})

    return make
