"""A row is plain up to its stop and packed behind it, whoever stands beside it and however it got there."""

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from oarlock.core.contracts.composition import ConvertingLayout
from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts.delayed import DelayedLayout, DelayedOptions
from oarlock.layouts.full import FullLayout
from oarlock.layouts.packed import BITS, Format
from oarlock.layouts.quantized import QuantizedLayout, QuantizedOptions
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingLayout

LAYER = LayerInfo(
    index=3, path="3", kind="full", kv_heads=2, key_dim=32, value_dim=64, dtype=mx.float32, attendable=True
)
RING = attrs.evolve(LAYER, kind="rotating", window=8)
STOP = 5


# --- when a row is packed --------------------------------------------------------------------------------------------


def test_a_row_is_packed_when_it_gets_a_token_beyond_its_stop(mirror, delayed_kind, forms):
    """17.34: rows by themselves. A row that takes no part in a forward stays as it is."""
    rows = mirror(kind=delayed_kind(), lengths=(STOP - 1, STOP, STOP, 2))
    assert forms(rows.cache) == [False] * 4
    rows.step([1, 1, 0, 1])
    assert forms(rows.cache) == [False, True, False, False]
    rows.step([1, 1, 1, 1])
    assert forms(rows.cache) == [True, True, True, False]


def test_what_is_not_kept_packs_nothing(mirror, delayed_kind, forms):
    """17.35."""
    rows = mirror(kind=delayed_kind(), lengths=(STOP - 1, 1))
    rows.step([4, 4], [1, 0])
    rows.step([0, 9], [0, 4])
    assert forms(rows.cache) == [False, False]
    rows.step([3, 3], [0, 0])
    assert rows.cache.tokens == (STOP, STOP)
    rows.check()
    rows.step([1, 1])
    assert forms(rows.cache) == [True, True]


def test_a_forward_that_runs_past_the_stop_reads_plainly_and_packs(mirror, delayed_kind, forms):
    """The core ends forwards there; whoever does not gets a row that is right, by what it was when the forward began."""
    rows = mirror(kind=delayed_kind(), lengths=(2,))
    rows.step([9])
    assert forms(rows.cache) == [True]


def test_an_empty_row_is_never_packed(mirror, delayed_kind, forms):
    """17.34: with start 0 the first append is plain."""
    assert DelayedOptions(start=0).stop == 1
    rows = mirror(kind=delayed_kind(stop=1))
    rows.add(2)
    rows.step([1, 0])
    assert forms(rows.cache) == [False, False]
    rows.step([1, 1])
    assert forms(rows.cache) == [True, False]


@pytest.mark.parametrize("bits", [b for b in BITS if b in {2, 4, 8}])
def test_what_is_stored_is_what_mlx_lm_converts_to(bits):
    """Bit by bit, of its cache that is converted at the same length; then token by token."""
    options = DelayedOptions(bits=bits, group_size=32, start=STOP)
    cache, theirs = DelayedLayout().open(LAYER, options, slots=1, window=1), KVCache()
    cache.add(1)
    mx.random.seed(3)
    for width in (3, 2, 1, 4, 1):
        if theirs.offset == STOP:
            theirs = theirs.to_quantized(group_size=32, bits=bits)
        keys, values = (mx.random.normal((1, 2, width, size)) for size in (32, 64))
        cache.begin([width], Positions(cache.tokens))
        cache.update_and_fetch(keys, values)
        cache.commit([width])
        theirs.update_and_fetch(keys, values)
    wanted = [plane[..., : theirs.offset, :] for side in (theirs.keys, theirs.values) for plane in side]
    got = list(cache.extract(0).arrays().values())
    assert len(got) == len(wanted)
    assert all(mx.array_equal(mine, plane) for mine, plane in zip(got, wanted, strict=True))


# --- bytes and options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [LAYER, RING])
def test_bytes_are_those_of_the_form_that_a_row_has(layer):
    """On either side of the stop; what was plain is given back."""
    layout, options = DelayedLayout(), DelayedOptions(bits=4, group_size=32, start=STOP)
    plain = FullLayout() if layer.kind == "full" else RotatingLayout()
    for pieces in ([STOP - 1], [STOP], [STOP, 1], [STOP, 300], [300]):
        cache = layout.open(layer, options, slots=1, window=1)
        cache.add(1)
        for width in pieces:
            cache.begin([width], Positions(cache.tokens))
            cache.update_and_fetch(*(mx.ones((1, 2, width, size)) for size in (32, 64)))
            cache.commit([width])
        cache.compact()
        tokens = sum(pieces)
        assert cache.nbytes == sum(array.nbytes for array in cache.arrays()) == layout.bytes_at(layer, options, tokens)
        as_stored = plain if tokens <= STOP else QuantizedLayout()
        assert cache.nbytes == as_stored.bytes_at(layer, options, tokens)
        assert 0 < cache.live_bytes <= cache.nbytes


@pytest.mark.parametrize("start", [-1, 2.0, "5", True, None])
def test_a_start_out_of_range_is_refused_with_what_is_allowed(start):
    with pytest.raises(ValueError, match="0 or more") as caught:
        DelayedOptions(start=start)
    assert repr(start) in str(caught.value)


def test_the_layout_says_what_it_is():
    layout, options = DelayedLayout(), DelayedOptions(group_size=32, start=7)
    assert (layout.name, layout.kinds, layout.options) == ("delayed", {"full", "rotating"}, DelayedOptions)
    assert DelayedOptions().start == 5000
    assert isinstance(layout, ConvertingLayout)
    assert layout.stops(LAYER, options) == (7,)
    assert layout.attends(LAYER, options)
    assert not layout.attends(attrs.evolve(LAYER, attendable=False), options)
    for layer in (LAYER, RING, attrs.evolve(LAYER, key_dim=48), attrs.evolve(RING, keep=8)):
        assert layout.refuses(layer, options) == QuantizedLayout().refuses(layer, QuantizedOptions(group_size=32))
    for layer in (LAYER, RING):
        cache = layout.open(layer, options, slots=2, window=3)
        assert (cache.rows, cache.tokens, cache.nbytes, cache.live_bytes, cache.arrays()) == (0, (), 0, 0, [])
        assert cache
        assert cache.rewinds
        assert not hasattr(cache, "parts")  # the core would forward them one by one
        assert cache.packed.format == Format(bits=8, group_size=32)
        assert layer is LAYER or cache.plain.ring == cache.packed.ring == Ring(window=8, slack=2)
