"""Prepared input: embeddings in place of a prompt's tokens, and positions that belong to the row."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache

from oarlock.core import PreparedInputs, Request, hookimpl
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidParameter, UnsupportedFeature
from oarlock.core.testing import models
from oarlock.methods.plain import Plain, PlainDecoding

TOKENS = 12
PROMPTS = models.prompts((9, 4, 7, 1), 97, seed=5)


@pytest.fixture(scope="module")
def seeing():
    """qwen3_vl with random weights; its towers are not in mlx-lm."""
    text = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 97,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    return models.build("qwen3_vl", model_type="qwen3_vl", text_config=text)


def embed(model, ids):
    return model.language_model.model.embed_tokens(mx.array(ids))


def image(length, seed, size=1.0):
    """What a tower might give."""
    return size * mx.random.normal((length, 64), key=mx.random.key(seed))


class Watch:
    """Who shared forwards."""

    def __init__(self):
        self.prefilled, self.decoded = set(), set()

    @hookimpl
    def step_finished(self, step):
        self.prefilled.add(step.prefill_ids)
        self.decoded.add(step.decode_ids)


def arrive(engine, requests, every=1):
    handles = []
    for request in requests:
        handles.append(engine.submit(request))
        for _ in range(every):
            engine.step()
    while not all(handle.done for handle in handles):
        engine.step()
    return [handle.outcome for handle in handles]


# --- embeddings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [{}, {"prefill_chunk": 2}, {"tail_split": False, "prefill_chunk": 3}])
def test_a_models_own_embeddings_give_the_tokens_of_their_ids_and_others_those_of_mlx_lm(seeing, scheduler):
    """SPEC 1.1.12, 5.18: prefilled by themselves, then decoding beside rows of ids."""
    watch, given = Watch(), [embed(seeing, PROMPTS[0]), None, image(7, 1), image(1, 2)]
    requests = [
        Request(
            prompt_ids=prompt,
            max_tokens=TOKENS,
            inputs=None if each is None else PreparedInputs(embeddings=each),
            id=f"r{place}",
        )
        for place, (prompt, each) in enumerate(zip(PROMPTS, given, strict=True))
    ]
    with Engine(seeing, config={"scheduler": scheduler}, plugins=[watch]) as engine:
        outcomes = arrive(engine, requests)
        assert engine.stats()["recoveries"] == 0
    plain = [models.serial(seeing, prompt, TOKENS) for prompt in PROMPTS]
    wanted = [
        plain[place] if place < 2 else models.serial(seeing, PROMPTS[place], TOKENS, input_embeddings=given[place])
        for place in range(4)
    ]
    rows = [row.token_ids for row in outcomes]
    models.compare(rows, [row.tokens for row in wanted], [row.gaps for row in wanted]).check()
    assert rows[2] != plain[2].tokens
    assert all(len(ids) == 1 for ids in watch.prefilled if {"r0", "r2", "r3"} & set(ids))
    assert any(len(ids) > 2 for ids in watch.decoded)


class FailsOnce(PlainDecoding):
    """Loses everything that is in flight, in its n-th advance."""

    left = 0

    def advance(self, work=None):
        FailsOnce.left -= 1
        if not FailsOnce.left:
            raise OSError("once")
        super().advance(work)


@pytest.mark.parametrize("at", [1, 4, 8])
def test_rows_that_lose_their_state_are_computed_again_from_their_prepared_input(seeing, monkeypatch, at):
    """And from the tokens that came after it, each in a forward of its kind, beside rows of ids."""
    monkeypatch.setattr(Plain, "open", lambda method, host, options: FailsOnce(host))
    monkeypatch.setattr(FailsOnce, "left", at)
    given = [None, image(4, 3), None, image(1, 2)]
    requests = [
        Request(prompt_ids=prompt, max_tokens=TOKENS, inputs=None if each is None else PreparedInputs(embeddings=each))
        for prompt, each in zip(PROMPTS, given, strict=True)
    ]
    with Engine(seeing, config={"scheduler": {"prefill_chunk": 3}}) as engine:
        outcomes = arrive(engine, requests)
        assert engine.stats()["recoveries"] == 1
    wanted = [
        models.serial(seeing, prompt, TOKENS, **({} if each is None else {"input_embeddings": each}))
        for prompt, each in zip(PROMPTS, given, strict=True)
    ]
    rows = [row.token_ids for row in outcomes]
    models.compare(rows, [row.tokens for row in wanted], [row.gaps for row in wanted]).check()


def test_rows_with_prepared_input_that_wait_together_are_prefilled_one_by_one(seeing):
    """Nobody joins their preparation, and they join nobody's."""
    watch = Watch()
    requests = [
        Request(
            prompt_ids=[1] * 5, max_tokens=4, inputs=PreparedInputs(embeddings=image(5, seed)) if seed % 2 else None
        )
        for seed in range(6)
    ]
    with Engine(seeing, plugins=[watch]) as engine:
        results = engine.generate(requests)
    for seed in (1, 3, 5):
        wanted = models.serial(seeing, [1] * 5, 4, input_embeddings=image(5, seed))
        models.compare([results[seed].token_ids], [wanted.tokens], [wanted.gaps]).check()
    assert {len(ids) for ids in watch.prefilled if ids} == {1}


