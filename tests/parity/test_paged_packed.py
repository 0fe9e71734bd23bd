"""Packed blocks beside `quantized`, which stores the same numbers row by row: equal tokens, on shared prefixes too."""

import functools
import itertools

import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue, LayoutRefused
from oarlock.core.testing import models, storages
from oarlock.layouts.pages import PagedState

TOKENS, GROUP, COMMON = 20, 32, 40
LENGTHS = (12, 3, 40, 1, 9, 33, 16, 31)
TAILS = (5, 1, 17, 30, 2, 9)
SHAPES = {
    "tiny-full": {"head_dim": 32},
    "smollm2": {
        "hidden_size": 576, "num_hidden_layers": 3, "intermediate_size": 384, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 131, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "stablelm": {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000},
}  # fmt: skip
"""Of heads that take handles, likewise with three queries a key, and of attention that gets another array."""
QUICK = (("tiny-full", 8, "auto"), ("tiny-full", 4, "gather"), ("smollm2", 4, "auto"), ("stablelm", 8, "auto"))
every_choice = pytest.mark.parametrize(
    ("shape", "bits", "reads"),
    [
        pytest.param(*choice, marks=() if choice in QUICK else pytest.mark.long)
        for choice in itertools.product(SHAPES, (8, 4), ("auto", "gather"))
    ],
)


class Prefixes(NullStateCache):
    """Keeps every row's prompt but its last token, and finds the longest that another one begins with."""

    name = "prefixes"

    def __init__(self):
        self.stored, self.found = {}, []

    def open(self, bound):
        return self

    def keeps(self, row):
        return True

    def lookup(self, key, tokens):
        fits = [stored for stored in self.stored if stored == tuple(tokens[: min(len(stored), len(tokens) - 1)])]
        if not fits:
            return None
        longest = max(fits, key=len)
        self.found.append(len(longest))
        return len(longest), self.stored[longest]

    def publish(self, key, tokens, states):
        self.stored[tuple(tokens)] = list(states)

    @hookimpl
    def register_state_caches(self, register):
        register(self)


@functools.cache
def model(shape):
    return models.build("stablelm" if shape == "stablelm" else "tiny-full", **SHAPES[shape])


@functools.cache
def alone(shape, prompt, bits):
    caches = storages.quantized(model(shape), bits, GROUP, theirs=False)
    return models.serial(model(shape), prompt, TOKENS, prompt_cache=caches)


def run(shape, arrival, requests, choice, every, first=(), plugins=(), **settings):
    """Generate ``first`` alone, then the others as they arrive."""
    config = {"layouts": {"full": {"group_size": GROUP, **choice}}, "scheduler": settings}
    if plugins:
        config["state_cache"] = {"name": "prefixes", "publish_min_tokens": 2}
    with Engine(model(shape), config=config, plugins=plugins) as engine:
        engine.generate(list(first))
        results = arrival(engine, requests, every)
        assert engine.stats()["recoveries"] == 0
    return results


def check(shape, bits, prompts, ours, theirs):
    gaps = [alone(shape, tuple(prompt), bits).gaps for prompt in prompts]
    return models.compare([r.token_ids for r in ours], [r.token_ids for r in theirs], gaps)


@every_choice
def test_tokens_are_those_of_quantized(arrival, shape, bits, reads):
    """Ragged prompts, staggered joins and early leaves, in blocks of 16; some prompts come in pieces."""
    prompts = models.prompts(LENGTHS, 97)
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    comparison = models.Comparison()
    for every, settings in (
        (0, {}), (1, {"prefill_chunk": 7}), (3, {"prefill_chunk": 16, "max_batch": 3, "pipeline": False}),
    ):  # fmt: skip
        packed = {"name": "paged", "block_size": 16, "reads": reads, "bits": bits}
        ours = run(shape, arrival, requests, packed, every, **settings)
        theirs = run(shape, arrival, requests, {"name": "quantized", "bits": bits}, every, **settings)
        comparison += check(shape, bits, prompts, ours, theirs)
    print(comparison)
    comparison.check()


@every_choice
def test_rows_on_a_shared_packed_prefix_say_what_quantized_says(arrival, shape, bits, reads):
    """Two full blocks in common and a half one that each row copies before it writes; nothing is computed twice."""
    common, *tails = models.prompts((COMMON, *TAILS), 97)
    first = [Request(prompt_ids=[*common, 5], max_tokens=1)]
    prompts = [[*common, *tail] for tail in tails]
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, TOKENS)[i % 3]) for i, p in enumerate(prompts)]
    comparison = models.Comparison()
    for every in (0, 2):
        store = Prefixes()
        packed = {"name": "paged", "block_size": 16, "reads": reads, "bits": bits}
        ours = run(shape, arrival, requests, packed, every, first, [store])
        theirs = run(shape, arrival, requests, {"name": "quantized", "bits": bits}, every)
        assert store.found == [COMMON] * len(requests)
        assert all(isinstance(state, PagedState) for states in store.stored.values() for state in states)
        comparison += check(shape, bits, prompts, ours, theirs)
    print(comparison)
    comparison.check()


def test_a_head_size_that_cannot_be_packed_is_refused_with_what_fits():
    with pytest.raises(LayoutRefused, match="group_size may be 32") as caught:
        Engine(model("tiny-full"), config={"layouts": {"full": {"name": "paged", "bits": 8}}})
    assert (caught.value.layout, caught.value.layer) == ("paged", "0")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "allowed"), [({"bits": 6}, "4, 8"), ({"bits": 8, "group_size": 48}, "32, 64, 128")])
def test_an_option_out_of_range_is_refused_with_the_allowed_values(option, allowed):
    with pytest.raises(InvalidConfigValue, match=allowed) as caught:
        Engine(model("tiny-full"), config={"layouts": {"full": {"name": "paged", **option}}})
    assert "\n" not in str(caught.value)


def test_plain_and_packed_layers_share_their_blocks(arrival):
    """The first layer plain, the others in 8 bits: one table, and a row has the tokens that it has alone."""
    config = {
        "layouts": {
            "full": {"name": "paged", "block_size": 16, "bits": 8, "group_size": GROUP},
            "layers": {"0": {"name": "paged", "block_size": 16}},
        }
    }
    prompts = models.prompts(LENGTHS, 97)
    requests = [Request(prompt_ids=p, max_tokens=TOKENS) for p in prompts]
    with Engine(model("tiny-full"), config=config) as engine:
        assert [layer.options.bits for layer in engine.bound.layers] == [None, 8, 8]
        ours = arrival(engine, requests, 1)
        assert engine.stats()["recoveries"] == 0
    config["layouts"] = {"full": {"name": "quantized", "bits": 8, "group_size": GROUP}, "layers": {"0": "full"}}
    with Engine(model("tiny-full"), config=config) as engine:
        theirs = arrival(engine, requests, 1)
    check("tiny-full", 8, prompts, ours, theirs).check()
