"""What models see of `full`: masks, positions and reads of one forward, whole windows or not, kept or taken back."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.full import FullCache


def check_serial_graph(cache_type, held, width, rows=1, window=None, return_array=False):
    """Rows of equal length get what mlx-lm's serial cache gives: the same mask, offset and arrays, type for type."""
    ours, theirs = cache_type(rows), KVCache()
    ours.add(rows)
    for n in (held, width):
        if not n:
            continue
        ours.begin([n] * rows, Positions(ours.tokens))
        options = {"return_array": return_array, "window_size": window}
        mask, wanted = ours.make_mask(n, **options), theirs.make_mask(n, **options)
        assert type(mask) is type(wanted)
        if isinstance(wanted, mx.array):
            assert mask.dtype == wanted.dtype
            assert mask.tolist() == wanted.tolist()
        else:
            assert mask == wanted
        assert type(ours.offset) is type(theirs.offset)
        assert ours.offset == theirs.offset
        arrays = [mx.random.normal((rows, 2, n, 4)) for _ in range(2)]
        for got, serial in zip(ours.update_and_fetch(*arrays), theirs.update_and_fetch(*arrays), strict=True):
            assert got.shape == serial.shape
            assert mx.array_equal(got, serial)
        assert ours.offset == theirs.offset  # later layers read it after the append
        ours.commit([n] * rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("held", "width"), [(0, 1), (0, 5), (6, 1), (6, 4), (255, 3)])
def test_equal_rows_get_the_serial_graph(held, width, rows, window, return_array):
    check_serial_graph(FullCache, held, width, rows, window, return_array)


def test_keys_and_values_are_those_of_the_last_append(mirror):
    """Shared-KV models ask again after the append."""
    pair = mirror(lengths=(3, 5))
    pair.cache.begin([1, 1], Positions(pair.cache.tokens))
    arrays = mx.ones((2, 2, 1, 4)), mx.ones((2, 2, 1, 6))
    for first, second in zip(pair.cache.update_and_fetch(*arrays), pair.cache.keys_and_values(), strict=True):
        assert mx.array_equal(first, second)
    assert pair.cache.offset.tolist() == [4, 6]


def test_keys_and_values_can_be_set(mirror):
    """Some models replace a cache's arrays; what they set is what later steps read."""
    row = mirror(lengths=(3,))
    row.cache.keys, row.cache.values = row.cache.keys * 1.0, row.cache.values * 1.0
    row.step([1])
    row.check()


def check_ragged(make, lengths, widths, window=None):
    """Every query of a ragged row sees its own past up to itself (``window`` tokens of it) and nothing else."""
    rows = make(lengths)
    starts = Positions(rows.cache.tokens)
    rows.cache.begin(widths, starts)
    mask = np.array(rows.cache.make_mask(max(widths), window_size=window))
    assert mask.shape == (len(lengths), 1, max(widths), max(lengths) + max(widths))
    for row, (held, width) in enumerate(zip(lengths, widths, strict=True)):
        for place in range(width):
            last = held + place
            first = 0 if window is None else max(0, last - window + 1)
            assert np.flatnonzero(mask[row, 0, place]).tolist() == list(range(first, last + 1))
    rows.cache.commit([0] * len(lengths))
    rows.step(widths)
    rows.check()


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(
    ("lengths", "widths"),
    [((3, 7), (1, 1)), ((12, 3, 7, 1, 9), (1,) * 5), ((5, 0, 2), (4, 4, 4)), ((3, 7), (3, 1)), ((0, 9, 4), (0, 2, 5))],
)
def test_ragged_rows_see_their_own_past_only(mirror, lengths, widths, window):
    check_ragged(lambda lengths: mirror(lengths=lengths), lengths, widths, window)


def test_a_padded_window_leaves_no_trace(mirror):
    """Rows of width 0 and narrow rows of a window: the padding is never attended, then or later."""
    rows = mirror(lengths=(4, 4, 9))
    rows.step([0, 3, 1])
    rows.step([1, 0, 4])
    rows.step([1, 1, 1])
    rows.step([2, 2, 2])
    rows.check()


@pytest.mark.parametrize("lengths", [(6,), (5, 5, 5), (12, 3, 7)])
def test_rollback_then_append_equals_cold(mirror, lengths):
    """Any count of a window may be kept; the next append continues from there."""
    rows = mirror(lengths=lengths)
    for kept in ([0, 1, 2], [2, 0, 1], [4, 4, 0], [4, 4, 4]):
        rows.step([4] * len(lengths), kept[: len(lengths)])
        rows.step([1] * len(lengths))
    rows.check()


