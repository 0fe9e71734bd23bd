"""Histories: conversations of any shape, in and out of batches, over a cache that is too small for them."""

import random
from collections import Counter

import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.warm import Counting, digest
from oarlock.plugins.state_cache.prefixes import PrefixCache

TWO = {"num_hidden_layers": 2}
HEADS = {"head_dim": 32, **TWO}
PARTS = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "vocab_size": 128, **TWO}
STORAGES = {
    "full": ("tiny-full", TWO, {}),
    "rotating": ("tiny-ring", {"num_hidden_layers": 3}, {}),
    "quantized": ("tiny-full", HEADS, {"full": {"name": "quantized", "bits": 4, "group_size": 32}}),
    "paged": ("tiny-full", TWO, {"full": {"name": "paged", "block_size": 16}}),
    "delayed": ("tiny-full", HEADS, {"full": {"name": "delayed", "start": 20, "group_size": 32}}),
    "recurrent": ("lfm2", {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 256, "vocab_size": 1000}, {}),
    "hybrid": ("qwen3_next", {"vocab_size": 128, "full_attention_interval": 2, **TWO}, {}),
    "composite": ("falcon_h1", PARTS, {}),
    "chunked": ("llama4", {}, {}),
}
EVENTS = ("hit", "part of a hit", "miss", "eviction", "divergence")
SHORT, LONG, SLICES = 3, 37, 9  # 9 storages x 9 slices x 37 histories: 2,997; the short ones make 3,000 of them
TURNS, TOKENS, VOCABULARY = 9, 3, 97


class World:
    """One storage's model, a cold engine, and what prompts were answered by it."""

    def __init__(self, storage):
        name, changes, self.layouts = STORAGES[storage]
        self.model, self.events = models.build(name, **changes), Counter()
        self.verify = self.model.model_type == "llama4"
        self.cold, self.answers = self.engine("none", 0), {}
        self.compared = self.excused = 0
        self.warm = self.engine("memory", 2**30)
        self.spy = Counting(self.warm.bound.model)
        object.__setattr__(self.warm.bound, "model", self.spy)
        self.warm.generate([Request(prompt_ids=range(40), max_tokens=1)])
        self.room = 4 * max(1, self.warm.stats()["state_cache"]["bytes"])

    def engine(self, name, room):
        settings = {"prefill_chunk": 16, "pipeline": False, "mixed": False, "verify": self.verify}
        cache = {"name": name, "publish_min_tokens": 1, "prefix_bytes": room}
        return Engine(self.model, config={"layouts": self.layouts, "scheduler": settings, "state_cache": cache})

    def check(self, prompt, tokens):
        """Compare with the cold answer, up to its first near tie where the two part.

        Packed storage gets there: last bits of a key depend on how many were computed with it, and now and then another
        code is the nearest (of 2,240 numbers one to five by one step, where it was looked into).
        """
        if prompt not in self.answers:
            sampling = SamplingParams(logprobs=2)
            (result,) = self.cold.generate([Request(prompt_ids=prompt, max_tokens=TOKENS, sampling=sampling)])
            gaps = [top[0][1] - top[1][1] for top in (each.top for each in result.logprobs)]
            self.answers[prompt] = result.token_ids, gaps
        wanted, gaps = self.answers[prompt]
        self.compared += 1
        if tokens != wanted:
            assert min(gaps[: common(tokens, wanted) + 1]) < models.TIE, (prompt, tokens, wanted, gaps)
            self.excused += 1

    def live(self, seed):
        """One history: `TURNS` turns of one to three prompts, each like one before in some way."""
        rng, known, stored, warm = random.Random(seed), [], {}, self.warm
        warm._store._store = PrefixCache(warm.bound.layers, self.room)  # nothing is left of the history before
        for _ in range(TURNS):
            prompts = [tuple(prompt(rng, known)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
            before, evicted = self.spy.tokens, warm.stats()["state_cache"]["evictions"]
            results = warm.generate([Request(prompt_ids=ids, max_tokens=TOKENS) for ids in prompts])
            for ids, result in zip(prompts, results, strict=True):
                self.check(ids, result.token_ids)
            cached = [result.usage.cached_tokens for result in results]
            forwarded = sum(len(ids) - n + TOKENS - 1 for ids, n in zip(prompts, cached, strict=True))
            assert self.spy.tokens - before == forwarded
            stored = unchanged(warm, stored)
            self.note(known, prompts, cached, warm.stats()["state_cache"]["evictions"] - evicted)
            known += [[*ids, *result.token_ids] for ids, result in zip(prompts, results, strict=True)]

    def note(self, known, prompts, cached, evictions):
        self.events["eviction"] += evictions
        for ids, n in zip(prompts, cached, strict=True):
            shared = max((common(ids, row) for row in known), default=0)
            self.events["divergence"] += 0 < shared < len(ids)
            self.events["miss" if not n else "hit" if n == len(ids) - 1 else "part of a hit"] += 1


def prompt(rng, known):
    """A repetition, an extension, a beginning, one that parts from another, or a new one."""
    fresh = rng.choices(range(VOCABULARY), k=rng.randint(2, 40))
    if not known or rng.random() < 0.2:
        return fresh
    row = rng.choice(known)
    kept = rng.choice((len(row), len(row) - TOKENS, rng.randint(1, len(row))))
    return [*row[: max(1, kept)], *(fresh[: rng.randint(0, 12)] if rng.random() < 0.7 else ())]


def common(one, two):
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def unchanged(engine, before):
    """Digests of what is stored, after those of what was are found equal."""
    entries = engine._store._store._entries
    assert all(state.tokens == len(entry.tokens) for entry in entries for state in entry.states)
    now = {entry: digest(entry.states) for entry in entries}
    assert all(before.get(entry, found) == found for entry, found in now.items())
    return now


@pytest.mark.parametrize("storage", STORAGES)
def test_some_histories(storage):
    world = World(storage)
    for seed in range(SHORT):
        world.live(seed)
    assert min(world.events[event] for event in EVENTS) >= 1, world.events


@pytest.mark.long
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("storage", STORAGES)
def test_three_thousand_histories(storage, part):
    """333 for each storage, in nine parts; each event at least 300 times a storage, so 34 a part."""
    world = World(storage)
    for seed in range(LONG):
        world.live(1000 + part * LONG + seed)
    print(storage, part, dict(world.events), f"{world.excused} of {world.compared} answers part at a near tie")
    assert world.excused <= models.MAX_EXCUSED * world.compared
    assert min(world.events[event] for event in EVENTS) >= 34, world.events
