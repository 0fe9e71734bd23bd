"""Models with sliding windows, made so small that every row wraps: tokens are mlx-lm's own, in any company."""

import functools
import random

import attrs
import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.forward import forward, settle
from oarlock.core.layers import read
from oarlock.core.testing import models
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache, RotatingLayout

WINDOW = 8
LENGTHS = (12, 3, 20, 1, 9, 33)
TOKENS = 24
# Arguments beside the table's; gemma3n's own soft cap of 1.0 leaves nothing but ties.
SMALL = {
    "tiny-ring": {},
    "cohere2": {"sliding_window": WINDOW},
    "exaone_moe": {"sliding_window": WINDOW},
    "gemma3n": {"sliding_window": WINDOW, "final_logit_softcapping": 30.0},
    "gemma4": {},
    "gpt_oss": {"sliding_window": WINDOW},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "laguna": {},
    "mimo_v2_flash": {"sliding_window_size": WINDOW},
}
WAYS = {
    "at once, chunk 4": ({"prefill_chunk": 4}, 0),
    "staggered, chunk 7, no pipeline": ({"prefill_chunk": 7, "pipeline": False}, 3),
    "three at a time, whole prompts": ({"prefill_chunk": 512, "max_batch": 3}, 1),
}


@functools.cache
def model(name):
    changes = dict(SMALL[name])
    if name == "gemma3n":
        changes = {"text_config": {**models.table()[name]["text_config"], **changes}}
    return models.build(name, **changes)


@functools.cache
def alone(name, prompt):
    return models.serial(model(name), prompt, TOKENS)


def run(arrival, name, requests, every=0, layout=None, **settings):
    config = {"scheduler": settings, "layouts": {"rotating": "broken"} if layout else {}}
    with Engine(model(name), config=config, plugins=[layout] if layout else []) as engine:
        results = arrival(engine, requests, every)
        assert engine.stats()["recoveries"] == 0
    return results


def requests_of(prompts):
    """One row leaves early."""
    return [
        Request(prompt_ids=prompt, max_tokens=6 if i == 2 else TOKENS, sampling=SamplingParams(logprobs=0))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.fault("B-01", "D-01")
@pytest.mark.parametrize("name", SMALL)
def test_batched_tokens_equal_the_serial_ones_across_the_wrap(arrival, agreement, name):
    """Six ragged prompts, some past the window from the start, in three ways of arriving; all wrap while they decode."""
    windows = {layer.window for layer in read(model(name)).layers if layer.kind == "rotating"}
    assert windows <= {4, WINDOW}
    prompts = models.prompts(LENGTHS, 97)
    serial = [alone(name, tuple(prompt)) for prompt in prompts]
    comparison = models.Comparison()
    for settings, every in WAYS.values():
        results = run(arrival, name, requests_of(prompts), every, **settings)
        comparison += agreement(results, serial)
    print(f"{name}: {comparison}")
    comparison.check()


@pytest.mark.long
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 9])
def test_no_schedule_changes_a_token(arrival, agreement, chunk, early):
    """Chunks of a window, one more and less, against joins after each 1, 3 and 7 steps."""
    prompts = models.prompts(LENGTHS, 97)
    serial = [alone("tiny-ring", tuple(prompt)) for prompt in prompts]
    for every, most in ((0, 8), (1, 8), (3, 3), (7, 8)):
        settings = {"prefill_chunk": chunk, "early_first_token": early, "max_batch": most}
        agreement(run(arrival, "tiny-ring", requests_of(prompts), every, **settings), serial).check()