def test_an_aborted_forward_leaves_nothing(mirror):
    """commit([0] * rows): after a whole forward, before the append, and before the cache was even asked."""
    rows = mirror(lengths=(12, 3, 7))
    before = rows.cache.tokens
    for reached in ("begun", "masked", "appended", "not begun"):
        if reached != "not begun":
            rows.cache.begin([2, 2, 2], Positions(before))
        if reached in ("masked", "appended"):
            rows.cache.make_mask(2)
        if reached == "appended":
            rows.cache.update_and_fetch(mx.full((3, 2, 2, 4), 9.0), mx.full((3, 2, 2, 6), 9.0))
        rows.cache.commit([0, 0, 0])
        assert rows.cache.tokens == before
        assert rows.cache.offset.tolist() == list(before)
    rows.step([1, 1, 1])
    rows.check()


def test_an_append_that_raises_can_be_taken_back(mirror):
    """A wrong shape raises inside the layer; the rows go on as if it had not been asked."""
    rows = mirror(lengths=(5, 2))
    rows.cache.begin([1, 1], Positions(rows.cache.tokens))
    with pytest.raises(ValueError, match="shape"):
        rows.cache.update_and_fetch(mx.ones((2, 2, 1, 5)), mx.ones((2, 2, 1, 6)))
    rows.cache.commit([0, 0])
    rows.step([1, 1])
    rows.check()


@pytest.mark.parametrize("counts", [([1], (3, 3)), ([1, 1], (3,))])
def test_begin_refuses_other_rows(mirror, counts):
    rows = mirror(lengths=(3, 3))
    with pytest.raises(ValueError, match="2 rows"):
        rows.cache.begin(counts[0], Positions(counts[1]))


@pytest.mark.fault("F-08")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_dtype_stays(mirror, dtype):
    """Join, growth, keep, take, extract and restore keep it; a join of another dtype is refused."""
    rows = mirror(lengths=(5, 2, 9), dtype=dtype, tolerance=2e-2)
    rows.step([1, 1, 1])
    rows.keep([2, 0])
    late = mirror(lengths=(300,), dtype=dtype, tolerance=2e-2)
    rows.join(late)
    rows.step([1, 1, 1])
    parts = [rows, rows.take([1, 0]), rows.restored(1)]
    for part in parts:
        part.step([1] * part.cache.rows)
        assert all(array.dtype == dtype for array in part.cache.arrays())
        assert all(array.dtype == dtype for array in part.cache.extract(0).arrays().values())
    stranger = mirror(lengths=(3,), dtype=mx.float32 if dtype != mx.float32 else mx.float16, tolerance=2e-2)
    with pytest.raises(ValueError, match="dtype"):
        rows.cache.join(stranger.cache, [3])
    rows.check()


def test_a_cache_is_never_falsy_and_has_no_length():
    """Models test ``if cache``."""
    assert FullCache(1)
    assert not hasattr(FullCache, "__len__")


# --- twins: the same checks on caches that are wrong must fail ---------------------------------------------


class OnePosition(FullCache):
    """Takes the longest row's position for every row's."""

    @property
    def offset(self):
        return self._starts.longest + self._written


class OneMask(FullCache):
    """Masks as if all rows were as long as the longest."""

    def make_mask(self, N, return_array=False, window_size=None):
        starts, self._starts = self._starts, Positions([self._starts.longest] * self.rows)
        mask = super().make_mask(N, True, window_size or 1 << 20)
        self._starts = starts
        return mx.broadcast_to(mask, (self.rows, 1, *mask.shape))


class KeepsAll(FullCache):
    """Never takes anything back."""

    def commit(self, kept):
        super().commit([self._written] * len(kept))


class AlwaysArray(FullCache):
    """Gives an array where the serial cache gives none."""

    def make_mask(self, N, return_array=False, window_size=None):
        return super().make_mask(N, True, window_size) if N > 1 else mx.ones((1, 1), dtype=mx.bool_)


@pytest.mark.parametrize("broken", [AlwaysArray])
def test_a_cache_that_changes_the_serial_graph_is_found(broken):
    with pytest.raises(AssertionError):
        check_serial_graph(broken, 6, 1)


@pytest.mark.parametrize("broken", [OnePosition, OneMask])
def test_a_cache_with_shared_positions_is_found(mirror, broken):
    def make(lengths):
        made = mirror(broken(1))
        made.join(mirror(lengths=lengths))
        return made

    with pytest.raises(AssertionError):
        check_ragged(make, (12, 3), (1, 1))


def test_a_cache_that_cannot_take_back_is_found(mirror):
    rows = mirror(KeepsAll(1))
    rows.add(1)
    with pytest.raises(AssertionError):
        rows.step([4], [2])
