"""Kind D for every storage of sliding windows: plain and packed rings, with sinks and without, and rings packed late."""

import attrs
import pytest

from oarlock.core.testing.layouts.cases import Case, Subject
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RingCache

HANDLES = {"attendable": True}
SINKS = {"attendable": True, "keep": 3}
LATE = Subject("delayed", {"start": 18})
WINDOWS = {
    "plain": Case("plain", "rotating", HANDLES, Subject("rotating")),
    "plain, sinks": Case("plain, sinks", "rotating", SINKS, Subject("rotating")),
    "packed": Case("packed", "rotating", HANDLES, Subject("quantized")),
    "packed, as arrays": Case("packed, as arrays", "rotating", {}, Subject("quantized")),
    "packed, sinks": Case("packed, sinks", "rotating", SINKS, Subject("quantized")),
    "late": Case("late", "rotating", HANDLES, LATE),
    "late, sinks": Case("late, sinks", "rotating", SINKS, LATE),
}
SOME = ["plain", "packed", "late"]
WINDOW = WINDOWS["plain"].window
every_window = pytest.mark.parametrize("case", WINDOWS.values(), ids=WINDOWS)
some_windows = pytest.mark.parametrize("case", [WINDOWS[name] for name in SOME], ids=SOME)


def check_room(rows):
    """No layer holds more than a window for each row, and a row taken out has no more than it had tokens."""
    for bound, cache in zip(rows.layers.bound, rows.caches, strict=True):
        cache.compact()
        most = bound.layout.bytes_at(bound.info, bound.options, 10_000)
        assert cache.live_bytes <= rows.count * most
        for row, tokens in enumerate(rows.lengths):
            held = {array.shape[2] for array in cache.extract(row).arrays().values()}
            assert max(held) <= min(tokens, WINDOW), f"{held} columns of a row of {tokens}"


# --- joins -------------------------------------------------------------------------------------------------------


def check_joins(case, every):
    """Rows before and after their first and second wrap join while others decode; some leave on the way."""
    rows, waiting = case.layers().open(), [3, 8, 9, 20, 33]
    for step in range(25):
        if waiting and step % every == 0:
            rows.enter(waiting.pop(0))
        rows.step([1] * rows.count)
        if step == 12:
            rows.keep([rows.count - 1, *range(1, rows.count - 1)])
    rows.check()
    check_room(rows)


@pytest.mark.fault("D-01")
@pytest.mark.parametrize("every", [1, 7])
@every_window
def test_wrapped_rings_join_and_leave(case, every):
    check_joins(case, every)


@pytest.mark.fault("D-01", twin=True)
@some_windows
def test_twin_a_ring_merged_by_all_tokens_is_noticed(planted, monkeypatch, case):
    join = RingCache.join

    def by_total(self, other, slots):
        join(self, other, slots)
        phases = [0 if start else phase for start, phase in zip(self.tokens, self.ring.phases, strict=True)]
        self.ring = attrs.evolve(self.ring, phases=tuple(phases))

    monkeypatch.setattr(RingCache, "join", by_total)
    with planted():
        check_joins(case, 1)


# --- padding -----------------------------------------------------------------------------------------------------


def check_padding(case):
    """A short row beside a long one, padded to its width in narrow forwards and in wide ones."""
    rows = case.layers().open()
    rows.add(2)
    for widths in ([4, 4], [1, 4], *[[0, 4]] * 8, [1, 20], [1, 1]):
        rows.step(widths)
    rows.check()


@pytest.mark.fault("D-02")
@every_window
def test_padding_pushes_nothing_out(case):
    """Seven tokens of a window of eight: the last forward sees them all, which `step` compares."""
    check_padding(case)


@pytest.mark.fault("D-02", twin=True)
@some_windows
def test_twin_padding_that_is_stored_is_noticed(planted, monkeypatch, case):
    """Every row of a block keeps the widest one's columns."""
    after_block = Ring.after_block
    monkeypatch.setattr(
        Ring, "after_block", lambda self, starts, kept: after_block(self, starts, [max(kept)] * len(kept))
    )
    with planted():
        check_padding(case)


