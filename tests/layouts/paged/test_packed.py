"""Packed blocks: what they store and share is what plain ones do and `quantized` packs, and formats never mix."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import KeyValues, LayerInfo, Positions, RowState
from oarlock.core.testing.layouts.cases import Case, Subject
from oarlock.layouts.packed import Format, KeysValues
from oarlock.layouts.paged import PagedLayout, PagedOptions
from oarlock.layouts.pages import Pages
from oarlock.layouts.quantized import QuantizedLayout, QuantizedOptions
from oarlock.layouts.reads import RowReads

LAYER = LayerInfo(
    index=0, path="0", kind="full", kv_heads=2, key_dim=64, value_dim=128, dtype=mx.float32, attendable=True
)
ARRAYS = attrs.evolve(LAYER, attendable=False)
EIGHT, FOUR = PagedOptions(bits=8), PagedOptions(bits=4, group_size=32)


def filled(layout, layer, options, tokens, dtype=mx.float32):
    """One row of random keys and values, in a window of all."""
    cache = layout.open(layer, options, slots=1, window=1)
    cache.add(1)
    write(cache, [tokens], dtype)
    return cache


def write(cache, widths, dtype=mx.float32):
    """One forward of random keys and values; what it returned."""
    cache.begin(widths, Positions(cache.tokens))
    shape = (cache.rows, 2, max(widths))
    fetched = cache.update_and_fetch(*(mx.random.normal((*shape, size)).astype(dtype) for size in (64, 128)))
    cache.commit(widths)
    return fetched


def content(state):
    return {name: np.array(array.view(mx.uint8)).tobytes() for name, array in state.arrays().items()}


@pytest.fixture(params=[8, 4])
def rows(request):
    """Open rows of two layers whose every look is checked."""
    subject = Subject("paged", {"bits": request.param, "block_size": 16})
    return lambda: Case("packed", "full", {"attendable": True}, subject).layers().open()


def twins(rows, length):
    """Two rows that go on from a stored one of ``length``; nothing else is left of it."""
    group = rows()
    group.enter(length)
    states, pieces = group.states(0), list(group.pieces[0])
    group.keep([])
    for _ in range(2):
        group.join(group.restored(states, pieces))
    return group


def test_two_rows_on_one_prefix_hold_little_more_than_one(rows):
    """1,000 tokens in common, then each its own: less than 1.1 times one row's bytes."""
    one, two = rows(), twins(rows, 1000)
    one.enter(1020)
    for _ in range(20):
        two.step([1, 1])
    for each in (one, two):
        each.compact()
    for lone, both in zip(one.caches, two.caches, strict=True):
        assert both.live_bytes == both.nbytes < 1.1 * lone.nbytes


@pytest.mark.parametrize("length", [33, 47])
def test_a_write_into_a_shared_block_copies_exactly_that_block(rows, monkeypatch, length):
    """Six planes of it. The second writer owns the original alone by then."""
    copied, copy = [], Pages.blocks_of
    group = rows()
    group.enter(length)
    group.join(group.take([0]))
    monkeypatch.setattr(Pages, "blocks_of", lambda self, ids: copied.append(ids.tolist()) or copy(self, ids))
    used = group.caches[0]._blocks.used
    group.step([1, 0])
    assert [len(ids) for ids in copied] == [1, 1]  # one a layer
    assert group.caches[0]._blocks.used == used + 1
    group.step([0, 1])
    assert len(copied) == 2
    group.step([3, 1])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("options", [EIGHT, FOUR])
def test_what_is_stored_is_what_quantized_stores(options, dtype):
    """Byte for byte, from a file too; it goes on in blocks of the same format."""
    layout, theirs = PagedLayout(), QuantizedLayout()
    layout.refuses(LAYER, options)
    packing = QuantizedOptions(bits=options.bits, group_size=options.group_size)
    stored = []
    for each, choice in ((layout, options), (theirs, packing)):
        mx.random.seed(5)
        stored.append(filled(each, LAYER, choice, 45, dtype).extract(0))
    assert content(stored[0]) == content(stored[1])
    assert len(content(stored[0])) == 6
    copy = RowState(layout="paged", tokens=45, arrays=stored[0].arrays(), meta=stored[0].meta())
    assert copy.nbytes == stored[0].nbytes
    cache = layout.open(LAYER, options, slots=1, window=1)
    cache.join(layout.restore(copy), [0])
    assert content(cache.extract(0)) == content(stored[0])


