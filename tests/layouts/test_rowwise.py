"""`full` read row by row: what attention sees is what it sees of padded rows, and padding is never looked at."""

import mlx.core as mx
import pytest

from oarlock.core.contracts.composition import SurrenderingCache
from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts import rowwise
from oarlock.layouts.full import FullCache, FullLayout, FullOptions
from oarlock.layouts.quantized import QuantizedLayout, QuantizedOptions

HEADS, KV, SIZE, SCALE = 4, 2, 32, 0.3
LAYER = LayerInfo(
    index=0, path="0", kind="full", kv_heads=KV, key_dim=SIZE, value_dim=SIZE, dtype=mx.float32, attendable=True
)


def forward(cache, width, seed, *, window=None, foreign=None, sinks=None):
    """Append the same numbers to whichever cache, and return what its rows attend to [B, heads, N, D]."""
    keys, values, queries = (
        mx.random.normal((cache.rows, heads, width, SIZE), key=mx.random.key(seed + i))
        for i, heads in enumerate((KV, KV, HEADS))
    )
    cache.begin([width] * cache.rows, Positions(cache.tokens))
    mask = cache.make_mask(width, window_size=window)
    k, v = cache.update_and_fetch(keys, values)
    mask = foreign(mask) if foreign else mask
    if isinstance(k, mx.array):
        seen = mx.fast.scaled_dot_product_attention(queries, k, v, scale=SCALE, mask=mask, sinks=sinks)
    else:
        seen = k.attend(queries, SCALE, mask, sinks)
    cache.commit([width] * cache.rows)
    return seen


def filled(reads, lengths=(9, 3, 6)):
    """A cache with rows of these lengths, and the same numbers whatever it is read like."""
    cache = FullLayout().open(LAYER, FullOptions(reads=reads), slots=len(lengths), window=1)
    for row, length in enumerate(lengths):
        one = FullCache(1, reads)
        one.add(1)
        forward(one, length, 100 * row)
        cache.join(one, [row])
    return cache


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_rows_see_what_padded_rows_see(width, window, sinks):
    one, other = filled("rows"), filled("padded")
    for seed in (7, 8, 9):
        got, wanted = (forward(cache, width, seed, window=window, sinks=sinks) for cache in (one, other))
        assert mx.allclose(got, wanted, atol=1e-5)


def test_a_mask_that_a_model_made_of_the_caches_is_heeded():
    """Added scores, as relative positions are: each row gets its own line of them."""

    def added(mask):
        bias = mx.random.normal(mask.shape, key=mx.random.key(3))
        return mx.where(mask, bias, -mx.inf)

    one, other = filled("rows"), filled("padded")
    assert mx.allclose(forward(one, 2, 7, foreign=added), forward(other, 2, 7, foreign=added), atol=1e-5)
    assert not mx.allclose(forward(one, 2, 8, foreign=added), forward(other, 2, 8), atol=1e-2)


def test_a_row_is_bit_for_bit_what_it_is_alone():
    """No padding, no mask: the serial graph over the row's own columns."""
    rows = filled("rows")
    rows.begin([1] * 3, Positions(rows.tokens))
    new = [mx.random.normal((3, heads, 1, SIZE), key=mx.random.key(i)) for i, heads in enumerate((KV, KV, HEADS))]
    mask = rows.make_mask(1)
    keys, _ = rows.update_and_fetch(*new[:2])
    seen = keys.attend(new[2], SCALE, mask, None)
    for row in range(3):
        own = [plane[row : row + 1, :, : rows.tokens[row] + 1] for plane in (rows.keys, rows.values)]
        alone = mx.fast.scaled_dot_product_attention(new[2][row : row + 1], *own, scale=SCALE)
        assert mx.array_equal(seen[row : row + 1], alone)


@pytest.mark.parametrize(("reads", "finite"), [("rows", True), ("padded", False)])
def test_padding_is_not_read(reads, finite):
    """A NaN behind a row's columns; the twin is what reads it."""
    cache = filled(reads)
    for plane in cache.planes.values():
        plane[1, :, 4:] = float("nan")
    seen = forward(cache, 1, 7)
    assert mx.all(mx.isfinite(seen)).item() is finite


