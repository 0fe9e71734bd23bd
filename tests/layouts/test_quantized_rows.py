"""Rows of `quantized`, full and rotating: they join, leave, move, come back and wrap, and stay packed all the while."""

import mlx.core as mx
import pytest

from oarlock.layouts.full import FullCache
from oarlock.layouts.packed import Format
from oarlock.layouts.quantized import QuantizedCache, QuantizedRing
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache


def check_surgery(make):
    """Five and nine tokens, side by side, one leaves, comes back, and goes on."""
    rows = make(lengths=(5, 9))
    rows.step([1, 1])
    back = rows.restored(0)
    rows.keep([1])
    rows.step([1])
    rows.join(back)
    for widths in ([1, 1], [3, 2], [1, 1]):
        rows.step(widths)
    rows.check()
    assert all(plane.dtype == mx.uint32 for name, plane in rows.cache.planes.items() if "." not in name)


@pytest.mark.fault("G-03")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("window", [None, 8])
def test_packed_rows_are_batched_with_history(mirror, packed_kind, bits, window):
    check_surgery(lambda **options: mirror(kind=packed_kind(bits, window), **options))


class JoinsKeysOnly(QuantizedCache):
    """Has no join for what it packs beside the integers: rows get scales of the slot's last owner."""

    def join(self, other, slots):
        super().join(other, slots)
        for name, plane in self.planes.items():
            if "." in name and self.rows > other.rows:
                plane[slots[0] :] = plane[0]


@pytest.mark.fault("G-03", twin=True)
def test_a_join_without_scales_is_found(mirror, packed_kind):
    with pytest.raises(AssertionError):
        check_surgery(lambda **options: mirror(kind=packed_kind(8, cache_type=JoinsKeysOnly), **options))


EIGHT = Format(bits=8, group_size=32)
STORAGES = {
    "full": lambda: FullCache(1),
    "ring": lambda: RotatingCache(1, Ring(window=8)),
    "wider ring": lambda: RotatingCache(1, Ring(window=9)),
    "ring with a sink": lambda: RotatingCache(1, Ring(window=8, keep=1)),
    "packed": lambda: QuantizedCache(1, EIGHT, attends=True),
    "fewer bits": lambda: QuantizedCache(1, Format(bits=4, group_size=32), attends=True),
    "larger groups": lambda: QuantizedCache(1, Format(bits=8, group_size=64), attends=True),
    "packed ring": lambda: QuantizedRing(1, Ring(window=8), EIGHT, attends=True),
    "wider packed ring": lambda: QuantizedRing(1, Ring(window=9), EIGHT, attends=True),
}


@pytest.mark.fault("G-07")
@pytest.mark.parametrize("mine", STORAGES)
@pytest.mark.parametrize("theirs", STORAGES)
def test_rows_join_rows_of_their_own_storage_only(mine, theirs):
    """All pairs: another format, another window, packed and plain; nothing changes where they are refused."""
    rows, other = STORAGES[mine](), STORAGES[theirs]()
    rows.add(1)
    other.add(1)
    if mine == theirs:
        rows.join(other, [1])
        return
    with pytest.raises(TypeError, match="cannot join"):
        rows.join(other, [1])
    assert rows.rows == 1


@pytest.mark.fault("G-07", twin=True)
def test_a_cache_that_takes_any_rows_is_found():
    class TakesAll(QuantizedCache):
        def storage(self):
            return "any"

    rows, other = (TakesAll(1, Format(bits=bits, group_size=32), attends=True) for bits in (4, 8))
    other.add(1)
    with pytest.raises(pytest.fail.Exception), pytest.raises(TypeError):
        rows.join(other, [0])


def test_a_state_stays_packed_and_says_what_it_is(mirror, packed_kind):
    """Its meta restores it: format, window, sinks, and whether attention takes it packed."""
    for window, attends in ((None, True), (None, False), (8, True)):
        rows = mirror(kind=packed_kind(4, window, attends=attends), lengths=(20,))
        state = rows.cache.extract(0)
        ring = {} if window is None else {"window": "8", "keep": "0"}
        assert state.meta() == {"bits": "4", "group_size": "32", "attends": str(int(attends)), **ring}
        assert list(state.arrays()) == [f"{x}{part}" for x in ("keys", "values") for part in ("", ".scales", ".biases")]
        assert state.nbytes == (20 if window is None else 7) * 2 * ((32 + 64) // 2 + 2 * 3 * 4)
        restored = rows.restored(0)
        assert type(restored.cache) is type(rows.cache)
        assert restored.cache.attends is attends


def test_packed_rings_describe_their_columns_as_plain_ones_do(mirror, packed_kind, ring_kind):
    """So that layers of both share a mask."""
    for packed, plain in (
        (packed_kind(8, None), None),
        (packed_kind(8, 8), ring_kind(8)),
    ):
        one = mirror(kind=packed, lengths=(12, 3))
        other = mirror(lengths=(12, 3)) if plain is None else mirror(kind=plain, lengths=(12, 3))
        assert one.cache.columns([1, 1]) == other.cache.columns([1, 1])
