"""Rows of `rotating`: they join at any phase, leave, move, are copied out and come back, and never see another's past."""

import attrs
import mlx.core as mx
import numpy as np
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


# --- join ----------------------------------------------------------------------------------------------------------


def check_joins(make):
    """Rows before and after their first and second wrap, joined every 1, 3 and 7 steps, some leaving on the way."""
    for every in (1, 3, 7):
        rows, waiting = make(LENGTHS[:1]), list(LENGTHS[1:])
        for step in range(25):
            if waiting and step % every == 0:
                rows.join(make((waiting.pop(0),), decoded=step % 5))
            rows.step([1] * rows.cache.rows)
            if step == 12:
                rows.keep([rows.cache.rows - 1, *range(1, rows.cache.rows - 1)])
        rows.check()


@pytest.mark.fault("D-01")
def test_wrapped_rings_join_and_leave(rings):
    """Also resident: never more than the window."""
    check_joins(rings)
    most = rings(LENGTHS, decoded=25).cache
    assert most.keys.shape[2] == WINDOW
    assert most.live_bytes == 5 * WINDOW * 2 * (4 + 6) * 4


class MergesByTotal(RotatingCache):
    """Takes the newest columns by all tokens ever seen instead of those that are there."""

    def join(self, other, slots):
        super().join(other, slots)
        phases = [0 if start else phase for start, phase in zip(self.tokens, self.ring.phases, strict=True)]
        self.ring = attrs.evolve(self.ring, phases=tuple(phases))


@pytest.mark.fault("D-01", twin=True)
def test_a_ring_merged_by_total_is_found(rings):
    with pytest.raises(AssertionError):
        check_joins(lambda *args, **options: rings(*args, cache_type=MergesByTotal, **options))


# --- keep, take, extract, restore --------------------------------------------------------------------------------


def check_round_trip(make, decoded, more):
    """Taken out at the end of a run and put back, with ``more`` tokens in one forward, alone and beside others."""
    rows = make(LENGTHS, decoded=decoded)
    back = [rows.restored(row) for row in range(len(LENGTHS))]
    states = [rows.cache.extract(row) for row in range(len(LENGTHS))]
    before = [{name: np.array(array) for name, array in state.arrays().items()} for state in states]
    together = make((6, 40), decoded=2)
    for each in back:
        assert each.cache.tokens == (len(each.lists[0]),)
        together.join(each)
        for width in (more, 1, 1):
            each.step([width])
        each.check()
    for width in (more, 1, 1):
        together.step([width] * 7)
    together.check()
    rows.step([1] * 5)
    for state, arrays in zip(states, before, strict=True):
        assert all(np.array_equal(np.array(array), arrays[name]) for name, array in state.arrays().items())


@pytest.mark.fault("D-08")
@pytest.mark.parametrize("more", [1, 2, 9])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_row_that_was_taken_out_goes_on(rings, keep, more):
    for decoded in (0, 5, 20):
        check_round_trip(lambda *args, **options: rings(*args, keep=keep, **options), decoded, more)


class GrowsFromOffset(RotatingCache):
    """Believes that a restored row holds its last window from column 0 on, whatever is there."""

    def adopt(self, arrays, tokens):
        super().adopt(arrays, tokens)
        self.ring = attrs.evolve(self.ring, phases=(max(0, tokens - self.ring.window),))


@pytest.mark.fault("D-08", twin=True)
def test_a_ring_restored_by_its_offset_is_found(rings, monkeypatch):
    monkeypatch.setattr("oarlock.layouts.rotating.RotatingCache", GrowsFromOffset)
    with pytest.raises(AssertionError):
        check_round_trip(rings, 20, 1)


def test_a_state_is_what_a_query_to_come_sees(rings):
    """Less than a window, in temporal order, owned and dispatched; empty where nothing is."""
    rows = rings((*LENGTHS, 0))
    for row, tokens in enumerate((*LENGTHS, 0)):
        state = rows.cache.extract(row)
        assert (state.layout, state.tokens) == ("rotating", tokens)
        assert state.meta() == {"window": "8", "keep": "0"}
        assert state.nbytes == min(tokens, WINDOW - 1) * 2 * (4 + 6) * 4


# --- what can be reused -------------------------------------------------------------------------------------------


def check_reusable(make, held, drop, keep):
    """Where the ring says that a prefix is reusable, its window is whole; where it wraps, nothing but all is, or 0."""
    rows = make((held,), keep=keep)
    before = {name: np.array(plane) for name, plane in rows.cache.planes.items()}
    tokens = held - drop
    answer = rows.cache.reusable(tokens)
    assert answer == (tokens if held < WINDOW else 0)
    assert rows.cache.tokens == (held,)
    assert all(np.array_equal(np.array(plane), before[name]) for name, plane in rows.cache.planes.items())
    assert rows.cache.reusable(held) == rows.cache.reusable(held + 1) == held
    rows.step([1])


@pytest.mark.fault("D-03")
@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize(
    ("held", "drop"),
    [(held, drop) for held in (5, 7, 8, 9, 16, 17, 25) for drop in (1, 3, WINDOW, WINDOW + 1) if drop < held],
)
def test_a_wrapped_ring_is_not_cut(rings, held, drop, keep):
    """Not full, exactly full, wrapped once and twice: a shorter prefix is refused, and nothing is changed."""
    check_reusable(rings, held, drop, keep)


def test_what_is_left_after_a_rejection_is_not_reused(rings):
    """Seven tokens of eight columns and slack for two: a rejected window turned the ring, its rejection did not."""
    rows = rings((6,), slack=2)
    rows.step([3], [1])
    assert [rows.cache.reusable(n) for n in (3, 6, 7)] == [3, 6, 7]
    rows.step([3], [1])
    assert [rows.cache.reusable(n) for n in (3, 7, 8)] == [0, 0, 8]


class MovesCounters(RotatingCache):
    """Says that any prefix will do, as full attention may."""

    def reusable(self, tokens):
        return min(tokens, *self.tokens)


@pytest.mark.fault("D-03", twin=True)
def test_a_ring_that_lets_itself_be_cut_is_found(rings):
    with pytest.raises(AssertionError):
        check_reusable(lambda *args, **options: rings(*args, cache_type=MovesCounters, **options), 20, 3, 0)


# --- sizes and descriptions ---------------------------------------------------------------------------------------


def check_residency(make):
    """A hundred tokens and more by every path: alone, batched, in blocks, joined, taken out and put back, moved."""
    rows = make((100, 3), decoded=2)
    rows.join(make((40,), decoded=60))
    rows.join(rows.restored(0))
    rows.step([30] * 4)
    for _ in range(100):
        rows.step([1] * 4)
    rows.keep([3, 1])
    rows.join(rows.take([1]))
    for each in (rows, rows.take([2]), rows.restored(1)):
        each.step([1] * each.cache.rows)
        held = each.cache.keys.shape[2]
        assert held <= WINDOW, f"{held} columns"


@pytest.mark.fault("D-09")
@pytest.mark.parametrize("keep", [0, 2])
def test_no_path_holds_more_than_the_window(rings, keep):
    """The one largest cache size that there is: a model's window, sinks included."""
    check_residency(lambda *args, **options: rings(*args, keep=keep, **options))


class Unbounded(RotatingCache):
    """Lays blocks out as they are, and grows to hold them."""

    def _room(self, columns):
        return columns + 1


@pytest.mark.fault("D-09", twin=True)
def test_a_ring_that_grows_is_found(rings):
    with pytest.raises(AssertionError):
        check_residency(lambda *args, **options: rings(*args, cache_type=Unbounded, **options))


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
