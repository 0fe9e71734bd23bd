"""The prefix cache: answers that begin with what was stored equal those computed from the first token on."""

import random

import mlx.core as mx
import pytest

from oarlock.core import Request
from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.warm import digest
from oarlock.layouts.full import FullLayout, FullOptions
from oarlock.layouts.recurrent import RecurrentLayout, RecurrentOptions
from oarlock.plugins.state_cache.prefixes import PrefixCache

KEY = {"identity": "m", "adapter": "", "namespace": ""}


def engine(model, layouts=(), **cache):
    """An engine with a prefix cache that keeps every state of some tokens."""
    settings = {"name": "memory", "publish_min_tokens": 4, **cache}
    return Engine(model, config={"state_cache": settings, "layouts": dict(layouts), "scheduler": {"prefill_chunk": 16}})


def bytes_of(store):
    """A digest of every entry's arrays."""
    return {entry: digest(entry.states) for entry in store._entries}


def conversations(rng, turns):
    """Prompts that begin as others did, or as others with their answers, or as nobody; ``turns`` calls of `send`."""
    known = []
    for _ in range(turns):
        start = list(rng.choice(known)) if known and rng.random() < 0.8 else []
        kept = start[: rng.randint(1, len(start))] if start else []
        prompts = [kept + [rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(rng.choice((1, 1, 3)))]
        known += [prompt + list(answer) for prompt, answer in zip(prompts, (yield prompts), strict=True)]


def test_conversations_equal_their_cold_runs(storages, storage):
    """Shared, parted, repeated, extended and cut beginnings, alone and in company; nothing stored ever changes."""
    name, layouts = storages[storage]
    model = models.build(name)
    with engine(model, layouts) as warm, engine(model, layouts, name="none") as cold:
        turns, answers, stored, reused = conversations(random.Random(7), 25), None, {}, 0
        for _ in range(25):
            prompts = turns.send(answers)
            ask = [Request(prompt_ids=prompt, max_tokens=5) for prompt in prompts]
            found, wanted = warm.generate(ask), cold.generate(ask)
            assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
            reused += sum(each.usage.cached_tokens for each in found)
            answers = [each.token_ids for each in found]
            now = bytes_of(warm._store._store)
            assert all(now.get(entry, before) == before for entry, before in stored.items())
            stored = now
        stats = warm.stats()["state_cache"]
        assert stats["reused_tokens"] == reused > 100
        assert stats["bytes"] == sum(state.nbytes for entry in stored for state in entry.states)


@pytest.mark.parametrize("storage", ["full", "rotating", "quantized", "paged", "hybrid"])
def test_what_prompts_have_in_common_is_computed_once(storages, storage):
    """Sixteen that come together, 100 tokens of which they share: 100 and the sixteen rests are forwarded."""
    name, layouts = storages[storage]
    model, rng = models.build(name), random.Random(3)
    common = [rng.randrange(97) for _ in range(100)]
    prompts = [common + [rng.randrange(97) for _ in range(10)] for _ in range(16)]
    ask = [Request(prompt_ids=prompt, max_tokens=4) for prompt in prompts]
    with engine(model, layouts) as warm, engine(model, layouts, name="none") as cold:
        found, wanted = warm.generate(ask), cold.generate(ask)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert sum(110 - each.usage.cached_tokens for each in found) == 100 + 16 * 10


def test_namespaces_never_meet():
    """The same prompt twice in one, once in another, and once by a function that names it late."""
    model, prompt = models.build("tiny-full"), list(range(40))
    with engine(model) as warm:
        spaces = ["a", "a", "b", lambda: "a", lambda: "c"]
        done = [warm.generate([Request(prompt_ids=prompt, max_tokens=2, namespace=each)])[0] for each in spaces]
        together = warm.generate([Request(prompt_ids=[1, *prompt], max_tokens=2, namespace=each) for each in "de"])
    assert [each.usage.cached_tokens > 0 for each in done] == [False, True, False, True, False]
    assert [each.usage.cached_tokens for each in together] == [0, 0]


def test_a_request_without_reuse_leaves_and_finds_nothing():
    model, prompt = models.build("tiny-full"), list(range(40))
    with engine(model) as warm:
        for reuse in (False, True, False):
            (done,) = warm.generate([Request(prompt_ids=prompt, max_tokens=2, reuse_prefix=reuse)])
            assert done.usage.cached_tokens == 0
        assert warm.stats()["state_cache"]["entries"] == 1


# --- what is kept -------------------------------------------------------------------------------------------


def opened(limit, layout=FullLayout, options=FullOptions):
    info = LayerInfo(index=0, path="0", kind=next(iter(layout().kinds)), slots=1)
    return PrefixCache([BoundLayer(info=info, layout=layout(), options=options(), reason="")], limit)


def full(tokens, nbytes):
    """A state of so many tokens and bytes, which can be cut anywhere."""
    array = mx.zeros((1, 1, len(tokens), nbytes // len(tokens) // 8))
    return [RowState(layout="full", tokens=len(tokens), arrays={"keys": array, "values": array})]


def recurrent(tokens):
    """A state that cannot be cut."""
    return [RowState(layout="recurrent", tokens=len(tokens), arrays={"state0": mx.zeros((1, 25))}, meta={"slots": "1"})]


def test_bytes_stay_below_their_limit():
    """What does not fit by itself is not stored, and drives nobody out."""
    store = opened(1000)
    for first in range(20):
        tokens = [first, *range(9)]
        store.publish(KEY, tokens, full(tokens, 400))
        assert store.stats()["bytes"] == store.nbytes <= 1000
    assert (store.stats()["entries"], store.stats()["evictions"]) == (2, 18)
    store.publish(KEY, range(50, 60), full(range(10), 1200))
    assert store.stats()["entries"] == 2
    assert store.lookup(KEY, [19, *range(9), 4])[0] == 10


def test_what_is_used_and_what_saves_most_stays():
    """Of equal bytes the one with fewer tokens leaves, unless it is asked for again and again."""
    store = opened(1000)
    long, short = list(range(50)), list(range(60, 65))
    store.publish(KEY, long, full(long, 400))
    store.publish(KEY, short, full(short, 400))
    store.publish(KEY, list(range(70, 90)), full(range(20), 400))
    assert store.lookup(KEY, [*long, 1])[0] == 50
    assert store.lookup(KEY, [*short, 1]) is None
    for first in range(100, 140):
        new = [first, *range(30)]
        store.publish(KEY, new, full(new, 310))
        assert store.lookup(KEY, [*long, 1])[0] == 50


@pytest.mark.fault("A-15")
def test_a_state_that_can_be_cut_takes_the_place_of_its_prefixes():
    """And a prefix of one is not stored beside it; states that cannot be cut stand side by side."""
    store, other = opened(10**6), opened(10**6, RecurrentLayout, RecurrentOptions)
    for length in (10, 30, 20):
        tokens = list(range(length))
        store.publish(KEY, tokens, full(tokens, 80 * length))
        other.publish(KEY, tokens, recurrent(tokens))
    assert store.stats()["entries"] == 1
    assert other.stats()["entries"] == 3
    for asked, found, whole in ((31, 30, 30), (30, 29, 20), (25, 24, 20), (11, 10, 10), (10, 9, 0), (1, 0, 0)):
        ids = list(range(asked))
        assert (store.lookup(KEY, ids) or (0,))[0] == found
        assert (other.lookup(KEY, ids) or (0,))[0] == whole
    tokens = list(range(30))
    again = full(tokens, 80 * 30)
    store.publish(KEY, tokens, again)
    assert store.stats()["entries"] == 1
    assert store.lookup(KEY, range(31))[1] == tuple(again)


def test_a_key_with_nothing_is_forgotten():
    store = opened(1000)
    for name in "abc":
        store.publish(KEY | {"namespace": name}, range(10), full(range(10), 900))
    assert len(store._tries) == len(store._entries) == 1
