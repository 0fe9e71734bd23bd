"""What models see of `full` beyond the kit: masks of narrower windows, and what a forward may be refused or keep."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import Positions


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
