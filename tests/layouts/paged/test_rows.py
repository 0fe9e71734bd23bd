"""Rows of `paged` as models and core see them: the serial graph where it can be had, windows, leaves, stored rows, sizes."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from oarlock.core.contracts.layout import KeyValues, LayerInfo, Positions, RowState
from oarlock.layouts.full import FullCache
from oarlock.layouts.paged import PagedLayout, PagedOptions
from oarlock.layouts.tables import Plan

LAYER = LayerInfo(index=0, path="0", kind="full", kv_heads=2, key_dim=4, value_dim=6, dtype=mx.float32)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("held", "width"), [(0, 5), (30, 4), (64, 1)])
def test_equal_rows_get_the_very_bits_of_mlx_lm(pool, held, width, window):
    """By gathered arrays, and row by row: what attention over its serial cache gives each row alone."""
    ours, theirs, rows = pool().group().caches[0], KVCache(), 3
    ours.add(rows)
    for n in (held, width):
        if not n:
            continue
        ours.begin([n] * rows, Positions(ours.tokens))
        mask = ours.make_mask(n, window_size=window)
        arrays = [mx.random.normal((rows, 2, n, size)) for size in (4, 6)]
        serial = theirs.update_and_fetch(*arrays)
        fetched = ours.update_and_fetch(*arrays)
        if isinstance(fetched[0], KeyValues):
            queries = mx.random.normal((rows, 4, n, 4))
            seen = fetched[0].attend(queries, 0.5, mask, None)
            alone = [
                mx.fast.scaled_dot_product_attention(
                    queries[i : i + 1], *(a[i : i + 1] for a in serial), scale=0.5, mask=mask
                )
                for i in range(rows)
            ]
            assert mx.array_equal(seen, mx.concatenate(alone))
        else:
            assert all(mx.array_equal(got, want) for got, want in zip(fetched, serial, strict=True))
        ours.commit([n] * rows)


@pytest.mark.parametrize("lengths", [(12, 3, 7), (40, 0, 17, 16), (5,), (16, 16)])
def test_ragged_rows_get_the_very_bits_of_full(pool, lengths):
    """Gathered rows stand in the columns of `full`; row by row each gets what it gets alone."""
    group = pool().group(*lengths)
    full = FullCache(len(lengths))
    full.add(len(lengths))
    longest = max(lengths)
    cache, rows = group.caches[0], [group.caches[0].extract(i).arrays() for i in range(len(lengths))]
    full.begin(lengths, Positions([0] * len(lengths)))
    padded = [
        mx.concatenate(
            [
                mx.pad(row[name], [(0, 0), (0, 0), (0, longest - row[name].shape[2]), (0, 0)])
                if row
                else mx.zeros((1, 2, longest, size))
                for row in rows
            ]
        )
        for name, size in (("keys", 4), ("values", 6))
    ]
    full.update_and_fetch(*padded)
    full.commit(lengths)
    starts, new = Positions(lengths), [mx.random.normal((len(lengths), 2, 1, size)) for size in (4, 6)]
    queries = mx.random.normal((len(lengths), 4, 1, 4))
    seen = []
    for each in (cache, full):
        each.begin([1] * len(lengths), starts)
        mask = each.make_mask(1)
        keys, values = each.update_and_fetch(*new)
        if isinstance(keys, KeyValues):
            seen.append(keys.attend(queries, 0.5, mask, None))
        else:
            seen.append(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, mask=mask))
    if isinstance(keys, mx.array) and not group.caches[0]._pages.attends:
        assert mx.array_equal(*seen)
    np.testing.assert_allclose(*map(np.array, seen), rtol=1e-5, atol=1e-6)


def check_padding(pool):
    group = pool.group(14, 15)
    group.step([1, 20], [1, 20])
    group.step([1, 1])
    group.check()
    return group


def test_padding_takes_no_block(pool):
    """A row of one token beside one of twenty has the blocks of its own tokens."""
    assert [share.ids.size for share in check_padding(pool()).tables[0].rows] == [1, 3]


def test_padding_that_is_written_is_found(pool, monkeypatch):
    """The twin: the first tokens of the flattened window are taken for the real ones."""
    monkeypatch.setattr(Plan, "source", lambda self: mx.arange(sum(self.widths)) if self.padded else None)
    with pytest.raises(AssertionError):
        check_padding(pool())


def test_an_aborted_forward_leaves_nothing(pool):
    """commit([0] * rows): whatever the model had reached, also with a shared block half copied."""
    pool = pool()
    group = pool.group(12, 3, 15)
    stored = group.states(0)
    used, tables = group.blocks.used, group.tables
    for until in (0, 1, 2):
        group.forward([pool.tokens(7) for _ in range(3)], until=until)
        group.commit([0, 0, 0])
        assert group.tables == tables
        assert group.blocks.used == used
    group.commit([0, 0, 0])
    group.step([2, 2, 2])
    group.check()
    assert group.restored(stored, group.lists[0][:12]).check() is None


def test_an_append_that_raises_can_be_taken_back(pool):
    group = pool().group(5, 2)
    for heads, size in ((2, 5), (3, 4)):
        for cache in group.caches:
            cache.begin([1, 1], Positions((5, 2)))
        with pytest.raises(ValueError, match="shape"):
            group.caches[0].update_and_fetch(mx.ones((2, heads, 1, size)), mx.ones((2, heads, 1, 6)))
        group.commit([0, 0])
    group.step([1, 1])
    group.check()


@pytest.mark.parametrize(("widths", "starts"), [([1], (3, 3)), ([1, 1], (3,)), ([1, 1], (3, 4))])
def test_begin_refuses_other_rows(pool, widths, starts):
    with pytest.raises(ValueError, match="2 rows"):
        pool().group(3, 3).caches[0].begin(widths, Positions(starts))


def test_what_is_asked_without_a_forward_is_refused(pool):
    cache = pool().group(3).caches[0]
    with pytest.raises(ValueError, match="begin"):
        cache.make_mask(1)
    with pytest.raises(ValueError, match="without a forward"):
        cache.commit([1])


@pytest.mark.parametrize("indices", [[], [3, 2, 1, 0], [2, 0, 1]])
def test_a_keep_moves_nothing(pool, indices):
    group = pool().group(12, 30, 0, 17)
    arrays = [array for cache in group.caches for array in cache.arrays()]
    group.keep(indices)
    assert all(
        a is b for a, b in zip(arrays, (array for cache in group.caches for array in cache.arrays()), strict=True)
    )
    group.check_blocks()
    group.check()


def test_joins_refuse_what_they_cannot_take(pool):
    """Another type, another place, another geometry, another dtype; the rows go on as if not asked."""
    group, cache = pool().group(4, 2), None
    cache = group.caches[0]
    with pytest.raises(TypeError, match="object"):
        cache.join(object(), [2])
    for slots in ([0], [3], [2, 3], []):
        with pytest.raises(ValueError, match="free ones are"):
            cache.join(pool().group(3).caches[0], slots)
    for keys, match in ((mx.ones((1, 3, 5, 4)), "shape"), (mx.ones((1, 2, 5, 4), mx.float16), "dtype")):
        state = RowState(layout="paged", tokens=5, arrays={"keys": keys, "values": mx.ones((1, 2, 5, 6))})
        with pytest.raises(ValueError, match=match):
            cache.join(PagedLayout().restore(state), [2])
    group.step([1, 1])
    group.check()
    group.check_blocks()


def test_rows_of_another_pool_are_copied_in(pool):
    """Another engine's, or rows restored from a disk before the layers were known."""
    group, other = pool().group(20, 3), pool().group(17, 0, 40)
    group.pool.next = other.pool.next
    group.join(other)
    group.check_blocks()
    group.step([1, 1, 1, 1, 1])
    other.step([2, 2, 2])
    group.check()
    other.check()