# --- cuts --------------------------------------------------------------------------------------------------------


def check_cuts(case, held):
    """A prefix is whole only while nothing was overwritten; asking changes nothing, and the row goes on."""
    rows = case.layers().open()
    rows.enter(held)
    for cache in rows.caches:
        for drop in (1, 3, WINDOW, WINDOW + 1):
            if drop < held:
                assert cache.reusable(held - drop) == (held - drop if held < WINDOW else 0)
        assert cache.reusable(held) == cache.reusable(held + 1) == held
    rows.check()
    rows.step([3])


@pytest.mark.fault("D-03")
@every_window
def test_a_wrapped_ring_is_not_cut(case):
    """Not full, exactly full, wrapped once and twice; then packed, where it is packed late."""
    for held in (5, 7, 8, 9, 16, 17, 25):
        check_cuts(case, held)


@pytest.mark.fault("D-03", twin=True)
@some_windows
def test_twin_a_ring_whose_counters_may_be_moved_is_noticed(planted, monkeypatch, case):
    monkeypatch.setattr(RingCache, "reusable", lambda self, tokens: min(tokens, *self.tokens))
    with planted():
        check_cuts(case, 17)


# --- out and in --------------------------------------------------------------------------------------------------


def check_round_trip(case, more, company):
    """Past the window, taken out and put back, alone or beside others, with ``more`` tokens in one forward."""
    rows = case.layers().open()
    rows.enter(3, 12, 30)
    for _ in range(5):
        rows.step([1] * 3)
    for row in range(3):
        back = rows.restored(rows.states(row), list(rows.pieces[row]))
        if company:
            others = rows.layers.open()
            others.enter(6, 40)
            others.join(back)
            back = others
        for width in (more, 1, 1):
            back.step([width] * back.count)
        back.check()
    rows.step([1] * 3)


@pytest.mark.fault("D-08")
@pytest.mark.parametrize(("more", "company"), [(1, False), (2, True), (9, True)])
@every_window
def test_a_row_that_was_taken_out_goes_on(case, more, company):
    check_round_trip(case, more, company)


@pytest.mark.fault("D-08", twin=True)
@some_windows
def test_twin_a_ring_restored_by_its_offset_is_noticed(planted, monkeypatch, case):
    adopt = RingCache.adopt

    def by_offset(self, arrays, tokens):
        adopt(self, arrays, tokens)
        self.ring = attrs.evolve(self.ring, phases=(max(self.ring.keep, tokens - self.ring.window),))

    monkeypatch.setattr(RingCache, "adopt", by_offset)
    with planted():
        check_round_trip(case, 1, False)


# --- how much they hold ------------------------------------------------------------------------------------------


def check_every_path(case):
    """A hundred tokens and more: in steps, in blocks, joined, taken out and put back, moved."""
    rows = case.layers().open()
    rows.enter(90, 3)
    rows.enter(40, pieces=3)
    rows.join(rows.restored(rows.states(0), list(rows.pieces[0])))
    rows.step([30] * 4)
    for _ in range(12):
        rows.step([1] * 4)
    rows.keep([3, 1])
    rows.join(rows.take([1]))
    rows.step([1] * 3)
    check_room(rows)


@pytest.mark.fault("D-09")
@every_window
def test_no_path_holds_more_than_the_window(case):
    check_every_path(case)


@pytest.mark.fault("D-09", twin=True)
@some_windows
def test_twin_a_ring_that_grows_is_noticed(planted, monkeypatch, case):
    monkeypatch.setattr(
        RingCache, "row_planes", lambda self, row: {n: p[row : row + 1] for n, p in self.planes.items()}
    )
    monkeypatch.setattr(RingCache, "_room", lambda self, columns: columns + 1)
    with planted():
        check_every_path(case)
