"""What models see of `rotating` beyond the kit: the very columns of mlx-lm's ring, and what is kept of a block."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache

WINDOW = 8


def check_serial_graph(cache_type, widths, *, rows=1, window=WINDOW, seen=None, return_array=False, keep=0):
    """Rows of one length get what mlx-lm's ring gives, forward after forward: mask, offset and reads, bit for bit.

    ``seen`` is the window that the model asks its masks for.
    """
    ours, theirs = cache_type(rows, Ring(window=window, keep=keep)), RotatingKVCache(window, keep)
    ours.add(rows)
    for n in widths:
        ours.begin([n] * rows, Positions(ours.tokens))
        options = {"return_array": return_array, "window_size": seen}
        mask, wanted = ours.make_mask(n, **options), theirs.make_mask(n, **options)
        assert type(ours.offset) is type(theirs.offset)
        assert ours.offset == theirs.offset
        arrays = [mx.random.normal((rows, 2, n, 4)) for _ in range(2)]
        fetched = ours.update_and_fetch(*arrays)
        for got, serial in zip(fetched, theirs.update_and_fetch(*arrays), strict=True):
            assert got.shape == serial.shape
            assert mx.array_equal(got, serial)
        assert_masks_agree(mask, wanted, fetched[0].shape[2])
        assert ours.offset == theirs.offset
        assert all(mx.array_equal(a, b) for a, b in zip(fetched, ours.keys_and_values(), strict=True))
        ours.commit([n] * rows)


def assert_masks_agree(mask, wanted, columns):
    if isinstance(wanted, mx.array) and wanted.ndim == 1:  # narrower than the ring: mlx-lm's has no rows
        mask = mask[0, 0, 0]
    assert type(mask) is type(wanted)
    if isinstance(wanted, mx.array):
        assert mask.shape[-1] == wanted.shape[-1] == columns
        assert mask.tolist() == wanted.tolist()
    else:
        assert mask == wanted


SCHEDULES = {
    "decode": [1] * 30,
    "short prompt": [3] + [1] * 20,
    "exactly full": [8] + [1] * 10,
    "one more": [9] + [1] * 10,
    "long prompt": [20] + [1] * 20,
    "chunks": [4, 4, 4, 1, 1, 1, 1, 5, 1, 1, 1, 13, 1, 1],
    "odd chunks": [7, 7, 2, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1],
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seen", [None, 3, WINDOW + 1])
@pytest.mark.parametrize("widths", SCHEDULES.values(), ids=SCHEDULES)
def test_equal_rows_get_the_serial_graph(widths, seen, rows):
    check_serial_graph(RotatingCache, widths, rows=rows, seen=seen)


@pytest.mark.parametrize(("window", "widths"), [(300, [250, *[1] * 60, 3, 1]), (1, [1, 1, 3, 1]), (2, [5, 1, 2, 1])])
def test_other_windows_too(window, widths):
    """Wider than the step in which buffers grow, and hardly wide at all; masks as arrays where a model wants them."""
    check_serial_graph(RotatingCache, widths, window=window)
    check_serial_graph(RotatingCache, widths, window=window, seen=window, return_array=True)


@pytest.mark.parametrize("keep", [1, 3, 7])
def test_sinks_are_read_where_mlx_lm_reads_them(keep):
    """Token by token, and behind a first block that fits. mlx-lm's masks of later blocks hide the sinks: see below."""
    check_serial_graph(RotatingCache, [1] * 40, keep=keep)
    check_serial_graph(RotatingCache, [6] + [1] * 30, keep=keep)


# --- rows that differ ------------------------------------------------------------------------------------------------


def test_blocks_can_be_cut_too(mirror, ring_kind):
    """Wider than the slack: nothing was written before the commit, so any count is possible there as well."""
    rows = mirror(kind=ring_kind(WINDOW), lengths=(3, 8, 9, 20, 33))
    one = [1] * 5
    for widths, kept in ((one, one), ([11] * 5, [0, 1, 11, 5, 10]), (one, one), ([9] * 5, [9, 0, 0, 3, 9]), (one, one)):
        rows.step(widths, kept)
    rows.check()


# --- twins -------------------------------------------------------------------------------------------------------------


class AlwaysArray(RotatingCache):
    """Gives an array where mlx-lm gives none."""

    def make_mask(self, N, return_array=False, window_size=None):
        mask = super().make_mask(N, return_array, window_size)
        return mx.ones((1, 1), dtype=mx.bool_) if mask is None else mask


class OtherOrder(RotatingCache):
    """Lays a block out one column further on: the same tokens, in another order."""

    def commit(self, kept):
        super().commit(kept)
        if self._written == 0 and self.planes and min(self.tokens) > self.ring.capacity:
            self.planes = {name: mx.roll(plane, 1, axis=2) for name, plane in self.planes.items()}


@pytest.mark.parametrize("broken", [AlwaysArray, OtherOrder])
def test_a_ring_that_changes_the_serial_graph_is_found(broken):
    with pytest.raises(AssertionError):
        check_serial_graph(broken, SCHEDULES["long prompt"])