@pytest.mark.parametrize("length", [1, 16, 37])
def test_a_row_from_elsewhere_stands_in_the_engines_pool(pool, length):
    """Made of arrays and meta alone, by the engine's layout; by another one it has a pool of its own."""
    pool = pool()
    group = pool.group(length, 3)
    states = group.states(0)
    assert [state.nbytes for state in states] == [length * 2 * (4 + 6) * 4] * 2
    read = [RowState(layout="paged", tokens=length, arrays=state.arrays(), meta=state.meta()) for state in states]
    states.clear()  # owners too
    back = group.restored(read, group.lists[0])
    back.check_blocks(group)
    assert back.caches[0]._pages is group.caches[0]._pages
    group.join(back)
    group.step([1, 1, 1])
    group.check()
    stranger = [PagedLayout().restore(state) for state in read]
    assert [cache.tokens for cache in stranger] == [(length,)] * 2


def test_a_stored_row_does_not_change_and_holds_the_pool(pool):
    """Restored twice, each goes its own way; the state stays, also when every cache is gone."""
    pool = pool()
    group = pool.group(21, 3)
    states, tokens = group.states(0), group.lists[0]
    before = [np.array(state.arrays()["keys"]) for state in states]
    first, second = group.restored(states, tokens), group.restored(states, tokens)
    for each, width in ((first, 3), (second, 1), (group, 2)):
        each.step([width] * len(each.lists))
        each.check()
    blocks = group.blocks
    del group, first, second, each
    assert blocks.used == 1
    for state, keys in zip(states, before, strict=True):
        np.testing.assert_array_equal(np.array(state.arrays()["keys"]), keys)
    back = pool.group().restored(states, tokens)
    back.step([4])
    back.check()
    del states, state, back
    assert blocks.used == 0


