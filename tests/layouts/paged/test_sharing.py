"""Blocks with several owners: what they save, what a write into one copies, and that nobody sees another's tokens."""

import gc

import mlx.core as mx
import numpy as np
import pytest

from oarlock.layouts.blocks import Blocks, Share
from oarlock.layouts.pages import Pages
from oarlock.layouts.tables import Plan, Table


def twins(pool, length, stored=False):
    """Two rows on one prefix that was prefilled once: both joined from the cohort, or both restored from a stored row."""
    pool = pool()
    row, group = pool.group(length), pool.group()
    states = row.states(0)
    for _ in range(2):
        group.join(group.restored(states, row.lists[0]) if stored else row)
    row.keep([])
    return group


@pytest.mark.parametrize("stored", [False, True], ids=["joined", "stored"])
def test_two_rows_on_one_prefix_hold_little_more_than_one(pool, stored):
    """1,000 tokens in common, then each its own: less than 1.1 times one row's bytes."""
    one = pool().group(1000)
    two = twins(pool, 1000, stored)
    for _ in range(20):
        two.step([1, 1])
    two.check()
    assert sum(cache.live_bytes for cache in two.caches) < 1.1 * sum(cache.live_bytes for cache in one.caches)
    for cache in two.caches:
        cache.compact()
    assert sum(cache.nbytes for cache in two.caches) < 1.1 * sum(cache.nbytes for cache in one.caches)


@pytest.mark.parametrize("length", [33, 40, 47])
def test_a_write_into_a_shared_block_copies_exactly_that_block(pool, monkeypatch, length):
    """The first of two writers takes a copy; the second owns the original alone by then."""
    copied = []
    copy = Pages.blocks_of
    monkeypatch.setattr(Pages, "blocks_of", lambda self, ids: copied.append(ids.tolist()) or copy(self, ids))
    group = twins(pool, length)
    copied.clear()  # the tail of the stored row
    before, used = [share.ids.tolist() for share in group.tables[0].rows], group.blocks.used
    assert before[0] == before[1]
    group.step([1, 0])
    after = [share.ids.tolist() for share in group.tables[0].rows]
    assert [len(ids) for ids in copied] == [1] * len(group.caches)
    assert group.blocks.used == used + 1
    assert [a == b for a, b in zip(*after, strict=True)] == [True, True, False]
    group.step([0, 1])
    assert [len(ids) for ids in copied] == [1] * len(group.caches)
    group.check()
    group.check_blocks()


@pytest.mark.parametrize("length", [32, 48])
def test_a_full_block_is_never_copied(pool, monkeypatch, length):
    """Rows that part at the edge of a block share all of it for good."""
    monkeypatch.setattr(Pages, "blocks_of", None)
    group = twins(pool, length)
    group.step([1, 1])
    group.step([20, 3])
    group.check()


def test_a_row_writes_on_where_it_is_after_it_was_stored(pool):
    """Storing takes the full blocks' share and a copy of the rest, so the row stays side by side."""
    group = pool().group(40, 21)
    before = [share.ids.tolist() for share in group.tables[0].rows]
    states = [group.states(row) for row in range(2)]
    group.step([1, 1])
    assert [share.ids.tolist() for share in group.tables[0].rows] == before
    assert [state.share.ids.tolist() for state, _ in states] == [before[0][:2], before[1][:1]]
    group.check()


def check_positions(pool, size):
    """Prefixes of 3, 4, 5 and 8 tokens, met by prompts one longer, beside a decoding row and a cold one."""
    pool = pool(size)
    stored = {}
    for length in (3, 4, 5, 8):
        row = pool.group(length)
        stored[length] = (row.states(0), row.lists[0])
    group = pool.group(13)
    for length, (states, tokens) in stored.items():
        group.join(group.restored(states, tokens))
        assert group.caches[0].tokens[-1] == length
    group.add(1)
    group.step([1, 1, 1, 1, 1, 6])  # each adopted row goes on at its own position: `step` checks offsets and reads
    group.step([1] * 6)
    group.check()
    for states, tokens in stored.values():
        assert group.restored(states, tokens).check() is None


@pytest.mark.fault("H-01")
@pytest.mark.parametrize("size", [4, 16])
def test_adopted_blocks_are_continued_not_recomputed(pool, size):
    check_positions(pool, size)


@pytest.mark.fault("H-01", twin=True)
def test_rows_that_begin_again_on_adopted_blocks_are_found(pool, monkeypatch):
    """The twin: a restored row forgets how far it is."""
    monkeypatch.setattr(
        Table, "joined", lambda self, other: Table((*self.rows, *other.rows), (*self.tokens, *[0] * len(other.rows)))
    )
    with pytest.raises((AssertionError, ValueError)):
        check_positions(pool, 4)


@pytest.mark.fault("H-01", twin=True)
def test_reads_without_the_table_are_found(pool, monkeypatch):
    """The twin: blocks are read in the order of the pool."""
    monkeypatch.setattr(Share, "first", property(lambda self: 0))
    with pytest.raises(AssertionError):
        check_positions(pool, 4)


