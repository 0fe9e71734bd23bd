"""`full` beyond the kit: masks of narrower windows, what is held of a row, exactly, and what is refused in which words."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts.full import FullLayout, FullOptions

LAYER = LayerInfo(index=0, path="0", kind="full", kv_heads=2, key_dim=4, value_dim=6, dtype=mx.float32)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("lengths", "widths"), [((3, 7), (1, 1)), ((5, 0, 2), (4, 4, 4)), ((0, 9, 4), (0, 2, 5))])
def test_ragged_masks_show_the_newest_of_each_rows_own_past(mirror, lengths, widths, window):
    """Every query sees ``window`` tokens up to itself and nothing else; columns reach as far as the longest row."""
    rows = mirror(lengths=lengths)
    rows.cache.begin(widths, Positions(rows.cache.tokens))
    mask = np.array(rows.cache.make_mask(max(widths), window_size=window))
    assert mask.shape == (len(lengths), 1, max(widths), max(lengths) + max(widths))
    for row, (held, width) in enumerate(zip(lengths, widths, strict=True)):
        for place in range(width):
            last = held + place
            first = 0 if window is None else max(0, last - window + 1)
            assert np.flatnonzero(mask[row, 0, place]).tolist() == list(range(first, last + 1))


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


def test_a_join_into_another_slot_says_which_are_free(mirror):
    rows = mirror(lengths=(4, 2))
    with pytest.raises(ValueError, match="free ones are"):
        rows.cache.join(mirror(lengths=(3,)).cache, [3])


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