# --- sizes ------------------------------------------------------------------------------------------------------


def largest(pool, size, budget):
    """The most tokens whose blocks fit, by formula and by trial."""
    layer, options = pool.layers[0], pool.options
    formula = max(n for n in range(200) if pool.layout.bytes_at(layer, options, n) <= budget)
    for n in range(formula, formula + 2):
        row = pool.group()
        row.add(1)
        row.step([n])
        yield formula, row.caches[0].nbytes


@pytest.mark.fault("H-07")
@pytest.mark.parametrize("size", [1, 4, 16, 32])
@pytest.mark.parametrize("budget", [5_000, 9_599, 9_600])
def test_predicted_bytes_are_allocated_bytes(pool, size, budget):
    """The largest row that fits, by `bytes_at` and by trial: equal, and one token more does not fit."""
    sizes = []
    for which in range(2):
        _, nbytes = list(largest(pool(size), size, budget))[which]
        sizes.append(nbytes)
    assert sizes[0] <= budget < sizes[1]


@pytest.mark.fault("H-07", twin=True)
def test_a_projection_that_rounds_otherwise_is_found(pool, monkeypatch):
    """The twin: the estimator counts tokens, the allocator blocks."""
    monkeypatch.setattr(PagedLayout, "bytes_at", lambda self, layer, options, tokens: 80 * tokens)
    with pytest.raises(AssertionError):
        test_predicted_bytes_are_allocated_bytes(pool, 16, 5_000)


def test_uneven_rows_take_little_more_than_their_tokens():
    """16 rows of 64 to 4,096 tokens: at most 1.15 times the sum of their lengths, growth included."""
    layout = PagedLayout()
    lengths = [64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096]
    group = layout.open(LAYER, PagedOptions(), slots=16, window=1)
    for length in lengths:
        row = layout.open(LAYER, PagedOptions(), slots=1, window=1)
        row.add(1)
        row.begin([length], Positions((0,)))
        row.update_and_fetch(mx.ones((1, 2, length, 4)), mx.ones((1, 2, length, 6)))
        row.commit([length])
        group.join(row, [group.rows])
    group.begin([1] * 16, Positions(lengths))
    group.update_and_fetch(mx.ones((16, 2, 1, 4)), mx.ones((16, 2, 1, 6)))
    group.commit([1] * 16)
    assert group.nbytes <= 1.15 * (sum(lengths) + 16) * 2 * (4 + 6) * 4


def test_bytes_of_a_pool_are_divided_among_those_who_use_it(pool):
    pool = pool()
    group, cohort = pool.group(40, 20), pool.group(64)
    total = sum(array.nbytes for array in group.caches[0].arrays())
    assert total - 2 <= group.caches[0].nbytes + cohort.caches[0].nbytes <= total
    assert group.caches[0].live_bytes == 5 * 16 * 80
    cohort.keep([])
    assert cohort.caches[0].nbytes == 0
    group.keep([])
    assert group.caches[0].nbytes == total  # idle: whoever asks


def test_compact_gives_back_what_nobody_owns(pool):
    group = pool().group(600, 3, 7, 50)
    group.keep([1, 3])
    for cache in group.caches:
        cache.compact()
        assert cache.nbytes == cache.live_bytes == 5 * 16 * 80
    group.check_blocks()
    group.step([1, 1])
    group.check()
    group.keep([])
    for cache in group.caches:
        cache.compact()
        assert (cache.nbytes, cache.arrays()) == (0, [])
    group.join(group.pool.group(4))
    group.step([1])
    group.check()


def test_a_pool_that_is_hardly_used_shrinks_by_itself(pool):
    """Nobody calls `compact` while rows run."""
    group = pool().group(1200, 20)
    most = group.blocks.capacity
    group.keep([1])
    group.step([20])
    assert group.blocks.capacity < most / 5
    group.check()


def test_the_layout_says_what_it_is(pool):
    layout = PagedLayout()
    assert (layout.name, layout.kinds, layout.options) == ("paged", {"full"}, PagedOptions)
    assert layout.refuses(LAYER, PagedOptions()) is None
    assert "attention" in layout.refuses(LAYER, PagedOptions(reads="rows"))
    group = pool().group(9)
    assert [group.caches[0].reusable(n) for n in (0, 4, 9, 12)] == [0, 4, 9, 9]
    assert group.caches[0].columns([1]) == pool().group(9).caches[0].columns([1]) != group.caches[0].columns([2])


@pytest.mark.parametrize("given", [{"block_size": 7}, {"block_size": 0}, {"reads": "kernel"}])
def test_options_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=r"16|auto"):
        PagedOptions(**given)
