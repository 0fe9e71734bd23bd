"""Read a model's layers: kind, geometry and what attention receives. It knows mlx-lm's caches; it chooses nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import mlx.core as mx
import structlog
from mlx.nn import Embedding, Module, QuantizedEmbedding
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from oarlock.core.attention import watched
from oarlock.core.contracts.layout import LayerInfo

_log = structlog.get_logger(__name__)
_DEPTH = 3
"""How many objects deep arrays are looked for: a plugin, what it registered, its options."""
_WITHOUT_ARRAYS = (str, bytes, int, float, type, FunctionType, BuiltinFunctionType, MethodType)
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
    mx.eval(list(_held(model)))


def evaluate_plugins(plugins: Iterable[Any]) -> None:
    """Evaluate the arrays that plugins and what they registered hold: constants made at import or when they were built.

    What another thread made and left lazy is a warning: it fails the rows that use it, not the engine.
    """
    for plugin in plugins:
        try:
            mx.eval(list(_held(plugin)))
        except Exception as error:  # noqa: BLE001 - of a plugin that perhaps nobody uses
            _log.warning("plugin_not_evaluated", plugin=repr(plugin), error=repr(error))


def _held(root: Any) -> Iterator[mx.array]:
    """Yield the arrays in containers, modules and the attributes of plain objects, a few objects deep."""
    stack, seen = [(root, _DEPTH)], set()
    while stack:
        thing, depth = stack.pop()
        if isinstance(thing, mx.array):
            yield thing
        if id(thing) in seen or isinstance(thing, _WITHOUT_ARRAYS):
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping | list | tuple | set):
            stack += [(value, depth) for value in (thing.values() if isinstance(thing, Mapping) else thing)]
        deeper = depth if isinstance(thing, Module) else depth - 1
        if deeper >= 0 and (thing is root or not isinstance(thing, ModuleType)):
            stack += [(value, deeper) for value in _attributes(thing)]


def _attributes(thing: Any) -> list[Any]:
    slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())} - {"__weakref__"}
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]


def read(model: Any) -> ModelFacts:
    """Read ``model`` by building, not evaluating, forwards of one token and of two with its own serial caches.

    Some models attend in another way from the second token of a forward on.
    """
    caches, fetches, logits = _trace(model, 1)
    _, wide, _ = _trace(model, 2)
    attendable = {path for path in fetches if fetches[path].attended and wide[path].attended}
    layers = tuple(_info(index, str(index), cache, fetches, attendable) for index, cache in enumerate(caches))
    scores = int(logits.shape[-1])
    return ModelFacts(layers=layers, vocabulary=_embedding_rows(model, scores), scores=scores)


@attrs.define(eq=False)
class _Fetches:
    """What one cache was given last, all that it returned, and whether attention received that, by identity."""

    given: tuple[Any, ...] = ()
    returned: list[tuple[Any, Any]] = attrs.field(factory=list)
    attended: bool = False


def _trace(model: Any, width: int) -> tuple[Sequence[Any], dict[str, _Fetches], mx.array]:
    """Return the caches of one forward, what each fetched by path, and the scores."""
    caches = make_prompt_cache(model)
    fetches = {path: _spied(cache) for path, cache in _flat(caches)}
    with watched(model) as seen:
        logits = model(mx.zeros((1, width), dtype=mx.uint32), cache=caches)
    for each in fetches.values():
        received = [any(pair[0] is keys and pair[1] is values for keys, values in seen) for pair in each.returned]
        each.attended = bool(received) and all(received)
    return caches, fetches, logits


def _flat(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, cache) of every single cache, parts of composites included."""
    for index, cache in enumerate(caches):
        path = f"{prefix}{index}"
        if isinstance(cache, CacheList):
            yield from _flat(cache.caches, f"{path}.")
        else:
            yield path, cache


def _spied(cache: Any) -> _Fetches:
    """Record what a cache is given and returns; the recorder lives in the instance and dies with it."""
    seen = _Fetches()

    def recorded(method: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            seen.given = given or seen.given  # nothing is given where a model only reads again
            seen.returned.append(pair := method(*given, **named))
            return pair

        return call

    for name in ("update_and_fetch", "keys_and_values"):
        if (method := getattr(cache, name, None)) is not None:
            setattr(cache, name, recorded(method))
    return seen


def _info(index: int, path: str, cache: Any, fetches: Mapping[str, _Fetches], attendable: Container[str]) -> LayerInfo:
    if isinstance(cache, CacheList):
        each = enumerate(cache.caches)
        parts = tuple(_info(index, f"{path}.{i}", part, fetches, attendable) for i, part in each)
        return LayerInfo(index=index, path=path, kind="composite", parts=parts)
    kind = _KINDS.get(type(cache), type(cache).__name__)
    keys, values = fetches[path].given[:2] or (None, None)
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
        attendable=path in attendable,
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
