"""Layouts made of other layouts: of a composite layer's parts, or around a whole layer. They hold no storage idea."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from oarlock.core.contracts.layout import BatchCache, CacheLayout, LayerInfo, RowState

if TYPE_CHECKING:
    import mlx.core as mx

APART = "apart"
"""What a layout holds that keeps rows of different length apart, in caches of another layout: see `PartedCache`."""


@attrs.frozen(kw_only=True)
class BoundLayer:
    """One layer and the layout that holds it, with the reason of the choice; likewise for each part of a composite.

    ``attends``: the layer's caches hand out `KeyValues`, see `AttendingLayout`. ``stops``: see `ConvertingLayout`.
    """

    info: LayerInfo
    layout: CacheLayout
    options: Any
    reason: str
    parts: tuple[BoundLayer, ...] = ()
    attends: bool = False
    stops: tuple[int, ...] = ()


@runtime_checkable
class AttendingLayout(Protocol):
    """What a layout has besides, whose caches may hand out `KeyValues` in place of keys and values.

    It must not do so where the layer is not ``attendable``, but read plainly, or refuse the layer.
    """

    def attends(self, layer: LayerInfo, options: Any) -> bool:
        """Return whether caches of this layer do. Called once per layer at bind."""
        ...


@runtime_checkable
class SurrenderingCache(Protocol):
    """What a cache has besides, whose only row can be stored without a copy when the cache is given up."""

    def surrender(self) -> RowState:
        """Return the state of the only row, as `BatchCache.extract` does, on the cache's own buffers: it is dropped then.

        Where much of the buffers is reserve it is a copy after all, so that `RowState.nbytes` says what is held.
        """
        ...


@runtime_checkable
class ConvertingLayout(Protocol):
    """What a layout has besides, whose caches store a row in another way from some length on.

    The core ends a forward of several tokens wherever a row reaches such a length, so that what is stored does not
    depend on chunks. Whoever does not gets a cache that is right all the same, with other numbers in it.
    """

    def stops(self, layer: LayerInfo, options: Any) -> Sequence[int]:
        """Return the lengths, in tokens, at which a row's storage changes. Called once per layer at bind."""
        ...


def restored(layers: Sequence[BoundLayer], states: Sequence[RowState], tokens: int) -> tuple[int, list[BatchCache]]:
    """Return the longest prefix, of at most ``tokens``, that one row's ``states`` can be cut to, and its caches.

    One state and one cache a layer; 0 and no caches where there is no such prefix.
    """
    caches = [layer.layout.restore(state) for layer, state in zip(layers, states, strict=True)]
    while tokens and (found := min(cache.reusable(tokens) for cache in caches)) != tokens:
        tokens = found
    for cache in caches if tokens else ():
        cache.cut(tokens)
    return tokens, caches if tokens else []


def on_every_layer(
    caches: Sequence[BatchCache], rows: int, add: Callable[[BatchCache, Any], None], given: Sequence[Any]
) -> None:
    """Call ``add(cache, given[layer])``, which puts rows behind the ``rows`` there are, on all layers or on none.

    ``add`` must not close over caches: an error that somebody keeps would keep them too.
    """
    done: list[BatchCache] = []
    try:
        for cache, each in zip(caches, given, strict=True):
            add(cache, each)
            done.append(cache)
    except Exception:
        for cache in done:
            cache.keep(range(rows))
        raise


def described(layers: Sequence[BoundLayer]) -> str:
    """Return a digest of how each layer and part is stored: equal for two compositions that can share states."""
    each = [
        (bound.info.path, bound.layout.name, repr(bound.options)) for layer in layers for bound in (layer, *layer.parts)
    ]
    return hashlib.sha256(json.dumps(each).encode()).hexdigest()[:32]


def stops_of(layers: Iterable[BoundLayer]) -> tuple[int, ...]:
    """Return the lengths at which the storage of any of ``layers`` changes, ascending."""
    return tuple(sorted({stop for layer in layers for stop in layer.stops}))


def longest_append(stops: Iterable[int], tokens: int, width: int) -> int:
    """Return ``width``, or less where a row of ``tokens`` comes to one of ``stops`` before: no forward may go past it."""
    return min([width, *(stop - tokens for stop in stops if stop > tokens)])


class ComposedLayout(CacheLayout, Protocol):
    """What a layout of kind "composite" or "apart" is: it holds no storage idea but those of what it is made of."""

    def compose(self, parts: Sequence[BoundLayer]) -> CacheLayout:
        """Return the layout of one layer. Called once per such layer at bind.

        ``parts`` are the bound parts of a composite layer; for a layout of kind "apart", the bound layer itself.
        """
        ...


@attrs.define
class Part:
    """Rows that share a forward: their places in the whole, and the cache that holds them in that order."""

    places: list[int]
    cache: BatchCache


class PartedCache(BatchCache, Protocol):
    """Rows in several caches, one per distinct length. The core forwards each of ``parts`` by itself.

    Bind puts one around every layer of a model whose forward takes one position for all rows. The parts of all
    layers hold the same rows, since the same is done to each, and are settled by `begin`.
    """

    parts: Sequence[Part]


class TracedCache(Protocol):
    """What a model gets for a cache inside a trace: the model side of `BatchCache`, for one token a row.

    Positions are an array and shapes do not follow them, so the trace holds for all tokens until columns run out.
    """

    planes: dict[str, mx.array]
    """What the trace began with, and then what it wrote."""


@runtime_checkable
class TraceableCache(Protocol):
    """What a batch cache has besides, whose decode step can be traced once and replayed.

    The core calls these between `begin` and `commit`, for forwards of one token a row.
    """

    planes: dict[str, mx.array]
    """All that such a forward reads and writes. Its results replace them, so that MLX writes where they lie."""

    def fixed_columns(self, tokens: int) -> int | None:
        """Make room for rows of ``tokens`` and return how many columns there are; None where nothing is held yet."""
        ...

    def traced(self, planes: dict[str, mx.array], positions: mx.array, columns: int) -> TracedCache:
        """Return what stands for this cache, rows at ``positions`` int32 ``[B]``; attention reads ``columns``."""
        ...
