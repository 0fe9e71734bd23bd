"""Random operations on `full` beside a plain list of tokens per row, so that orders nobody thought of are tried too."""

import random

import pytest

from oarlock.layouts.full import FullCache

SEQUENCES, OPERATIONS = 120, 14


def pick_kept(draw, widths):
    """All of a window, or any count of each row's."""
    return list(widths) if draw.random() < 0.5 else [draw.randint(0, width) for width in widths]


def operate(draw, rows, make):
    """Do one operation to both sides; every one leaves rows that must still be right."""
    count = rows.cache.rows
    kind = draw.choice(["step"] * 4 + ["join", "join", "add", "keep", "reject", "take", "restore", "compact", "abort"])
    if kind == "join" or not count:
        rows.join(make(lengths=[draw.choice([0, 1, 3, 17, 250, 300]) for _ in range(draw.randint(1, 3))]))
    elif kind == "step":
        widths = [1] * count if draw.random() < 0.5 else [draw.randint(0, 4) for _ in range(count)]
        widths[draw.randrange(count)] = max(1, *widths)
        rows.step(widths, pick_kept(draw, widths))
    elif kind == "add":
        rows.add(draw.randint(1, 2))
    elif kind == "keep":
        rows.keep(draw.sample(range(count), draw.randint(0, count)))
    elif kind == "reject":
        row = draw.randrange(count)
        if held := len(rows.lists[row]):
            rows.cache.keys[row, :, :held] = rows.cache.values[row, :, :held] = float("nan")
        order = [i for i in range(count) if i != row]
        draw.shuffle(order)
        rows.keep(order)
    elif kind == "take":
        part = rows.take(draw.sample(range(count), draw.randint(1, count)))
        if part.cache is not rows.cache:
            part.step([1] * part.cache.rows)
            part.check()
    elif kind == "restore":
        rows.join(rows.restored(draw.randrange(count)))
    elif kind == "compact":
        rows.cache.compact()
    elif kind == "abort":
        rows.forward([rows.tokens(2) for _ in range(count)])
        rows.cache.commit([0] * count)


def check_random(cache_type, make):
    for seed in range(SEQUENCES):
        try:
            check_sequence(cache_type, make, random.Random(seed))
        except (AssertionError, ValueError, IndexError) as error:
            msg = f"sequence {seed}: {type(error).__name__}: {error}"
            raise AssertionError(msg) from error


def check_sequence(cache_type, make, draw):
    rows = make(cache_type(draw.randint(1, 3)))
    for _ in range(OPERATIONS):
        if rows.cache.rows > 6:
            rows.keep(range(3))
        operate(draw, rows, make)
        assert rows.cache.tokens == tuple(map(len, rows.lists))
    if rows.cache.rows:
        rows.step([1] * rows.cache.rows)
    rows.check()


def test_any_order_of_operations_holds(mirror):
    check_random(FullCache, mirror)


class ClearsNothing(FullCache):
    def _clear(self, slots, column):
        pass


class KeepsAll(FullCache):
    def commit(self, kept):
        super().commit([self._written if n else 0 for n in kept])


class KeepsSorted(FullCache):
    """Believes that rows leave in order."""

    def keep(self, indices):
        super().keep(sorted(indices))


class ForgetsTheLast(FullCache):
    """Copies one row too few into free slots."""

    def join(self, other, slots):
        super().join(other, slots)
        if other.rows > 1:
            self.keys[self.rows - 1] = self.keys[self.rows - 2]


@pytest.mark.parametrize("broken", [ClearsNothing, KeepsAll, KeepsSorted, ForgetsTheLast])
def test_a_broken_cache_is_found(mirror, broken):
    """The twins: the same sequences on caches with one fault each."""
    with pytest.raises(AssertionError):
        check_random(broken, mirror)
