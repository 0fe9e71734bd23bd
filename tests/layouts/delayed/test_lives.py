"""A life of rows that reach their stop at different times, and the faults that it finds."""

import attrs
import mlx.core as mx
import pytest

from oarlock.layouts.delayed import DelayedCache
from oarlock.layouts.mixed import SharedKeysValues


def check_life(make, forms):
    """Rows reach their stop at different times, leave, come back, are joined by plain and packed ones, and wrap."""
    rows = make(lengths=(4, 9, 1))
    for widths in ([1, 1, 1], [1, 0, 1], [1, 1, 2]):
        rows.step(widths)
    rows.step([3, 2, 1], [1, 2, 0])
    back = [rows.restored(row) for row in range(3)]
    rows.keep([2, 0])
    rows.step([2, 1])
    for other in (*back, make(lengths=(40, 5, 2, 0))):
        rows.join(other)
        rows.step([1] * rows.cache.rows)
    part = rows.take([4, 1, 3])
    part.step([9, 9, 9])
    rows.cache.compact()
    rows.keep([8, 1, 6, 3, 0])
    for _ in range(10):
        rows.step([1] * 5)
        rows.check()
    part.check()
    assert forms(rows.cache) == [True] * 5


@pytest.mark.parametrize("attends", [True, False], ids=["handles", "arrays"])
@pytest.mark.parametrize(("window", "keep", "slack"), [(None, 0, 0), (8, 0, 0), (8, 2, 0), (8, 0, 3)])
def test_rows_live_through_their_stop(mirror, delayed_kind, forms, window, keep, slack, attends):
    kind = delayed_kind(window, keep, slack, attends=attends)
    check_life(lambda **options: mirror(kind=kind, **options), forms)


class PacksAll(DelayedCache):
    """The first row that reaches its stop takes the others with it."""

    def _pack(self, rows):
        super()._pack(range(self.plain.rows) if rows else ())


class PacksLate(DelayedCache):
    """One token too late."""

    def begin(self, widths, starts):
        self.stop += 1
        super().begin(widths, starts)
        self.stop -= 1


class PacksEarly(DelayedCache):
    def begin(self, widths, starts):
        self.stop -= 1
        super().begin(widths, starts)
        self.stop += 1


class OutOfOrder(DelayedCache):
    """Hands rows out in the order in which its two caches hold them."""

    def update_and_fetch(self, keys, values):
        seen = super().update_and_fetch(keys, values)
        if isinstance(seen[0], SharedKeysValues):
            shares = seen[0]._shares
            return SharedKeysValues.pair(attrs.evolve(shares, order=mx.arange(shares.order.size)))
        return seen


class ForgetsOrder(DelayedCache):
    """Believes that rows stand in order once one cache has them all."""

    def _arrange(self):
        for part in self._parts if hasattr(self, "plain") and not all(part.places for part in self._parts) else ():
            part.places.sort()
        super()._arrange()


class FromTheLeft(DelayedCache):
    """Takes the columns of a block for those of tokens written in place."""

    def keys_and_values(self):
        seen = super().keys_and_values()
        if isinstance(seen[0], SharedKeysValues):
            return SharedKeysValues.pair(attrs.evolve(seen[0]._shares, right=False))
        return seen


@pytest.mark.parametrize("broken", [PacksAll, PacksLate, PacksEarly, OutOfOrder, ForgetsOrder])
def test_a_wrong_life_is_found(mirror, delayed_kind, forms, broken):
    """The twins."""
    with pytest.raises((AssertionError, ValueError)):
        check_life(lambda **options: mirror(kind=delayed_kind(cache_type=broken), **options), forms)


def check_blocks(mirror, kind):
    """Wider than a ring's slack, behind histories of other lengths, plain and packed."""
    rows = mirror(kind=kind, lengths=(3, 9, 1))
    rows.step([1, 1, 1])
    rows.step([2, 4, 1])
    rows.step([3, 3, 3])
    rows.check()


def test_blocks_of_mixed_rows(mirror, delayed_kind):
    for attends in (True, False):
        check_blocks(mirror, delayed_kind(8, stop=7, attends=attends))


def test_blocks_lined_up_on_the_wrong_side_are_found(mirror, delayed_kind):
    with pytest.raises(AssertionError):
        check_blocks(mirror, delayed_kind(8, stop=7, cache_type=FromTheLeft))
