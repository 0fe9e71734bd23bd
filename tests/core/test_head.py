"""Mixed forwards: scores are computed for the lines that need them, and for nobody else is anything changed."""

import threading

import mlx.core as mx
import pytest
from mlx import nn

from oarlock.core import Request
from oarlock.core import forward as forwards
from oarlock.core.engine import Engine
from oarlock.core.head import Trimmed, only
from oarlock.core.mixed import Side, forward
from oarlock.core.testing import models


@pytest.fixture
def heads(monkeypatch):
    """Lines that each call of a head got: of a layer as wide as these vocabularies, which no other is."""
    seen, linear, embedding = [], nn.Linear.__call__, nn.Embedding.as_linear

    def layer(self, x):
        if self.weight.shape[0] in (97, 1009):
            seen.append(x.shape[0])
        return linear(self, x)

    def tied(self, x):
        seen.append(x.shape[0])
        return embedding(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", layer)
    monkeypatch.setattr(nn.Embedding, "as_linear", tied)
    return seen


def side(bound, start, width):
    """One row with ``start`` tokens of past, and the next ``width`` ids."""
    caches = bound.open_caches(slots=1, window=1)
    for cache in caches:
        cache.add(1)
    prompt = [(7 * i + start) % 97 for i in range(start + width)]
    ids = mx.array([prompt[:start]], dtype=mx.uint32)
    forwards.forward(bound, caches, ids, [start])
    forwards.settle(bound, caches, ids, [start], [start])
    return Side(caches, mx.array([prompt[start:]], dtype=mx.uint32), [width])


@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "qwen3", "cohere2", "gemma4"])
def test_only_what_is_wanted_reaches_the_head(name, heads):
    """The scores are those that the same lines have among all."""
    changes = {} if name.startswith("tiny") else {"vocab_size": 1009}
    with Engine(models.build(name, **changes)) as engine:
        bound = engine.bound
        assert bound.mixing.body
        sides = [side(bound, 9, 1), side(bound, 4, 6)]
        whole = forward(bound, sides)
        mx.eval(whole)
        for each in sides:
            for cache in each.caches:
                cache.commit([0])
        heads.clear()
        decode, prefill = forward(bound, sides, [[0], [5]])
        assert heads == [2]
        assert (decode.shape, prefill.shape) == ((1, bound.vocabulary),) * 2
        assert mx.allclose(decode[0], whole[0][0, 0], atol=1e-4)
        assert mx.allclose(prefill[0], whole[1][0, 5], atol=1e-4)


def test_a_chunk_in_the_middle_of_a_prompt_gets_no_scores(heads):
    """Decode rows alone do, and the last chunk's last token."""
    model = models.build("tiny-full")
    with Engine(model, config={"scheduler": {"prefill_chunk": 8, "mixed": True, "tail_split": False}}) as engine:
        running = engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=30))
        while len(running._row.token_ids) < 2:
            engine.step()
        heads.clear()
        joiner = engine.submit(Request(prompt_ids=list(range(1, 21)), max_tokens=4))
        while not joiner._row.token_ids:
            engine.step()
        assert heads[:3] == [1, 1, 2]
        assert engine.stats()["mixed_forwards"] >= 3


class Strict:
    """A model whose head asks for as many lines as it was given."""

    def __call__(self, ids, cache=None):
        out = self.model(ids, cache)
        if out.shape[0] != ids.shape[0]:
            msg = "lines are missing"
            raise ValueError(msg)
        return self.model.embed_tokens.as_linear(out) if self.args.tie_word_embeddings else self.lm_head(out)


def test_a_model_that_cannot_be_cut_is_not(heads):
    """It mixes all the same, with scores for all lines."""
    model = models.build("tiny-full")
    model.__class__ = type("Model", (Strict, type(model)), {"__module__": type(model).__module__})
    with Engine(model, config={"scheduler": {"prefill_chunk": 8}}) as engine:
        assert engine.bound.mixing.on
        assert engine.bound.mixing.body == ""
        running = engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=30))
        while len(running._row.token_ids) < 2:
            engine.step()
        heads.clear()
        engine.generate([Request(prompt_ids=list(range(1, 21)), max_tokens=4)])
        assert 9 in heads


def test_the_class_is_put_back_by_the_last(heads):
    """Engines may share a model; others see its own class's behaviour all along."""
    model = models.build("tiny-full")
    body = type(model.model)
    one, two = Engine(model), Engine(model)
    assert isinstance(model.model, body)
    ids = mx.array([[1], [2], [3]], dtype=mx.uint32)
    assert model(ids).shape[0] == 3
    one.close()
    assert type(model.model) is not body
    two.close()
    assert type(model.model) is body


def test_what_one_thread_asks_for_is_not_anothers():
    model = models.build("tiny-full")
    trimmed, shapes = Trimmed(model, "model"), []
    ids = mx.array([[1], [2], [3]], dtype=mx.uint32)
    with only([1]):
        thread = threading.Thread(target=lambda: shapes.append(model(ids).shape[0]))
        thread.start()
        thread.join()
        shapes.append(model(ids).shape[0])
    shapes.append(model(ids).shape[0])
    trimmed.close()
    trimmed.close()
    assert shapes == [3, 1, 3]
