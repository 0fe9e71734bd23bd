"""Rows of `full`: they join, leave, move, are copied out and come back, and never see what another row left."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.layouts.full import FullCache, FullLayout, FullOptions

LAYER = LayerInfo(index=0, path="0", kind="full", kv_heads=2, key_dim=4, value_dim=6, dtype=mx.float32)


# --- what a slot held before --------------------------------------------------------------------------------


def check_join_clears(cache_type, make):
    """A joiner takes a slot in which a row of NaN stood."""
    rows = make(cache_type(4))
    rows.join(make(lengths=(20, 3, 9)))
    rows.keep([0])
    poison_free_slots(rows.cache)
    rows.join(make(lengths=(2,)))
    rows.add(1)
    rows.step([1, 1, 2])
    rows.check()


def poison_free_slots(cache):
    """NaN in every slot without a row: what a broken request may leave."""
    keys, values = np.array(cache.keys), np.array(cache.values)
    keys[cache.rows :] = values[cache.rows :] = np.nan
    cache.keys, cache.values = mx.array(keys), mx.array(values)


def check_move_clears(cache_type, make, mover):
    """The last row, shorter or empty, moves into the slot of a row of NaN, beside a long one."""
    rows = make(cache_type(3))
    rows.join(make(lengths=(20, 30)))
    if mover:
        rows.join(make(lengths=(mover,)))
    else:
        rows.add(1)
    rows.cache.keys[0] = rows.cache.values[0] = float("nan")  # row 0 is to be rejected
    rows.keep([2, 1])
    rows.step([1, 1])
    rows.check()


def test_a_stale_nan_in_a_reused_slot_does_not_leak(mirror):
    """A zero weight times NaN is NaN: what a slot held before must be gone."""
    check_join_clears(FullCache, mirror)


@pytest.mark.parametrize("mover", [0, 4])
def test_a_row_that_moves_into_a_slot_of_nan_is_clean(mirror, mover):
    check_move_clears(FullCache, mirror, mover)


class NeverClears(FullCache):
    def _clear(self, slots, column):
        pass


def test_a_cache_that_does_not_clear_is_found(mirror):
    """The twins."""
    with pytest.raises(AssertionError):
        check_join_clears(NeverClears, mirror)
    for mover in (0, 4):
        with pytest.raises(AssertionError):
            check_move_clears(NeverClears, mirror, mover)


# --- join ---------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("first", [(), (0, 0, 0), (4, 2)])
@pytest.mark.parametrize("second", [(0,), (0, 0, 0), (3, 5), (300,)])
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


@pytest.mark.parametrize("slots", [[0], [3], [2, 3], [], [1]])
def test_a_join_into_another_slot_is_refused(mirror, slots):
    rows, other = mirror(lengths=(4, 2)), mirror(lengths=(3,))
    with pytest.raises(ValueError, match="free ones are"):
        rows.cache.join(other.cache, slots)
    rows.check()
    rows.step([1, 1])


@pytest.mark.parametrize("stranger", ["geometry", "values", "type"])
def test_a_join_that_fails_changes_nothing(mirror, stranger):
    """All or nothing: the rows go on, and the next joiner gets the slot."""
    rows = mirror(lengths=(4, 2))
    other = mirror(lengths=(3,)).cache
    if stranger == "geometry":
        other.keys = mx.full((1, 3, 256, 4), 9.0)
    elif stranger == "values":
        other.values = mx.full((1, 2, 256, 9), 9.0)
    with pytest.raises((ValueError, TypeError)):
        rows.cache.join(object() if stranger == "type" else other, [2])
    rows.check()
    rows.step([1, 1])
    rows.join(mirror(lengths=(1,)))
    rows.step([1, 1, 1])
    rows.check()


def test_the_joined_cache_is_only_borrowed(mirror):
    """What joins goes on by itself, and neither sees the other's steps."""
    rows, other = mirror(lengths=(4,)), mirror(lengths=(3, 5))
    rows.join(other)
    rows.step([1, 1, 1])
    other.step([2, 2])
    rows.check()
    other.check()


# --- keep, take -----------------------------------------------------------------------------------------------


def check_keep(cache_type, make, indices):
    """Rows end in the order asked for, whatever it is, and go on."""
    rows = make(cache_type(1))
    rows.join(make(lengths=(12, 3, 7, 1, 0)))
    rows.keep(indices)
    rows.check()
    if indices:
        rows.step([1] * len(indices))
        rows.step([3] * len(indices), [i % 4 for i in range(len(indices))])
    rows.join(make(lengths=(2,)))
    rows.check()


@pytest.mark.parametrize(
    "indices", [[0, 1, 2, 3, 4], [], [4], [4, 3, 2, 1, 0], [1, 2, 3, 4], [0, 4, 2], [2, 0, 1], [3, 1], [1, 0, 4, 3]]
)
def test_keep_takes_any_order(mirror, indices):
    check_keep(FullCache, mirror, indices)


class KeepsInPlace(FullCache):
    """Moves row by row, overwriting rows that have yet to move."""

    def keep(self, indices):
        for new, old in enumerate(indices):
            self.keys[new], self.values[new] = self.keys[old], self.values[old]
        self._set_tokens(tuple(self._tokens[old] for old in indices))


def test_a_keep_that_overwrites_is_found(mirror):
    """The twin."""
    with pytest.raises(AssertionError):
        check_keep(KeepsInPlace, mirror, [2, 0, 1])


def test_take_is_by_reference_when_it_is_all_of_them(mirror):
    """Adopting a lone row is an assignment: the same object, the same arrays."""
    rows = mirror(lengths=(4, 2))
    keys = rows.cache.keys
    assert rows.cache.take([0, 1]) is rows.cache
    assert rows.cache.keys is keys


