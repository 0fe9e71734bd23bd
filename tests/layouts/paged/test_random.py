"""Random operations on groups that share one pool, beside plain lists of tokens, so that orders nobody thought of are tried too."""

import random

import mlx.core as mx
import numpy as np
import pytest

from oarlock.layouts.blocks import Blocks, Share
from oarlock.layouts.pages import Pages
from oarlock.layouts.tables import Plan, Table

SEQUENCES, OPERATIONS = 24, 14


def step(draw, pool, group, count):
    widths = [1] * count if draw.random() < 0.5 else [draw.randint(0, 6) for _ in range(count)]
    widths[draw.randrange(count)] = max(1, *widths)
    group.step(widths, widths if draw.random() < 0.5 else [draw.randint(0, width) for width in widths])


def take(draw, pool, group, count):
    part = group.take(draw.sample(range(count), draw.randint(1, count)))
    if part.caches[0] is not group.caches[0]:
        part.step([1] * len(part.lists))
        part.check()


def abort(draw, pool, group, count):
    group.forward([pool.tokens(2) for _ in range(count)], until=draw.randint(0, 2))
    group.commit([0] * count)


def compact(draw, pool, group, count):
    for cache in group.caches:
        cache.compact()


def keep(draw, pool, group, count):
    group.keep(draw.sample(range(count), draw.randint(0, count)))


def add(draw, pool, group, count):
    group.add(draw.randint(1, 2))


def operate(draw, pool, groups, stored):
    """Do one operation to both sides; every one leaves rows that must still be right."""
    group = draw.choice(groups)
    count = len(group.lists)
    kind = draw.choice([step] * 5 + [add, keep, take, abort, compact] + ["join", "join", "move", "store", "restore"])
    if kind == "join" or not count:
        group.join(pool.group(*(draw.choice([0, 1, 3, 17, 40]) for _ in range(draw.randint(1, 3)))))
    elif kind == "move":  # from a cohort to a group, as a finished prefill does; it may stay in the cohort too
        draw.choice(groups).join(group.take([draw.randrange(count)]))
    elif kind == "store":
        row = draw.randrange(count)
        stored.append((group.states(row), list(group.lists[row])))
        del stored[:-3]
    elif kind == "restore" and stored:
        group.join(group.restored(*draw.choice(stored)))
    elif callable(kind):
        kind(draw, pool, group, count)


def check_sequence(pool, seed):
    draw = random.Random(seed)
    groups, stored = [pool.group(), pool.group()], []
    for _ in range(OPERATIONS):
        for group in groups:
            if len(group.lists) > 5:
                group.keep(range(3))
        operate(draw, pool, groups, stored)
        for group in groups:
            assert all(table is group.tables[0] for table in group.tables)
    for group in groups:
        if group.lists:
            group.step([1] * len(group.lists))
        group.check()
    stored.clear()
    groups[0].check_blocks(groups[1])
    for group in groups:
        group.keep([])
    assert groups[0].blocks.used == 0


def check_random(pool, size):
    for seed in range(SEQUENCES):
        try:
            check_sequence(pool(size), seed)
        except (AssertionError, ValueError, IndexError, RuntimeError) as error:
            msg = f"size {size}, sequence {seed}: {type(error).__name__}: {error}"
            raise AssertionError(msg) from error


@pytest.mark.parametrize("size", [1, 4, 16])
def test_any_order_of_operations_holds(pool, size):
    check_random(pool, size)


# --- twins: the same sequences with one fault each must fail ---------------------------------------------------


def forgets_to_copy(monkeypatch):
    monkeypatch.setattr(Plan, "_grown", _without_copies(Plan._grown))


def _without_copies(grown):
    def grow(self):
        counts, self.blocks.counts = self.blocks.counts, np.minimum(self.blocks.counts, 1)
        rows = grown(self)
        if self.blocks.counts.size == counts.size:
            self.blocks.counts = self.blocks.counts + np.maximum(counts - 1, 0)
        return rows

    return grow


def keeps_sorted(monkeypatch):
    kept = Table.kept
    monkeypatch.setattr(Table, "kept", lambda self, indices: kept(self, sorted(indices)))


def loses_owners(monkeypatch):
    monkeypatch.setattr(Blocks, "settle", lambda self: self.returned.clear())


def keeps_all(monkeypatch):
    committed = Plan.committed
    monkeypatch.setattr(
        Plan, "committed", lambda self, kept: committed(self, [n and w for n, w in zip(kept, self.widths, strict=True)])
    )


def shares_owners(monkeypatch):
    monkeypatch.setattr(Share, "again", lambda self, grows=True: self)


def stays_where_it_was(monkeypatch):
    """The pool is renumbered, the planes are not."""
    monkeypatch.setattr(Pages, "_gather", lambda self, plane, ids: _shifted(self, plane, ids))


def _shifted(pages, plane, ids):
    size = pages.blocks.size
    blocks = plane.reshape(1, plane.shape[1], -1, size * plane.shape[3])
    wrong = mx.arange(ids.size) % blocks.shape[2]
    return mx.take(blocks, wrong, axis=2).reshape(1, plane.shape[1], ids.size * size, plane.shape[3])


@pytest.mark.parametrize(
    "plant", [forgets_to_copy, keeps_sorted, loses_owners, keeps_all, shares_owners, stays_where_it_was]
)
def test_a_broken_pool_is_found(pool, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_random(pool, 4)
