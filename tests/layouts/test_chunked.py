"""`chunked`: every query sees its block up to itself, whatever was dropped, joined or rolled back meanwhile."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request
from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.layouts.chunked import ChunkedCache, ChunkedLayout

CHUNK = 8
INFO = LayerInfo(index=0, path="0", kind="chunked", kv_heads=1, key_dim=1, value_dim=1, dtype=mx.float32, chunk=CHUNK)


class Mirror:
    """A cache, and the numbers that its rows were given."""

    def __init__(self, cache=None, lists=()):
        self.cache = cache or ChunkedLayout().open(INFO, None, slots=1, window=1)
        self.lists, self._next = [list(row) for row in lists], 1

    def add(self, n):
        self.cache.add(n)
        self.lists += [[] for _ in range(n)]

    def step(self, widths, kept=None):
        kept = widths if kept is None else kept
        width = max(widths)
        new = [[self._next + 50 * row + i for i in range(width)] for row in range(len(widths))]
        self._next += 1000
        self.cache.begin(widths, Positions(map(len, self.lists)))
        self.cache.maybe_trim_front()
        mask, start = self.cache.make_mask(width), self.cache.start_position
        values = mx.array(new, dtype=mx.float32)[:, None, :, None]
        keys, _ = self.cache.update_and_fetch(values, values)
        assert keys.shape[2] == mask.shape[-1] == max(map(len, self.lists)) + width - start
        seen = np.array(keys[:, 0, :, 0])
        for row, before in enumerate(self.lists):
            every = before + new[row]
            for i in range(widths[row]):
                place = len(before) + i
                wanted = every[place // CHUNK * CHUNK : place + 1]
                assert seen[row][np.array(mask)[row, 0, i]].tolist() == wanted
        self.cache.commit(kept)
        self.lists = [row + fresh[:n] for row, fresh, n in zip(self.lists, new, kept, strict=True)]

    def check(self):
        assert self.cache.tokens == tuple(map(len, self.lists))
        start = self.cache.start_position
        assert all(start <= len(row) // CHUNK * CHUNK for row in self.lists)
        for row, wanted in enumerate(self.lists):
            arrays = self.cache.extract(row).arrays()
            held = arrays["keys"][0, 0, :, 0].tolist() if arrays else []
            block = len(wanted) // CHUNK * CHUNK - start
            assert held[block:] == wanted[start + block :]


def filled(length):
    mirror = Mirror()
    mirror.add(1)
    while len(mirror.lists[0]) < length:
        mirror.step([min(5, length - len(mirror.lists[0]))])
    return mirror


def check_long_row():
    """One row over many blocks, in pieces that cross them, and token by token."""
    mirror = filled(13)
    for width in [1] * 40 + [7, 3, 20, 1, 1]:
        mirror.step([width])
        mirror.check()
    return mirror.cache


@pytest.mark.fault("D-07")
def test_a_row_holds_about_one_block():
    cache = check_long_row()
    assert cache.start_position > 60
    assert cache.live_bytes <= 2 * 4 * 32
    assert cache.nbytes <= 2 * 4 * 256


@pytest.mark.fault("D-07", twin=True)
def test_twin_trimmed_by_the_size_of_the_buffer(monkeypatch):
    def trim(cache):
        if cache.planes and (surplus := cache._first.shape[2] - CHUNK) > 0:
            cache._shift(min(cache.start_position + surplus, *cache._starts))

    monkeypatch.setattr(ChunkedCache, "maybe_trim_front", trim)
    with pytest.raises(AssertionError):
        check_long_row()


def test_a_rollback_across_a_block_brings_everything_back():
    mirror = filled(14)
    mirror.step([5], [1])
    mirror.check()
    mirror.step([4], [0])
    mirror.step([2])
    mirror.step([3], [2])
    mirror.check()
    mirror.step([1])
    mirror.check()


def test_rows_of_other_lengths_join_in_the_columns_of_the_earlier_start():
    long, short = filled(30), filled(5)
    long.cache.join(short.cache, [1])
    both = Mirror(long.cache, [*long.lists, *short.lists])
    both.check()
    both.step([2, 2])
    assert both.cache.start_position == 0
    other = filled(30)
    short.cache.join(other.cache, [1])
    Mirror(short.cache, [*short.lists, *other.lists]).check()
    other.check()  # it was borrowed
    both.add(1)
    both.step([1, 1, 1])
    both.cache.keep([2, 0])
    both.lists = [both.lists[2], both.lists[0]]
    both.check()
    taken = Mirror(both.cache.take([1]), [both.lists[1]])
    taken.step([1])
    taken.check()
    assert taken.cache.start_position == 32
    both.check()


def at_an_end():
    """A row that goes on with a block of its own: it needs no column of those before, and has none."""
    row = filled(10)
    row.step([1], [0])  # drops the first block
    row.cache.cut(8)
    row.lists[0] = row.lists[0][:8]
    return Mirror(row.cache.take([0])._copy([0]), row.lists)


@pytest.mark.parametrize("length", [3, 8, 10, 30])
def test_a_row_that_was_cut_to_the_end_of_a_block_joins_any(length):
    """On either side; what others hold before it has no part in it."""
    for one, two in ((filled(length), at_an_end()), (at_an_end(), filled(length)), (at_an_end(), at_an_end())):
        one.cache.join(two.cache, [1])
        both = Mirror(one.cache, [*one.lists, *two.lists])
        for _ in range(12):
            both.step([2, 1])
            both.check()


@pytest.mark.parametrize("length", [3, 8, 16, 21, 40])
def test_a_restored_row_goes_on(length):
    mirror = filled(length)
    mirror.step([1], [0])  # drops what is behind it
    state = mirror.cache.extract(0)
    assert (state.layout, state.tokens, state.meta()["chunk"]) == ("chunked", length, "8")
    back = Mirror(ChunkedLayout().restore(state), mirror.lists)
    for _ in range(12):
        back.step([1])
        back.check()
    assert back.cache.reusable(99) == length + 12
    assert back.cache.reusable(back.cache.start_position) == back.cache.start_position
    assert back.cache.reusable(2) == (2 if back.cache.start_position == 0 else 0)


@pytest.mark.parametrize("settings", [{"prefill_chunk": 5}, {"max_batch": 2}])
def test_a_model_past_many_blocks_says_what_it_says_alone(settings):
    model = models.build("llama4")
    prompts = models.prompts((30, 8, 16, 21, 3), 97)
    serial = [models.serial(model, prompt, 20) for prompt in prompts]
    with Engine(model, config={"scheduler": settings}) as engine:
        assert "llama4.py:" in engine.bound.verdict.reason
        results = engine.generate([Request(prompt_ids=prompt, max_tokens=20) for prompt in prompts])
        assert engine.stats()["recoveries"] == 0
    models.compare([r.token_ids for r in results], [row.tokens for row in serial], [row.gaps for row in serial]).check()
