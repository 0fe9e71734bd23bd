"""Rows of `full` beyond the kit: what is stored of a row, exactly, and joins of rows that hold nothing."""

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import LayerInfo
from oarlock.layouts.full import FullCache, FullLayout, FullOptions

LAYER = LayerInfo(index=0, path="0", kind="full", kv_heads=2, key_dim=4, value_dim=6, dtype=mx.float32)


# --- joins and leaves of rows that hold nothing ---------------------------------------------------------------


def check_join(cache_type, make, first, second):
    """Rows join, then a padded chunk, then decode."""
    rows = make(cache_type(1))
    if first:
        rows.join(make(lengths=first))
    rows.join(make(lengths=second))
    rows.check()
    count = rows.cache.rows
    rows.step([1 + i % 3 for i in range(count)])
    rows.step([1] * count)
    rows.check()


def check_early_filter(cache_type, make):
    """Filter right after creation, then prefill."""
    rows = make(cache_type(1))
    rows.add(3)
    rows.keep([2, 0])
    rows.check()
    rows.step([3, 5])
    rows.keep([1])
    rows.add(1)
    rows.keep([1, 0])
    rows.step([2, 2])
    rows.check()


@pytest.mark.fault("F-04")
@pytest.mark.parametrize(("first", "second"), [((0, 0, 0), (3, 5)), ((3, 5), (0, 0, 0))])
def test_empty_and_filled_rows_join_either_way(mirror, first, second):
    """Three empty rows with two filled ones, and the reverse."""
    check_join(FullCache, mirror, first, second)


@pytest.mark.fault("F-06")
def test_rows_filtered_before_their_first_token_work(mirror):
    check_early_filter(FullCache, mirror)


class CountsTheOthers(FullCache):
    """Where it holds nothing yet, makes a placeholder with as many rows as the joiner has."""

    def join(self, other, slots):
        if self.keys is None:
            self._set_tokens((0,) * other.rows)
        super().join(other, range(self.rows, self.rows + other.rows))


class FiltersBelowZero(FullCache):
    """Takes padding away from a row that has none yet."""

    def keep(self, indices):
        super().keep(indices)
        if self.keys is None:
            self._set_tokens(tuple(tokens - 3 for tokens in self._tokens))


@pytest.mark.fault("F-04", twin=True)
def test_a_placeholder_of_the_wrong_size_is_found(mirror):
    with pytest.raises((AssertionError, ValueError)):
        check_join(CountsTheOthers, mirror, (0, 0, 0), (3, 5))


@pytest.mark.fault("F-06", twin=True)
def test_a_filter_below_zero_is_found(mirror):
    with pytest.raises((AssertionError, ValueError)):
        check_early_filter(FiltersBelowZero, mirror)


def test_a_join_into_another_slot_says_which_are_free(mirror):
    rows = mirror(lengths=(4, 2))
    with pytest.raises(ValueError, match="free ones are"):
        rows.cache.join(mirror(lengths=(3,)).cache, [3])


# --- what is held ---------------------------------------------------------------------------------------------


def test_a_stored_row_holds_its_tokens_and_no_more(mirror):
    """Exactly: no array handed out is longer than the row."""
    rows = mirror(lengths=(5, 9, 0))
    assert rows.cache.live_bytes == 14 * 2 * (4 + 6) * 4
    for row, tokens in enumerate((5, 9, 0)):
        state = rows.cache.extract(row)
        assert (state.layout, state.nbytes) == ("full", tokens * 2 * (4 + 6) * 4)
        assert all(array.shape[2] == tokens for array in state.arrays().values())
    rows.check()


def test_slots_and_columns_come_in_steps_of_256(mirror):
    rows = mirror(lengths=(600, 3, 7, 5))
    most = rows.cache.nbytes
    rows.keep([1, 2])
    assert rows.cache.nbytes == most
    rows.cache.compact()
    assert rows.cache.nbytes == 2 * 256 * 2 * (4 + 6) * 4 == 2 * FullLayout().bytes_at(LAYER, FullOptions(), 1)


def test_any_prefix_can_be_reused(mirror):
    rows = mirror(lengths=(9,))
    assert [rows.cache.reusable(n) for n in (0, 4, 9, 12)] == [0, 4, 9, 9]
    assert rows.cache.rewinds


def test_columns_are_those_of_the_longest_row(mirror):
    one, other = mirror(lengths=(3, 9)).cache, mirror(lengths=(9, 1)).cache
    assert one.columns([1, 1]) == other.columns([1, 1]) != one.columns([1, 2])


def test_every_full_layer_is_taken():
    layout = FullLayout()
    assert (layout.name, layout.kinds, layout.options) == ("full", {"full"}, FullOptions)
    assert layout.refuses(LAYER, FullOptions()) is None
