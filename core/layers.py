"""Read a model's layers: kind, geometry and what attention receives. It knows mlx-lm's caches; it chooses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn import Embedding, QuantizedEmbedding
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from oarlock.core.contracts.layout import LayerInfo

_KINDS = {KVCache: "full", RotatingKVCache: "rotating", ArraysCache: "recurrent", ChunkedKVCache: "chunked"}


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What one traced forward says: the layers, the width of the scores, the rows of the embedding."""

    layers: tuple[LayerInfo, ...]
    vocabulary: int
    scores: int


def evaluate(model: Any) -> None:
    """Evaluate every array of a model, private ones such as rope tables included.

    A lazy array belongs to the thread that made it, and an engine may run on another.
    """
    values = (value for module in model.modules() for value in (*vars(module).values(), *module.values()))
    mx.eval([value for value in values if isinstance(value, mx.array)])


def read(model: Any) -> ModelFacts:
    """Read ``model`` by building, not evaluating, one forward of one token with its own serial caches."""
    caches = make_prompt_cache(model)
    seen: dict[int, tuple[mx.array, mx.array]] = {}
    for _, cache in _flat(caches):
        _spy(cache, seen)
    logits = model(mx.zeros((1, 1), dtype=mx.uint32), cache=caches)
    layers = tuple(_info(index, str(index), cache, seen) for index, cache in enumerate(caches))
    scores = int(logits.shape[-1])
    return ModelFacts(layers=layers, vocabulary=_embedding_rows(model, scores), scores=scores)


def _flat(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, cache) of every single cache, parts of composites included."""
    for index, cache in enumerate(caches):
        path = f"{prefix}{index}"
        if isinstance(cache, CacheList):
            yield from _flat(cache.caches, f"{path}.")
        else:
            yield path, cache


def _spy(cache: Any, seen: dict[int, tuple[mx.array, mx.array]]) -> None:
    """Record what a cache is given; the recorder lives in the instance and dies with it."""
    fetch = getattr(cache, "update_and_fetch", None)
    if fetch is None:
        return

    def update_and_fetch(keys: mx.array, values: mx.array, *rest: Any, **named: Any) -> Any:
        seen[id(cache)] = (keys, values)
        return fetch(keys, values, *rest, **named)

    cache.update_and_fetch = update_and_fetch


def _info(index: int, path: str, cache: Any, seen: dict[int, tuple[mx.array, mx.array]]) -> LayerInfo:
    if isinstance(cache, CacheList):
        parts = tuple(_info(index, f"{path}.{i}", part, seen) for i, part in enumerate(cache.caches))
        return LayerInfo(index=index, path=path, kind="composite", parts=parts)
    kind = _KINDS.get(type(cache), type(cache).__name__)
    keys, values = seen.get(id(cache), (None, None))
    states = cache.cache if kind == "recurrent" else ()
    return LayerInfo(
        index=index,
        path=path,
        kind=kind,
        kv_heads=keys.shape[1] if keys is not None else 0,
        key_dim=keys.shape[3] if keys is not None else 0,
        value_dim=values.shape[3] if values is not None else 0,
        dtype=keys.dtype if keys is not None else None,
        window=cache.max_size if kind == "rotating" else 0,
        keep=cache.keep if kind == "rotating" else 0,
        chunk=cache.chunk_size if kind == "chunked" else 0,
        slots=len(states),
        state_bytes=sum(state.nbytes for state in states if state is not None),
    )


def _embedding_rows(model: Any, scores: int) -> int:
    """Return the rows of the token embedding: MLX reads beyond them without an error.

    Among several embeddings (positions have one too in some models) the one as long as the scores are wide is it,
    else the longest.
    """
    rows = [
        int(module.weight.shape[0]) for module in model.modules() if isinstance(module, Embedding | QuantizedEmbedding)
    ]
    return scores if not rows or scores in rows else max(rows)
