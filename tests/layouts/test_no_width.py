"""Keys beside values without width: an indexer keeps such, and MLX divides by zero where a scatter's rows have none."""

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts.chunked import ChunkedLayout
from oarlock.layouts.full import FullLayout
from oarlock.layouts.paged import PagedLayout, PagedOptions
from oarlock.layouts.rotating import RotatingLayout

SIZE = 4
LAYER = {"index": 0, "path": "0", "kv_heads": 1, "key_dim": SIZE, "value_dim": 0, "dtype": mx.float32}
CASES = {
    "full": (FullLayout(), None, LayerInfo(kind="full", **LAYER)),
    "rotating": (RotatingLayout(), None, LayerInfo(kind="rotating", window=8, **LAYER)),
    "chunked": (ChunkedLayout(), None, LayerInfo(kind="chunked", chunk=64, **LAYER)),
    "paged": (PagedLayout(), PagedOptions(block_size=16), LayerInfo(kind="full", **LAYER)),
    "paged, row by row": (PagedLayout(), PagedOptions(block_size=16), LayerInfo(kind="full", attendable=True, **LAYER)),
}


def step(cache, widths):
    """Append to each row: token t of row i is 100 i + t, as they stand now."""
    starts, width = Positions(cache.tokens), max(widths)
    cache.begin(widths, starts)
    cache.make_mask(width)
    numbers = mx.array(starts)[:, None] + mx.arange(width) + 100.0 * mx.arange(cache.rows)[:, None]  # (B, N)
    keys = mx.broadcast_to(numbers[:, None, :, None], (cache.rows, 1, width, SIZE))
    fetched = cache.update_and_fetch(keys, mx.zeros((cache.rows, 1, width, 0)))
    assert fetched[1].shape == (*fetched[0].shape[:3], 0)
    cache.commit(widths)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_any_length_write_join_and_come_back(name):
    """Ragged windows, a joiner, a leave, a stored row: nothing ends the process, and the keys are what was given."""
    layout, options, layer = CASES[name]
    layout.refuses(layer, options)
    cache = layout.open(layer, options, slots=2, window=4)
    cache.add(2)
    step(cache, [3, 1])
    step(cache, [1, 1])
    lone = layout.open(layer, options, slots=1, window=4)
    lone.add(1)
    step(lone, [2])
    cache.join(lone, [2])
    cache.keep([1, 2])
    step(cache, [2, 1])
    state = cache.extract(0)
    assert state.arrays()["keys"][0, 0, :, 0].tolist() == [100.0, 101.0, 2.0, 3.0]
    again = layout.restore(state)
    step(again, [1])
    assert again.tokens == (5,)
    mx.eval(cache.arrays() + again.arrays())
