"""What `quantized` stores and what attention over it sees: every format, head geometry, mask and sink."""

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from oarlock.core.contracts.layout import KeyValues, LayerInfo, Positions
from oarlock.layouts.packed import BITS, GROUPS, Format, KeysValues
from oarlock.layouts.quantized import QuantizedCache, QuantizedLayout, QuantizedOptions, QuantizedRing
from oarlock.layouts.rings import Ring

LAYER = LayerInfo(
    index=3, path="3", kind="full", kv_heads=2, key_dim=64, value_dim=128, dtype=mx.float32, attendable=True
)
RING = attrs.evolve(LAYER, kind="rotating", window=8)


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(7)


# --- what is stored --------------------------------------------------------------------------------------------------


def check_stored(cache_type, bits, group, dtype=mx.float32):
    """Token by token and in blocks, rows of any length: the very bytes of mlx-lm's quantized cache, or of `quantize`."""
    cache = cache_type(2, Format(bits=bits, group_size=group), attends=True)
    cache.add(2)
    keys, values = (mx.random.normal((2, 2, 16, size)).astype(dtype) for size in (128, 256))
    for widths in ([5, 5], [1, 4], [1, 1], [4, 0]):
        wide, starts = max(widths), cache.tokens
        cache.begin(widths, Positions(starts))
        part = [mx.stack([x[row, :, start : start + wide] for row, start in enumerate(starts)]) for x in (keys, values)]
        cache.update_and_fetch(*part)
        cache.commit(widths)
    for row, tokens in enumerate(cache.tokens):
        arrays = cache.extract(row).arrays()
        own = [x[row : row + 1, :, :tokens] for x in (keys, values)]
        packed = [plane for x in own for plane in mx.quantize(x, group_size=group, bits=bits)]
        assert len(arrays) == len(packed)
        for got, wanted in zip(arrays.values(), packed, strict=True):
            assert got.dtype == wanted.dtype
            assert got.shape == wanted.shape
            assert mx.array_equal(got, wanted)
        if bits in {2, 4, 8}:  # mlx-lm lays out planes for packings that divide 32 bits only
            theirs = QuantizedKVCache(group, bits)
            for start, end in ((0, 5), (5, tokens)):
                theirs.update_and_fetch(*(x[row : row + 1, :, start:end] for x in (keys, values)))
            planes = [x[..., :tokens, :] for pair in theirs.keys_and_values() for x in pair]
            assert all(mx.array_equal(got, wanted) for got, wanted in zip(arrays.values(), planes, strict=True))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_tokens_are_stored_as_mlx_lm_stores_them(bits, group):
    check_stored(QuantizedCache, bits, group)


@pytest.mark.fault("G-08")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_scales_keep_their_dtype_through_a_file(dtype, tmp_path):
    """Out of a cache, to safetensors and back: bit by bit, in 16 bits as they were."""
    check_stored(QuantizedCache, 8, 64, dtype)
    cache = QuantizedCache(1, Format(bits=8, group_size=32), attends=True)
    cache.add(1)
    cache.begin([5], Positions((0,)))
    cache.update_and_fetch(*(mx.random.normal((1, 2, 5, 32)).astype(dtype) for _ in range(2)))
    cache.commit([5])
    state = cache.extract(0)
    assert {array.dtype for array in state.arrays().values()} == {dtype, mx.uint32}
    path = str(tmp_path / "row.safetensors")
    mx.save_safetensors(path, state.arrays(), state.meta())
    arrays, meta = mx.load(path, return_metadata=True)
    back = QuantizedLayout().restore(attrs.evolve(state, arrays=arrays, meta=meta)).extract(0).arrays()
    for name, array in state.arrays().items():
        assert back[name].dtype == array.dtype
        assert mx.array_equal(back[name], array)


class PacksChunks(QuantizedCache):
    """Quantizes the values of a forward by the largest of all its tokens."""

    def encode(self, keys, values):
        peak = mx.max(mx.abs(values), axis=2, keepdims=True)
        return super().encode(keys, values * 0 + peak)


