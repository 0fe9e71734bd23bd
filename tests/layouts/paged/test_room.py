"""What caches of one pool say of it before they grow there."""

import pytest

from oarlock.layouts.blocks import Blocks

TARGETS = [700, 20, 390]


def check_sum(pool):
    """A group and a cohort grow in one pool beside each other: what both said is no less than the pool comes to."""
    pool = pool()
    group, cohort = pool.group(40, 3, 200), pool.group(90, 17, 5)
    said = sum(each.caches[0].projected(TARGETS) for each in (group, cohort))
    for each in [group, cohort] * 18:
        widths = [min(37, target - n) for n, target in zip(each.caches[0].tokens, TARGETS, strict=True)]
        if any(widths):
            each.step(widths)
            assert sum(array.nbytes for array in group.caches[0].arrays()) <= said


def test_caches_of_one_pool_project_no_less_than_it_comes_to(pool):
    check_sum(pool)


def test_growth_that_is_left_out_is_found(pool, monkeypatch):
    monkeypatch.setattr(Blocks, "grown", staticmethod(lambda needed: needed))
    with pytest.raises(AssertionError):
        check_sum(pool)


def test_blocks_that_rows_share_are_projected_once(pool):
    """But for the last ones, where each goes on in a copy."""
    group = pool().group(70)
    group.join(group.take([0]))
    cache = group.caches[0]
    assert cache._blocks.size == 16
    assert cache.projected([70, 70], exact=True) == 5 * 16 * 80
    assert cache.projected([80, 80], exact=True) == 7 * 16 * 80
    cache.reserve([80, 80])
    assert cache.nbytes == 7 * 16 * 80
    group.step([10, 10])
    assert cache.nbytes == 7 * 16 * 80
    group.check()


def test_a_pool_that_was_reserved_keeps_its_room(pool):
    """Until it has grown past it, or is fitted anew: few rows in it do not make it shrink."""
    group = pool().group()
    for cache in group.caches:
        cache.reserve([4000])
    group.join(group.pool.group(20))
    group.step([20])
    assert group.caches[0].nbytes == 250 * 16 * 80
    for cache in group.caches:
        cache.compact()
    assert group.caches[0].nbytes == 3 * 16 * 80
