"""The pool by itself: places, owners, renumbering, and that all layers of a model decide once."""

import itertools
import random

import numpy as np
import pytest

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.blocks import Blocks, Share
from oarlock.layouts.tables import Plan, Table


def ids(*numbers):
    return np.array(numbers, np.int32)


def test_owners_count_while_they_live():
    blocks = Blocks(16)
    blocks.arrange(4)
    first = Share(blocks, ids(0, 1))
    second = first.again()
    assert (blocks.counts.tolist(), blocks.used) == ([2, 2, 0, 0], 2)
    del first
    assert (blocks.used, blocks.counts.tolist()) == (2, [1, 1, 0, 0])
    del second
    assert (blocks.used, blocks.counts.tolist()) == (0, [0, 0, 0, 0])


def test_blocks_are_placed_behind_their_row_else_in_the_widest_gap():
    blocks = Blocks(16)
    blocks.arrange(16)
    row, other = Share(blocks, ids(2, 3)), Share(blocks, ids(8))
    assert blocks.allocate(row.end, 2).tolist() == [4, 5]
    assert blocks.allocate(-1, 2).tolist() == [11, 12]  # half of the slack of 9 to 15 stays with block 8
    assert blocks.allocate(row.end, 5).tolist() == [4, 5, 6, 7, 12]
    assert blocks.counts.sum() == 3  # a place is taken by its owner, not by asking
    assert (row.first, other.first, Share(blocks, ids(4, 6)).first, Share(blocks, ids()).first) == (2, 8, None, None)


@pytest.mark.parametrize("seed", range(20))
def test_renumbering_keeps_every_owner_and_lays_rows_side_by_side(seed):
    """Chains of arrangements, owners that look at every one of them or at the last only, and some that die between."""
    draw = random.Random(seed)
    blocks = Blocks(16)
    blocks.arrange(40)
    content = {}  # what a block holds, by its number now
    shares = []
    for number in range(6):
        free = np.flatnonzero(blocks.counts == 0).tolist()
        own = ids(*draw.sample(free, draw.randint(0, 4)))
        shares.append((Share(blocks, own), [f"{number}.{i}" for i in range(own.size)]))
        content.update(zip(own.tolist(), shares[-1][1], strict=True))
    shares.append((shares[0][0].again(), shares[0][1]))
    for _ in range(4):
        before = blocks.arrangement
        rows = [share for share, _ in draw.sample(shares, draw.randint(0, len(shares)))]
        wants = [draw.randint(0, 2) for _ in rows]
        blocks.arrange(blocks.used + sum(wants) + draw.randint(0, 9), rows, wants)
        content = {int(before.target[old]): text for old, text in content.items() if before.target[old] >= 0}
        if rows and rows[0].ids.size:  # it lies first, with its room behind it
            assert rows[0].first == 0
            assert not blocks.counts[rows[0].end : rows[0].end + wants[0]].any()
        if draw.random() < 0.5 and len(shares) > 2:
            del shares[draw.randrange(1, len(shares))]
        del rows  # owners too
    for share, texts in shares:
        assert [content[block] for block in share.ids.tolist()] == texts
    assert blocks.used == len({block for share, _ in shares for block in share.ids.tolist()})


def test_rows_of_one_length_come_to_lie_at_equal_distances():
    """Then all of them are one view."""
    blocks = Blocks(16)
    blocks.arrange(11)
    table = Table(tuple(Share(blocks, ids(*places)) for places in ((0, 5, 9), (1, 10, 3), (8, 2, 7))), (48, 48, 48))
    plan = Plan(blocks, table, [1, 1, 1], Positions((48, 48, 48)))
    first, step = plan.spacing()
    assert (first, step >= 4) == (0, True)
    assert [share.ids.tolist() for share in plan.rows] == [list(range(i * step, i * step + 4)) for i in range(3)]
    ragged = Plan(blocks, table, [1, 1, 0], Positions((48, 48, 48)))
    assert ragged.spacing() is None


def test_rows_that_lie_apart_are_put_together_once_reading_them_has_cost_more():
    blocks = Blocks(16)
    blocks.arrange(64)
    apart = tuple(Share(blocks, ids(*range(i, 32, 2))) for i in (0, 1))
    table = Table(apart, (250, 250))
    blocks._apart = 0
    turn = 0
    while any(share.first is None for share in table.rows):
        turn += 1
        plan = Plan(blocks, table, [1, 1], Positions((250, 250)))
        table = plan.committed([0, 0])
        table = Table(table.rows, (250, 250))
        blocks.reserve(table.rows, [0, 0])
    assert 1 < turn < 8


def test_every_layer_gets_what_the_first_one_made_once():
    blocks = Blocks(16)
    layers = [Blocks(16) for _ in range(3)]  # anything
    numbers = [blocks.enlist(layer) for layer in layers]
    made = itertools.count()

    def make():
        return Table((), (next(made),))

    first = [blocks.together(number, ("a", 1), make) for number in numbers]
    assert first[0] is first[1] is first[2]
    again = [blocks.together(number, ("a", 1), make) for number in numbers]
    assert again[0] is again[1] is not first[0]  # asked twice: done twice
    late = blocks.together(numbers[0], ("b",), make)
    assert blocks.together(numbers[1], ("c",), make) is not late
    assert blocks.together(numbers[2], ("b",), make) is late  # not at once, but before too much else was done


def test_a_result_that_every_layer_has_is_not_kept():
    """Its rows own blocks."""
    blocks = Blocks(16)
    blocks.arrange(2)
    layers = [Blocks(16), Blocks(16)]  # anything
    numbers = [blocks.enlist(layer) for layer in layers]
    for number in numbers:
        blocks.together(number, ("join",), lambda: Table((Share(blocks, ids(0)),), (3,)))
    assert blocks.used == 0


def test_layers_that_do_one_thing_after_another_still_share_their_blocks(pool):
    """Restoring does all of it for one layer, then for the next."""
    pool = pool()
    group = pool.group(40, 3)
    states, tokens = group.states(0), list(group.lists[0])
    for cache, state in zip(group.caches, states, strict=True):
        cache.join(pool.layout.restore(state), [2])
        cache.keep([2, 1])
    group.lists = [tokens, group.lists[1]]
    del states, state
    group.check_blocks()
    group.step([1, 1])
    group.check()