class PacksColumns(QuantizedCache):
    """Packs what it has packed once more, as a cache that converts whole arrays again and again does."""

    def encode(self, keys, values):
        again = self.format.unpack("keys", super().encode(keys, values)) * 1.001
        return super().encode(again, values)


@pytest.mark.fault("G-08", twin=True)
def test_scales_of_another_dtype_are_found():
    class Widens(QuantizedCache):
        def encode(self, keys, values):
            return super().encode(keys.astype(mx.float32), values.astype(mx.float32))

    with pytest.raises(AssertionError):
        check_stored(Widens, 8, 64, mx.bfloat16)


@pytest.mark.parametrize("broken", [PacksChunks, PacksColumns])
def test_other_bytes_are_found(broken):
    with pytest.raises(AssertionError):
        check_stored(broken, 4, 64)


# --- attention ----------------------------------------------------------------------------------------------------


def masks(batch, heads, width, columns, dtype):
    """Every form of mask that models hand over; each query sees at least its own column."""
    last = mx.arange(columns) >= columns - width
    seen = (mx.random.uniform(shape=(batch, 1, width, columns)) > 0.4) | last
    full = (mx.random.uniform(shape=(batch, heads, width, columns)) > 0.4) | last
    return {
        "none": None,
        "causal": "causal",
        "rows": seen,
        "heads": full,
        "all rows": seen[0, 0],
        "columns": seen[0, 0, 0],
        "added": mx.where(seen, 0.0, -3e4).astype(dtype),
        "scores": mx.random.normal((batch, heads, width, columns)).astype(dtype),
    }


def check_attention(attend, heads, kv_heads, width, bits, sinks, dtype=mx.float32, tolerance=2e-5):
    """Against plain attention over the dequantized arrays, for every mask."""
    mx.random.seed(0)
    batch, columns, packing = 3, 11, Format(bits=bits, group_size=32)
    keys, values = (mx.random.normal((batch, kv_heads, columns, size)).astype(dtype) for size in (64, 32))
    planes = {**packing.pack("keys", keys), **packing.pack("values", values)}
    handle, other = KeysValues.pair(planes, packing)
    assert isinstance(handle, KeyValues)
    assert isinstance(other, KeyValues)
    assert (handle.shape, other.shape) == (keys.shape, values.shape)
    assert handle.dtype == other.dtype == dtype
    queries = mx.random.normal((batch, heads, width, 64)).astype(dtype)
    sinks = mx.random.normal((heads,)).astype(dtype) if sinks else None
    for name, mask in masks(batch, heads, width, columns, dtype).items():
        plain = [packing.unpack(name, planes) for name in ("keys", "values")]
        wanted = mx.fast.scaled_dot_product_attention(queries, *plain, scale=0.2, mask=mask, sinks=sinks)
        got = attend(handle, queries, 0.2, mask, sinks)
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        worst = mx.max(mx.abs(got - wanted)).item()
        assert worst < tolerance, f"mask {name}: {worst}"


GEOMETRY = [(4, 4), (8, 2), (6, 1)]


@pytest.mark.fault("G-04")
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), GEOMETRY)
def test_attention_equals_plain_attention_over_what_is_stored(heads, kv_heads, width, sinks):
    """Grouped heads, one head for all, keys and values of other sizes; boolean, added and causal masks of every shape."""
    for bits in (4, 8):
        check_attention(KeysValues.attend, heads, kv_heads, width, bits, sinks)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_attention_keeps_its_dtype(dtype):
    """By products with packed planes, as on a GPU, and by unpacking, as on the CPU. Scores have 8 bits in bfloat16."""
    for attend in (KeysValues.attend, KeysValues._packed):
        check_attention(attend, 8, 2, 2, 4, True, dtype, tolerance=1e-1)  # a few units of bfloat16 at 4


