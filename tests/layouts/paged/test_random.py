"""Random operations on groups that share one pool, beside plain lists of tokens, so that orders nobody thought of are tried too."""

import random

import pytest

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


@pytest.mark.parametrize("size", [1, 4, 16])
def test_any_order_of_operations_holds(pool, size):
    for seed in range(SEQUENCES):
        try:
            check_sequence(pool(size), seed)
        except (AssertionError, ValueError, IndexError, RuntimeError) as error:
            msg = f"size {size}, sequence {seed}: {type(error).__name__}: {error}"
            raise AssertionError(msg) from error
