"""Kind H, seen from an engine: blocks of rows that are gone are free, however they went."""

import gc
import itertools

import pytest

from oarlock.layouts.blocks import Blocks


def check_blocks_come_back(bench, monkeypatch, turns):
    """Short requests, each cancelled at another state or finished: no pool grows past its rows, and none is used after."""
    pools, init = [], Blocks.__init__

    def noted(self, *arguments, **named):
        init(self, *arguments, **named)
        pools.append(self)

    monkeypatch.setattr(Blocks, "__init__", noted)
    layouts = bench.STORAGES["blocks"].layouts
    engine = bench.engine(bench.stored("blocks"), layouts=layouts, max_batch=3, prefill_chunk=4, max_queued=64)
    waits = itertools.cycle((0, 1, 2, 3, 5, None))
    for turn in range(turns):
        handle = engine.submit(bench.ask(*range(3, 4 + turn % 20), n=4))
        wait = next(waits)
        for _ in range(wait or 0):
            engine.step()
        if wait is not None:
            handle.cancel()
        assert all(pool.capacity <= 3 * 2 + 4 for pool in pools), [pool.capacity for pool in pools]
    while engine.step():
        pass
    gc.collect()
    assert pools
    assert [pool.used for pool in pools] == [0] * len(pools)


@pytest.mark.fault("H-05")
def test_two_hundred_requests_leave_no_block_behind(bench, monkeypatch):
    check_blocks_come_back(bench, monkeypatch, 200)


@pytest.mark.fault("H-05", twin=True)
def test_twin_owners_that_do_not_give_back_are_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(Blocks, "settle", lambda self: self.returned.clear())
    with planted():
        check_blocks_come_back(bench, monkeypatch, 60)