def without_repeat(handle, queries, scale, mask, sinks):
    """The mask lacks the axis of the heads in a group: it lines rows up with heads."""
    if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == 1:
        mask = mx.concatenate([mask[:1]] * mask.shape[0])
    return handle.attend(queries, scale, mask, sinks)


def without_sinks(handle, queries, scale, mask, sinks):
    return handle.attend(queries, scale, mask, None)


@pytest.mark.fault("G-04", twin=True)
@pytest.mark.parametrize("broken", [without_repeat, without_sinks])
def test_attention_that_is_wrong_is_found(broken):
    with pytest.raises(AssertionError):
        check_attention(broken, 8, 2, 1, 8, True)


# --- refusals and sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "group", "said"),
    [
        ({"key_dim": 48}, 64, ("key size 48", "group_size 64", "multiple of none")),
        ({"value_dim": 96}, 64, ("value size 96", "group_size may be 32")),
        ({"key_dim": 64}, 128, ("key size 64", "group_size may be 32 or 64")),
        ({"key_dim": 0}, 32, ("no keys",)),
        ({"kind": "rotating", "window": 4, "keep": 4}, 64, ("window of 4 with 4 sinks",)),
    ],
)
def test_what_cannot_be_packed_is_refused_with_what_could(changes, group, said):
    reason = QuantizedLayout().refuses(attrs.evolve(LAYER, **changes), QuantizedOptions(group_size=group))
    assert all(part in reason for part in said)
    assert "\n" not in reason


@pytest.mark.parametrize("layer", [LAYER, RING])
def test_what_can_be_packed_is_not_refused(layer):
    layout = QuantizedLayout()
    assert layout.refuses(layer, QuantizedOptions()) is None
    assert layout.attends(layer, QuantizedOptions())
    assert not layout.attends(attrs.evolve(layer, attendable=False), QuantizedOptions())


@pytest.mark.parametrize("given", [{"bits": 5}, {"bits": "8"}, {"group_size": 48}, {"group_size": 0}])
def test_options_out_of_range_are_refused_with_what_is_allowed(given):
    with pytest.raises(ValueError, match="must be in") as caught:
        QuantizedOptions(**given)
    allowed = BITS if "bits" in given else GROUPS
    assert str(allowed) in str(caught.value.args[0])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64])
def test_predicted_bytes_are_allocated_bytes(bits, group):
    """Of every format, also where scales have 16 bits; live ones are those of the tokens in the window."""
    options = QuantizedOptions(bits=bits, group_size=group)
    for layer in (LAYER, attrs.evolve(RING, window=280), attrs.evolve(LAYER, dtype=mx.bfloat16)):
        cache = QuantizedLayout().open(layer, options, slots=1, window=1)
        cache.add(1)
        cache.begin([300], Positions((0,)))
        cache.update_and_fetch(*(mx.ones((1, 2, 300, size)).astype(layer.dtype) for size in (64, 128)))
        cache.commit([300])
        assert cache.nbytes == QuantizedLayout().bytes_at(layer, options, 300)
        held = min(300, layer.window or 300)
        assert cache.live_bytes * cache.planes["keys"].shape[2] == cache.nbytes * held


def test_four_bits_are_less_than_a_third_of_16():
    """The figure that the benchmark is held to."""
    layer = attrs.evolve(LAYER, dtype=mx.bfloat16)
    packed = QuantizedLayout().bytes_at(layer, QuantizedOptions(bits=4, group_size=64), 4096)
    assert packed <= 0.3 * 2 * (64 + 128) * 2 * 4096


def test_both_kinds_are_packed_and_can_be_cut():
    layout = QuantizedLayout()
    assert (layout.name, layout.kinds, layout.options) == ("quantized", {"full", "rotating"}, QuantizedOptions)
    full, ring = (layout.open(layer, QuantizedOptions(), slots=2, window=3) for layer in (LAYER, RING))
    assert isinstance(full, QuantizedCache)
    assert isinstance(ring, QuantizedRing)
    assert ring.ring == Ring(window=8, slack=2)
    assert full.rewinds
    assert ring.rewinds
