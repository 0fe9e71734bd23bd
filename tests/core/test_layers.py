"""What is read from a model: kinds, geometry, the rows of the embedding, and no lazy array left behind."""

import threading

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from oarlock.core.layers import evaluate, read
from oarlock.core.testing import models


def test_a_full_model_is_read_layer_by_layer(tiny):
    facts = read(tiny)
    assert [(layer.index, layer.path, layer.kind) for layer in facts.layers] == [
        (i, str(i), "full") for i in range(3)
    ]  # fmt: skip
    assert {(layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype) for layer in facts.layers} == {
        (2, 16, 16, mx.float32)
    }
    assert (facts.vocabulary, facts.scores) == (97, 97)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_dtype_is_that_of_the_keys(dtype):
    model = models.build("tiny-full")
    model.set_dtype(dtype)
    assert {layer.dtype for layer in read(model).layers} == {dtype}


def test_windows_are_read():
    kinds = [(layer.kind, layer.window, layer.keep) for layer in read(models.build("tiny-ring")).layers]
    assert kinds == [("rotating", 8, 0), ("rotating", 8, 0), ("full", 0, 0)] * 2


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("falcon_h1", {"composite"}),
        ("qwen3_next", {"full", "recurrent"}),
        ("llama4", {"full", "chunked"}),
        ("mamba", {"recurrent"}),
        ("deepseek_v2", {"full"}),
    ],
)
def test_every_kind_is_told_apart(name, kinds):
    assert {layer.kind for layer in read(models.build(name, guard=False)).layers} == kinds


def test_parts_of_a_composite_have_paths_of_their_own():
    layer = read(models.build("falcon_h1", guard=False)).layers[1]
    assert [part.path for part in layer.parts] == ["1.0", "1.1"]
    assert [part.kind for part in layer.parts] == ["recurrent", "full"]
    assert [part.slots for part in layer.parts] == [2, 0]


def test_keys_and_values_of_different_size_are_both_read():
    layer = read(models.build("deepseek_v2")).layers[0]
    assert layer.key_dim != layer.value_dim


class Fixed(nn.Module):
    """A model of one layer with the cache given to it."""

    def __init__(self, cache, embeddings=((50, 4),), scores=50):
        super().__init__()
        self.tables = [nn.Embedding(*shape) for shape in embeddings]
        self.layers, self._cache, self._scores = [], cache, scores

    def make_cache(self):
        return [self._cache]

    def __call__(self, ids, cache):
        if hasattr(cache[0], "update_and_fetch"):
            cache[0].update_and_fetch(mx.zeros((1, 3, 1, 8)), mx.zeros((1, 3, 1, 5)))
        return mx.zeros((*ids.shape, self._scores))


class Unheard(KVCache):
    """A cache of no known kind, though it derives from one."""


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        (KVCache(), "full"),
        (RotatingKVCache(max_size=16, keep=4), "rotating"),
        (ArraysCache(3), "recurrent"),
        (ChunkedKVCache(32), "chunked"),
        (CacheList(KVCache(), KVCache()), "composite"),
        (Unheard(), "Unheard"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cache_of_another_class_is_no_known_kind(cache, kind):
    """A subclass may do anything: it is named by its class, never taken for what it derives from."""
    layer = read(Fixed(cache)).layers[0]
    assert layer.kind == kind
    assert (layer.window, layer.keep, layer.chunk, layer.slots) == {
        "rotating": (16, 4, 0, 0), "chunked": (0, 0, 32, 0), "recurrent": (0, 0, 0, 3),
    }.get(kind, (0, 0, 0, 0))  # fmt: skip


def test_geometry_comes_from_what_the_cache_was_given():
    layer = read(Fixed(KVCache())).layers[0]
    assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (3, 8, 5)


def test_a_quantized_cache_is_named_by_its_class():
    assert read(Fixed(Quantized())).layers[0].kind == "Quantized"


class Quantized(QuantizedKVCache):
    def update_and_fetch(self, keys, values):
        return keys, values


@pytest.mark.parametrize(
    ("embeddings", "scores", "rows"),
    [
        (((50, 4),), 50, 50),
        (((64, 4),), 50, 64),  # padded embedding
        (((50, 4), (2048, 4)), 50, 50),  # positions have an embedding too
        (((60, 4), (20, 4)), 50, 60),
        ((), 50, 50),
    ],
)
def test_the_rows_of_the_embedding_are_found(embeddings, scores, rows):
    """The one as long as the scores are wide, else the longest, else the scores."""
    assert read(Fixed(KVCache(), embeddings, scores)).vocabulary == rows


def test_reading_leaves_the_model_as_it_was(tiny):
    """Nothing is patched, and nothing is evaluated: only the graph of one token is built."""
    names = set(vars(type(tiny)))
    before = tiny(mx.array([[1, 2, 3]])).tolist()
    read(tiny)
    assert set(vars(type(tiny))) == names
    assert tiny(mx.array([[1, 2, 3]])).tolist() == before


def test_private_arrays_are_evaluated_on_this_thread():
    """Rope tables stand in private attributes; a lazy one belongs to the thread that made it."""
    model = Fixed(KVCache())
    model._rope = mx.arange(5) * 2
    model.tables[0]._other = mx.arange(3) + 1
    evaluate(model)
    read_back = []
    thread = threading.Thread(target=lambda: read_back.extend([model._rope.tolist(), model.tables[0]._other.tolist()]))
    thread.start()
    thread.join()
    assert read_back == [[0, 2, 4, 6, 8], [1, 2, 3]]
