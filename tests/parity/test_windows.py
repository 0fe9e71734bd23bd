"""Models with sliding windows, made so small that every row wraps: tokens are mlx-lm's own, in any company."""

import functools

import attrs
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
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


@pytest.mark.parametrize("cache_type", [OneMore, Merged])
def test_a_wrong_ring_is_found(arrival, agreement, cache_type):
    """The probe is off: it would refuse the first of them."""
    prompts = models.prompts(LENGTHS, 97)
    serial = [alone("tiny-ring", tuple(prompt)) for prompt in prompts]
    requests, layout = requests_of(prompts), broken(cache_type)
    results = run(arrival, "tiny-ring", requests, 3, layout, verify=False, prefill_chunk=7)
    with pytest.raises(AssertionError):
        agreement(results, serial)