def test_a_row_whose_embeddings_have_another_width_costs_nobody_else(seeing):
    """Its own error, found when its forward is built."""
    wide = Request(prompt_ids=[1, 2], max_tokens=4, inputs=PreparedInputs(embeddings=mx.zeros((2, 65))))
    plain = Request(prompt_ids=PROMPTS[1], max_tokens=TOKENS)
    with Engine(seeing) as engine:
        outcomes = engine.generate([plain, wide, plain], return_errors=True)
    wanted = models.serial(seeing, PROMPTS[1], TOKENS)
    models.compare([outcomes[i].token_ids for i in (0, 2)], [wanted.tokens] * 2, [wanted.gaps] * 2).check()
    assert isinstance(outcomes[1], ValueError)


class Store(NullStateCache):
    """Remembers what it was asked."""

    name = "asked"

    def __init__(self):
        self.asked = []

    def open(self, bound):
        return self

    def keeps(self, row):
        return True

    def lookup(self, key, tokens):
        self.asked.append(("lookup", tuple(tokens)))

    def publish(self, key, tokens, states):
        self.asked.append(("publish", tuple(tokens[:2])))

    @hookimpl
    def register_state_caches(self, register):
        register(self)


def test_the_state_of_prepared_input_is_neither_reused_nor_stored(seeing):
    """SPEC 5.18: the tokens do not say what it holds."""
    store, settings = Store(), {"state_cache": {"name": "asked", "publish_min_tokens": 1}}
    with Engine(seeing, config=settings, plugins=[store]) as engine:
        engine.generate([Request(prompt_ids=[1, 2, 3], max_tokens=3, inputs=PreparedInputs(embeddings=image(3, 1)))])
        assert store.asked == []
        engine.generate([Request(prompt_ids=[1, 2, 3], max_tokens=3)])
        assert {kind for kind, _ in store.asked} == {"lookup", "publish"}


# --- positions -----------------------------------------------------------------------------------------------------


class Placed(nn.Module):
    """A tiny llama to whose embeddings a learned one of each position is added, where positions are given."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.table = inner, nn.Embedding(128, 64)
        self.table.weight = 3.0 * mx.random.normal((128, 64), key=mx.random.key(9))
        mx.eval(self.parameters())

    @property
    def layers(self):
        return self.inner.layers

    def __call__(self, ids, cache=None, input_embeddings=None, places=None):
        hidden = self.inner.model.embed_tokens(ids) if input_embeddings is None else input_embeddings
        if places is not None:
            places = places if places.ndim == 3 else places[..., None]  # (B, W, k)
            hidden = hidden + mx.sum(self.table(places), axis=2)
        return self.inner(ids, cache=cache, input_embeddings=hidden)


def alone(model, inputs, tokens):
    """Decode one row with mlx-lm's cache, position by position."""
    caches = [KVCache() for _ in model.layers]
    first = mx.array(np.array(inputs.positions))[None]
    logits = model(mx.zeros(first.shape[:2], dtype=mx.uint32), caches, inputs.embeddings[None], first)
    found, gaps = [], []
    for step in range(tokens):
        best = np.sort(np.array(logits[0, -1]))
        gaps.append(float(best[-1] - best[-2]))
        found.append(int(mx.argmax(logits[0, -1])))
        at = mx.full((1, 1, *first.shape[2:]), inputs.next_position + step)
        logits = model(mx.array([[found[-1]]], dtype=mx.uint32), caches, None, at)
    return tuple(found), gaps


