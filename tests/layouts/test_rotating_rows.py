"""Rows of `rotating` beyond the kit: what is held of one, exactly, what can be reused of it, and which columns it reads."""

import attrs
import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import LayerInfo
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache, RotatingLayout, RotatingOptions

WINDOW = 8
LENGTHS = (3, 8, 9, 20, 33)
LAYER = LayerInfo(
    index=0, path="0", kind="rotating", kv_heads=2, key_dim=4, value_dim=6, dtype=mx.float32, window=WINDOW
)


@pytest.fixture
def rings(mirror, ring_kind):
    """Make rows of ``lengths``; ``decoded`` tokens each are fed one by one afterwards, so that rings turn."""

    def make(lengths=(), *, decoded=0, slack=0, keep=0, cache_type=RotatingCache):
        kind = ring_kind(WINDOW, keep, slack, cache_type)
        made = mirror(kind=kind)
        for length in lengths:
            made.join(mirror(lengths=(length,), kind=ring_kind(WINDOW, keep)))
        for _ in range(decoded):
            made.step([1] * len(lengths))
        return made

    return make


def test_a_state_is_what_a_query_to_come_sees(rings):
    """Less than a window, in temporal order, owned and dispatched; empty where nothing is."""
    rows = rings((*LENGTHS, 0))
    assert rows.cache.live_bytes == sum(min(tokens, WINDOW) for tokens in LENGTHS) * 2 * (4 + 6) * 4
    for row, tokens in enumerate((*LENGTHS, 0)):
        state = rows.cache.extract(row)
        assert (state.layout, state.tokens) == ("rotating", tokens)
        assert state.meta() == {"window": "8", "keep": "0"}
        assert state.nbytes == min(tokens, WINDOW - 1) * 2 * (4 + 6) * 4


def test_what_is_left_after_a_rejection_is_not_reused(rings):
    """Seven tokens of eight columns and slack for two: a rejected window turned the ring, its rejection did not."""
    rows = rings((6,), slack=2)
    rows.step([3], [1])
    assert [rows.cache.reusable(n) for n in (3, 6, 7)] == [3, 6, 7]
    rows.step([3], [1])
    assert [rows.cache.reusable(n) for n in (3, 7, 8)] == [0, 0, 8]


def test_columns_tell_phases_apart(rings):
    """Rows of the same lengths that read other columns are another description; the same history is the same one."""
    one, same = rings((20,), decoded=3).cache, rings((20,), decoded=3).cache
    other, late = rings((23,)).cache, rings((21,), decoded=3).cache
    assert one.tokens == other.tokens
    assert one.columns([1]) == same.columns([1])
    assert hash(one.columns([1])) == hash(same.columns([1]))
    assert len({one.columns([1]), other.columns([1]), late.columns([1]), one.columns([2])}) == 4


def test_rings_without_room_beside_their_sinks_are_refused():
    layout = RotatingLayout()
    assert (layout.name, layout.kinds, layout.options) == ("rotating", {"rotating"}, RotatingOptions)
    assert layout.refuses(LAYER, RotatingOptions()) is None
    assert "8 with 8 sinks" in layout.refuses(attrs.evolve(LAYER, keep=8), RotatingOptions())
    cache = layout.open(LAYER, RotatingOptions(), slots=3, window=5)
    assert cache.ring == Ring(window=8, slack=4)
    assert cache.rewinds