@pytest.mark.parametrize("tokens", [1, 32, 1000])
@pytest.mark.parametrize(("options", "share"), [(EIGHT, (8 + 1) / 32), (FOUR, (4 + 2) / 32)])
def test_bytes_are_those_of_the_numbers_and_of_their_scales(options, share, tokens):
    """A group has a scale and a bias of 32 bits each."""
    layout = PagedLayout()
    cache = filled(layout, LAYER, options, tokens)
    plain = layout.bytes_at(LAYER, PagedOptions(), tokens)
    wanted = layout.bytes_at(LAYER, options, tokens)
    assert wanted == share * plain == cache.nbytes == cache.live_bytes == sum(plane.nbytes for plane in cache.arrays())


# --- reads ------------------------------------------------------------------------------------------------------


def joined(layer, options, *lengths):
    layout = PagedLayout()
    cache = layout.open(layer, options, slots=1, window=1)
    for row, length in enumerate(lengths):
        cache.join(filled(layout, layer, options, length), [row])
    return cache


@pytest.mark.parametrize(
    ("reads", "lengths", "handle"),
    [("auto", [20], KeysValues), ("auto", [20, 3], RowReads), ("gather", [20, 3], KeysValues)],
)
def test_layers_that_take_handles_get_packed_ones(reads, lengths, handle):
    """Of keys and values as wide as those that were given; other layers get arrays."""
    for layer, kind in ((LAYER, handle), (ARRAYS, mx.array)):
        options = attrs.evolve(EIGHT, reads=reads)
        fetched = write(joined(layer, options, *lengths), [1] * len(lengths))
        assert [type(each) for each in fetched] == [kind, kind]
        assert [each.shape for each in fetched] == [(len(lengths), 2, 21, size) for size in (64, 128)]
        assert PagedLayout().attends(layer, options) == isinstance(fetched[0], KeyValues) == layer.attendable


# --- formats do not mix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [PagedOptions(), EIGHT, FOUR], ids=["plain", "8 bits", "4 bits"])
@pytest.mark.parametrize("others", [PagedOptions(), EIGHT, FOUR], ids=["plain", "8 bits", "4 bits"])
def test_rows_go_into_blocks_of_their_own_format_only(options, others):
    """By a join, and by restoring what only arrays are left of; nothing changes where it is refused."""
    layout, elsewhere = PagedLayout(), PagedLayout()
    layout.refuses(LAYER, options)
    cache = filled(layout, LAYER, options, 5)
    other = filled(elsewhere, LAYER, others, 7)
    state = other.extract(0)
    copy = RowState(layout="paged", tokens=7, arrays=state.arrays(), meta=state.meta())
    if options == others:
        cache.join(other, [1])
        cache.join(layout.restore(copy), [2])
        assert cache.tokens == (5, 7, 7)
        return
    said = "plainly" if others.bits is None else f"{others.bits} bits"
    with pytest.raises(ValueError, match=said) as first:
        cache.join(other, [1])
    with pytest.raises(ValueError, match=said) as second:
        layout.restore(copy)
    assert "\n" not in str(first.value) + str(second.value)
    assert cache.tokens == (5,)
    write(cache, [1])


def test_a_row_without_a_bound_layer_keeps_its_format():
    state = filled(PagedLayout(), LAYER, FOUR, 40).extract(0)
    stranger = PagedLayout().restore(RowState(layout="paged", tokens=40, arrays=state.arrays(), meta=state.meta()))
    assert stranger._pages.format == Format(bits=4, group_size=32)
    assert content(stranger.extract(0)) == content(state)
    write(stranger, [3])
    assert stranger.tokens == (43,)


@pytest.mark.parametrize(("key", "fits"), [(96, "32"), (48, "none"), (0, "nothing")])
def test_a_head_size_that_cannot_be_packed_is_refused_with_what_fits(key, fits):
    layer = attrs.evolve(LAYER, key_dim=key)
    assert fits in PagedLayout().refuses(layer, EIGHT)
    assert PagedLayout().refuses(layer, PagedOptions()) is None
    assert PagedLayout().refuses(layer, EIGHT) == QuantizedLayout().refuses(layer, QuantizedOptions())