@pytest.mark.parametrize("k", [1, 3])
def test_rows_with_positions_of_their_own_decode_together_as_alone_and_with_no_others(tiny, k):
    """SPEC 1.1.12, 4.4, 8.13: the decode-state key is the argument that takes them."""
    model, watch, prepared = Placed(tiny), Watch(), []
    for seed, length in enumerate((6, 3, 8)):
        positions = np.random.default_rng(seed).integers(0, 60, (length, k)[: 1 + (k > 1)])
        prepared.append(
            PreparedInputs(
                embeddings=image(length, seed), argument="places", positions=positions, next_position=20 * seed + 5
            )
        )
    requests = [
        Request(prompt_ids=[1] * len(each.positions), max_tokens=TOKENS, inputs=each, id=f"p{place}")
        for place, each in enumerate(prepared)
    ]
    requests.append(Request(prompt_ids=PROMPTS[0], max_tokens=TOKENS, id="plain"))
    requests.append(Request(prompt_ids=[1] * 4, max_tokens=4, inputs=PreparedInputs(embeddings=image(4, 4)), id="x"))
    with Engine(model, config={"scheduler": {"prefill_chunk": 4}}, plugins=[watch]) as engine:
        outcomes = {request.id: row for request, row in zip(requests, arrive(engine, requests), strict=True)}
        assert engine.stats()["recoveries"] == 0
    wanted = [alone(model, each, TOKENS) for each in prepared]
    rows = [outcomes[f"p{place}"].token_ids for place in range(3)]
    models.compare(rows, [tokens for tokens, _ in wanted], [gaps for _, gaps in wanted]).check()
    serial = models.serial(model, PROMPTS[0], TOKENS)
    models.compare([outcomes["plain"].token_ids], [serial.tokens], [serial.gaps]).check()
    own = {"p0", "p1", "p2"}
    assert all(set(ids) <= own or own.isdisjoint(ids) for ids in watch.decoded)
    assert any(len(own & set(ids)) > 1 for ids in watch.decoded)
    nowhere = [
        PreparedInputs(embeddings=e.embeddings, argument="places", positions=[0] * len(e.positions)) for e in prepared
    ]
    assert all(alone(model, plain, TOKENS)[0] != tokens for plain, (tokens, _) in zip(nowhere, wanted, strict=True))


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "fields", "error", "said"),
    [
        (mx.zeros((2, 64)), {}, InvalidParameter, "PreparedInputs"),
        (PreparedInputs(embeddings=mx.zeros((3, 64))), {}, InvalidParameter, "2 prompt_ids"),
        (PreparedInputs(embeddings=mx.zeros((1, 2, 64))), {}, InvalidParameter, "prompt_ids"),
        (PreparedInputs(embeddings=[[0.0]]), {}, InvalidParameter, "prompt_ids"),
        (PreparedInputs(embeddings=mx.zeros((2, 64), dtype=mx.int32)), {}, InvalidParameter, "floating"),
        (PreparedInputs(embeddings=mx.zeros((2, 64)), positions=[1, 2]), {}, InvalidParameter, "none without"),
        (PreparedInputs(embeddings=mx.zeros((2, 64)), argument="places"), {}, UnsupportedFeature, "takes no places"),
    ],
)
def test_what_does_not_fit_is_refused_at_submit(seeing, inputs, fields, error, said):
    """With what was got and what is allowed."""
    with Engine(seeing, config={"scheduler": {"verify": False}}) as engine, pytest.raises(error, match=said):
        engine.submit(Request(prompt_ids=[1, 2], inputs=inputs, **fields))


def test_positions_are_as_many_as_the_prompts_tokens(tiny):
    """A row's own."""
    inputs = PreparedInputs(embeddings=mx.zeros((2, 64)), argument="places", positions=[1])
    engine = Engine(Placed(tiny), config={"scheduler": {"verify": False}})
    with engine, pytest.raises(InvalidParameter, match="2 with an argument"):
        engine.submit(Request(prompt_ids=[1, 2], inputs=inputs))


def test_a_model_that_takes_no_embeddings_refuses_them_with_the_reason(successor, engines):
    """Found from the signature of its forward."""
    engine = engines(successor, verify=False)
    with pytest.raises(UnsupportedFeature, match="takes no input_embeddings, only ids, cache"):
        engine.submit(Request(prompt_ids=[1], inputs=PreparedInputs(embeddings=mx.zeros((1, 4)))))