@pytest.mark.parametrize("indices", [[1], [1, 0], [2, 0], [3], []])
def test_taken_rows_are_a_cache_of_their_own(mirror, indices):
    rows = mirror(lengths=(4, 2, 9, 0))
    part = rows.take(indices)
    part.check()
    if indices:
        part.step([2] * len(indices))
        part.check()
    rows.step([1] * 4)
    rows.check()


# --- extract, restore -------------------------------------------------------------------------------------------


def check_extract_is_owned(cache_type, make, lengths):
    """The bytes of a stored row stay as they are while its batch decodes, grows, gains and loses rows."""
    rows = make(cache_type(1))
    rows.join(make(lengths=lengths))
    states = [rows.cache.extract(row) for row in range(len(lengths))]
    before = [{name: np.array(array) for name, array in state.arrays().items()} for state in states]
    for step in range(20):
        rows.step([1] * rows.cache.rows)
        if step % 5 == 1:
            rows.join(make(lengths=(step * 30,)))
        if step % 5 == 3:
            rows.keep([rows.cache.rows - 1, *range(1, rows.cache.rows - 1)])
    for state, bytes_ in zip(states, before, strict=True):
        for name, array in state.arrays().items():
            assert array.shape == bytes_[name].shape
            assert np.array(array).tobytes() == bytes_[name].tobytes()


@pytest.mark.parametrize("lengths", [(5,), (5, 9)])
def test_an_extracted_row_is_an_owned_copy(mirror, lengths):
    check_extract_is_owned(FullCache, mirror, lengths)


class ExtractsItself(FullCache):
    """Hands out the live buffers."""

    def extract(self, row):
        return RowState(layout="full", tokens=self.tokens[row], arrays={"keys": self.keys, "values": self.values})


def test_an_extract_that_aliases_is_found(mirror):
    """The twin."""
    with pytest.raises(AssertionError):
        check_extract_is_owned(ExtractsItself, mirror, (5,))


def test_an_extracted_row_holds_its_tokens_and_no_more(mirror):
    """No array handed out is longer than the row, and none has a pending graph."""
    rows = mirror(lengths=(5, 9, 0))
    for row, tokens in enumerate((5, 9, 0)):
        state = rows.cache.extract(row)
        assert (state.layout, state.tokens) == ("full", tokens)
        assert state.nbytes == tokens * 2 * (4 + 6) * 4
        assert all(array.shape[2] == tokens for array in state.arrays().values())
        assert all(isinstance(text, str) for text in state.meta().values())


@pytest.mark.parametrize("length", [0, 1, 5, 255, 256, 257])
def test_a_restored_row_goes_on_and_its_state_does_not_change(mirror, length):
    """Restored twice at once, each goes its own way; the state stays what it was."""
    rows = mirror(lengths=(length, 3))
    state = rows.cache.extract(0)
    before = {name: np.array(array) for name, array in state.arrays().items()}
    first, second = (rows.restored(0) for _ in range(2))
    first.step([3])
    second.step([1])
    first.check()
    second.check()
    again = mirror(FullLayout().restore(state))
    again.lists = [list(rows.lists[0])]
    again.check()
    rows.join(again)
    rows.step([1, 1, 1])
    rows.check()
    assert all(np.array_equal(np.array(array), before[name]) for name, array in state.arrays().items())


# --- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1000])
def test_predicted_bytes_are_allocated_bytes(mirror, tokens):
    """`bytes_at` of one row against what a lone row allocates; live bytes are its tokens' own."""
    row = mirror(lengths=(tokens,))
    lone = mirror()
    lone.add(1)
    lone.step([tokens])
    assert lone.cache.nbytes == FullLayout().bytes_at(LAYER, FullOptions(), tokens)
    assert lone.cache.live_bytes == row.cache.live_bytes == tokens * 2 * (4 + 6) * 4


def test_compact_gives_back_slots_and_columns(mirror):
    rows = mirror(lengths=(600, 3, 7, 5))
    most = rows.cache.nbytes
    rows.keep([1, 2])
    assert rows.cache.nbytes == most
    rows.cache.compact()
    assert rows.cache.nbytes == 2 * 256 * 2 * (4 + 6) * 4
    rows.step([1, 1])
    rows.join(mirror(lengths=(300,)))
    rows.step([1, 1, 1])
    rows.check()
    rows.keep([])
    rows.cache.compact()
    assert (rows.cache.nbytes, rows.cache.arrays()) == (0, [])
    rows.join(mirror(lengths=(4,)))
    rows.step([1])
    rows.check()


def test_any_prefix_can_be_reused(mirror):
    rows = mirror(lengths=(9,))
    assert [rows.cache.reusable(n) for n in (0, 4, 9, 12)] == [0, 4, 9, 9]


def test_columns_describe_what_is_read(mirror):
    """Equal for caches that return the same columns, different else."""
    one, other = mirror(lengths=(3, 9)).cache, mirror(lengths=(9, 1)).cache
    assert hash(one.columns([1, 1])) == hash(other.columns([1, 1]))
    assert one.columns([1, 1]) == other.columns([1, 1]) != one.columns([1, 2])
    assert one.rewinds


def test_the_layout_says_what_it_is():
    layout = FullLayout()
    assert (layout.name, layout.kinds, layout.options) == ("full", {"full"}, FullOptions)
    assert layout.refuses(LAYER, FullOptions()) is None
    cache = layout.open(LAYER, FullOptions(), slots=3, window=5)
    assert (cache.rows, cache.tokens, cache.nbytes, cache.live_bytes, cache.arrays()) == (0, (), 0, 0, [])