def test_rows_of_one_length_are_read_at_once():
    cache = filled("rows", lengths=(5, 5))
    cache.begin([1, 1], Positions(cache.tokens))
    keys, _ = cache.update_and_fetch(mx.zeros((2, KV, 1, SIZE)), mx.zeros((2, KV, 1, SIZE)))
    assert isinstance(keys, mx.array)


def test_auto_reads_row_by_row_where_the_padding_is_worth_it(monkeypatch):
    """By bytes of padding a row, whatever makes them: columns here."""
    column, starts = 1 << 10, Positions((100, 40))  # 30 columns of padding a row
    assert not rowwise.worth(starts, column)
    assert rowwise.worth(starts, 2 * column)
    monkeypatch.setitem(rowwise.SPARED, mx.cpu, 1 << 20)
    assert not rowwise.worth(starts, 2 * column)
    assert rowwise.worth(starts, 40 * column)


@pytest.mark.parametrize("options", [FullOptions(), FullOptions(reads="rows"), None], ids=str)
def test_layers_that_cannot_attend_are_read_padded(options):
    bare = LayerInfo(index=0, path="0", kind="full", kv_heads=KV, key_dim=SIZE, value_dim=SIZE, dtype=mx.float32)
    cache = FullLayout().open(bare, options, slots=2, window=1)
    cache.add(2)
    cache.begin([2, 1], Positions(cache.tokens))
    keys, _ = cache.update_and_fetch(mx.zeros((2, KV, 2, SIZE)), mx.zeros((2, KV, 2, SIZE)))
    cache.commit([2, 1])
    assert isinstance(keys, mx.array)
    assert not FullLayout().attends(bare, options)


def test_a_restored_row_is_read_as_before():
    state = filled("rows").extract(0)
    assert FullLayout().restore(state).extract(0).meta() == state.meta() == {"reads": "rows"}


# --- a row that is stored for good ----------------------------------------------------------------------------------


def lone(layout, options, tokens):
    cache = layout.open(LAYER, options, slots=1, window=1)
    cache.add(1)
    cache.begin([tokens], Positions(cache.tokens))
    shape = (1, KV, tokens, SIZE)
    cache.update_and_fetch(*(mx.random.normal(shape, key=mx.random.key(i)) for i in range(2)))
    cache.commit([tokens])
    mx.eval(cache.arrays())
    return cache


@pytest.mark.parametrize(
    ("layout", "options"),
    [(FullLayout(), FullOptions()), (QuantizedLayout(), QuantizedOptions(bits=8, group_size=32))],
    ids=["full", "quantized"],
)
@pytest.mark.parametrize(("tokens", "copies"), [(4000, False), (300, True)])
def test_a_cache_that_is_given_up_becomes_the_stored_row(layout, options, tokens, copies):
    """By peak memory: nothing is copied, unless much of the planes is reserve, which nobody would count."""
    cache = lone(layout, options, tokens)
    assert isinstance(cache, SurrenderingCache)
    copy = cache.extract(0)
    mx.eval(copy.arrays())
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    state = cache.surrender()
    mx.eval(state.arrays())
    assert (mx.get_peak_memory() - before >= state.nbytes) is copies
    assert (state.layout, state.tokens, state.meta()) == (copy.layout, copy.tokens, copy.meta())
    assert state.nbytes == copy.nbytes
    assert all(mx.array_equal(plane, copy.arrays()[name]) for name, plane in state.arrays().items())
    back = layout.restore(state)
    back.begin([1], Positions(back.tokens))
    back.update_and_fetch(mx.ones((1, KV, 1, SIZE)), mx.ones((1, KV, 1, SIZE)))
    mx.eval(back.arrays())
    assert all(mx.array_equal(plane, copy.arrays()[name]) for name, plane in state.arrays().items())