def check_drafts(name, layout=None, seed=0):
    """Windows of up to five drafts, a fifth of them wrong, each row at its own pace; what is accepted is the serial run."""
    config = {"layouts": {"rotating": "broken"} if layout else {}, "scheduler": {"verify": layout is None}}
    prompts, draw = models.prompts(LENGTHS, 97), random.Random(seed)
    wanted = [alone(name, tuple(prompt)).tokens for prompt in prompts]
    with Engine(model(name), config=config, plugins=[layout] if layout else []) as engine:
        bound = engine.bound
        group = bound.open_caches(slots=len(prompts), window=5)
        for place, prompt in enumerate(prompts):
            lone = bound.open_caches(slots=1, window=1)
            for cache in lone:
                cache.add(1)
            ids = mx.array([prompt], dtype=mx.uint32)
            forward(bound, lone, ids, [len(prompt)])
            settle(bound, lone, ids, [len(prompt)], [len(prompt)])
            for cache, other in zip(group, lone, strict=True):
                cache.join(other, [place])
        done = [1] * len(prompts)
        while min(done) < TOKENS - 5:
            depths = [draw.randint(0, 4) for _ in prompts]
            windows = [list(row[n - 1 : n + depth]) for row, n, depth in zip(wanted, done, depths, strict=True)]
            for window in windows:
                window[1:] = [(token + (draw.random() < 0.2)) % 97 for token in window[1:]]
            widths = [len(window) for window in windows]
            ids = mx.array([window + [0] * (max(widths) - len(window)) for window in windows], dtype=mx.uint32)
            best = mx.argmax(forward(bound, group, ids, widths), axis=-1).tolist()
            kept = []
            for row, (window, scored) in enumerate(zip(windows, best, strict=True)):
                right = next(
                    (i for i in range(1, len(window)) if window[i] != wanted[row][done[row] + i - 1]), len(window)
                )
                assert scored[:right] == list(wanted[row][done[row] : done[row] + right])
                kept.append(right if done[row] + right < TOKENS - 4 else 0)
            settle(bound, group, ids, widths, kept)
            done = [n + accepted for n, accepted in zip(done, kept, strict=True)]


@pytest.mark.parametrize("name", ["tiny-ring", "gpt_oss", "laguna"])
def test_rejected_drafts_leave_no_trace_across_the_wrap(name):
    check_drafts(name)


def test_every_tiny_model_with_a_window_is_here(zoo):
    """And its windows are as small as they have to be."""
    with_windows = {name for name in zoo.names if any(layer.kind == "rotating" for layer in zoo.layers(name))}
    assert with_windows == set(SMALL)


# --- twins ---------------------------------------------------------------------------------------------------------


def broken(cache_type):
    """A plugin that registers a ring of ``cache_type`` as "broken"."""

    class Layout(RotatingLayout):
        def open(self, layer, options, *, slots, window):
            return cache_type(slots, Ring(window=layer.window, keep=layer.keep, slack=window - 1))

    class Plugin:
        @hookimpl
        def register_layouts(self, register):
            register(Layout(name="broken"))

    return Plugin()


class OneMore(RotatingCache):
    """Sees one token too many in blocks."""

    def make_mask(self, N, return_array=False, window_size=None):
        return super().make_mask(N, return_array, self.ring.window + 1 if N > 1 else window_size)


class Merged(RotatingCache):
    """Joiners come in at the running rows' phase."""

    def join(self, other, slots):
        super().join(other, slots)
        self.ring = attrs.evolve(self.ring, phases=(self.ring.phases[0],) * self.rows)


class WithoutSlack(RotatingCache):
    """Writes drafts over what it still needs."""

    def __init__(self, slots, ring):
        super().__init__(slots, attrs.evolve(ring, slack=0))

    def make_mask(self, N, return_array=False, window_size=None):
        make = self.ring.block_mask if N > 5 else self.ring.mask
        return make(self._starts, N, window_size, return_array)

    def update_and_fetch(self, keys, values):
        width, new = keys.shape[2], self.encode(keys, values)
        if width > 5:
            return super().update_and_fetch(keys, values)
        self._reserve_columns(self.ring.extent(self._starts, width), new)
        self._write(new, self.ring.places(self._starts, width))
        self._written = width
        return self.keys_and_values()


def test_drafts_that_destroy_are_found():
    with pytest.raises(AssertionError):
        check_drafts("tiny-ring", broken(WithoutSlack))


@pytest.mark.parametrize("cache_type", [OneMore, Merged])
def test_a_wrong_ring_is_found(arrival, agreement, cache_type):
    """The probe is off: it would refuse the first of them."""
    prompts = models.prompts(LENGTHS, 97)
    serial = [alone("tiny-ring", tuple(prompt)) for prompt in prompts]
    requests, layout = requests_of(prompts), broken(cache_type)
    results = run(arrival, "tiny-ring", requests, 3, layout, verify=False, prefill_chunk=7)
    with pytest.raises(AssertionError):
        agreement(results, serial)