def check_fork(pool, evict):
    """Two rows share a partly filled last block, both append, one is dropped and its blocks used by others."""
    group = twins(pool, 22)
    first, second = group.tables[0].rows
    assert first is not second
    assert first._held is not second._held
    del first, second  # owners too
    group.step([1, 1])
    group.step([3, 5])
    group.keep([evict])
    group.join(group.pool.group(40, 9))
    group.step([1, 1, 1])
    group.check()
    group.check_blocks()


@pytest.mark.fault("H-02")
@pytest.mark.parametrize("evict", [0, 1])
def test_rows_that_shared_a_block_part_for_good(pool, evict):
    check_fork(pool, evict)


@pytest.mark.fault("H-02", twin=True)
def test_a_fork_that_shares_its_owner_is_found(pool, monkeypatch):
    """The twin: another row gets the same counted owner, so that one block has two writers."""
    monkeypatch.setattr(Share, "again", lambda self, grows=True: self)
    with pytest.raises(AssertionError):
        check_fork(pool, 0)


@pytest.mark.fault("H-02", twin=True)
def test_a_write_that_does_not_copy_is_found(pool, monkeypatch):
    """The twin: writes go into blocks that others own."""
    grown = Plan._grown

    def careless(self):
        counts, self.blocks.counts = self.blocks.counts, np.minimum(self.blocks.counts, 1)
        self.blocks.counts = counts if not any(counts > 1) else self.blocks.counts
        return grown(self)

    monkeypatch.setattr(Plan, "_grown", careless)
    with pytest.raises(AssertionError):
        check_fork(pool, 0)


def check_short_rows(pool, reuse):
    """200 short rows through 8 blocks: some share, some are aborted, cancelled in a window, or never written."""
    group, stored = pool(16).group(), None
    for turn in range(200):
        if reuse and stored and turn % 3 == 0:
            group.join(group.restored(*stored))
        else:
            group.add(1)
        rows = len(group.lists)
        if turn % 5:
            group.step([3 + turn % 20] + [1] * (rows - 1) if rows == 1 else [1] * (rows - 1) + [3 + turn % 20])
        if turn % 7 == 0:
            group.forward([group.pool.tokens(2)] * rows, until=turn % 3)
            group.commit([0] * rows)
        if reuse and turn % 4 == 0:
            stored = (group.states(rows - 1), group.lists[rows - 1])
        if rows > 1:
            group.keep([rows - 1])
        assert group.blocks.capacity <= 8 + 2, f"turn {turn}"
    group.keep([])
    stored = None
    gc.collect()
    assert group.blocks.used == 0
    group.check_blocks()


@pytest.mark.fault("H-05")
@pytest.mark.parametrize("reuse", [False, True])
def test_short_rows_leave_no_block_behind(pool, reuse):
    check_short_rows(pool, reuse)


@pytest.mark.fault("H-05", twin=True)
def test_owners_that_do_not_give_back_are_found(pool, monkeypatch):
    """The twin: the table of a finished row is dropped, its counts are not."""
    monkeypatch.setattr(Blocks, "settle", lambda self: self.returned.clear())
    with pytest.raises(AssertionError):
        check_short_rows(pool, False)


# --- what a block held before ---------------------------------------------------------------------------------


def poison(group):
    """NaN in every block without an owner: what a broken request may leave."""
    free = np.flatnonzero(group.blocks.counts == 0)
    size = group.blocks.size
    for cache in group.caches:
        for name in ("keys", "values"):
            plane = np.array(getattr(cache, name))
            plane.reshape(1, plane.shape[1], -1, size, plane.shape[3])[:, :, free] = np.nan
            setattr(cache, name, mx.array(plane))


def check_stale(pool):
    """Rows of other lengths take, grow into and copy blocks in which a row of NaN stood; windows are padded too."""
    group = pool.group(40, 20, 100)
    group.keep([0, 1])
    assert group.blocks.used < group.blocks.capacity
    poison(group)
    group.join(pool.group(5))
    group.join(group.take([1]))
    group.step([1, 1, 1, 1])
    group.step([0, 3, 14, 2], [0, 1, 14, 0])
    poison(group)
    for _ in range(14):
        group.step([1, 1, 1, 1])
    group.check()


@pytest.mark.fault("B-05")
def test_a_stale_nan_in_a_reused_block_does_not_leak(pool):
    """A zero weight times NaN is NaN: what a block held before must not be read, or be gone."""
    check_stale(pool())


@pytest.mark.fault("B-05", twin=True)
@pytest.mark.parametrize("attends", [False], indirect=True)
def test_a_block_that_is_not_cleared_is_found(pool, monkeypatch, attends):
    """The twin, where rows are gathered: row by row nothing behind a row is read at all."""
    monkeypatch.setattr(Plan, "stale", lambda self: None)
    with pytest.raises(AssertionError):
        check_stale(pool())
