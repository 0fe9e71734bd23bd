"""Attention over what a layout hands out in place of keys. It asks what the keys are, never whose cache they came from.

Models call `scaled_dot_product_attention` by a name that their module imported. While an engine needs it, that name
stands for a function that lets `KeyValues` attend by themselves and hands everything else on, so other users of the
same module notice nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx

from oarlock.core.contracts.layout import KeyValues
from oarlock.core.mixed import MixedKeyValues

NAME = "scaled_dot_product_attention"
Pair = tuple[Any, Any]

_mutex = threading.Lock()
_swapped: dict[str, _Swapped] = {}
_watchers: list[Callable[[Pair], None]] = []


class _Swapped:
    """One module's function, what stands for it, and how many need that."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.original, self.users = module, getattr(module, NAME), 0
        self.stand_in = _dispatching(self.original)
        setattr(module, NAME, self.stand_in)

    def undo(self) -> None:
        """Put the original back, unless somebody has wrapped the stand-in since."""
        if getattr(self.module, NAME, None) is self.stand_in:
            setattr(self.module, NAME, self.original)


class Swap:
    """The functions in some modules are swapped until `close`, and as long as another swap of them is open."""

    def __init__(self, layers: Iterable[Any]) -> None:
        """Swap where the classes of ``layers`` are defined: a model's own module often has no such name."""
        modules = {type(layer).__module__ for layer in layers}
        self._names = [name for name in modules if hasattr(sys.modules.get(name), NAME)]
        with _mutex:
            for name in self._names:
                if name not in _swapped:
                    _swapped[name] = _Swapped(sys.modules[name])
                _swapped[name].users += 1

    def close(self) -> None:
        """Give up this swap; the last one puts the originals back. Idempotent."""
        with _mutex:
            names, self._names = self._names, []
            for name in names:
                _swapped[name].users -= 1
                if not _swapped[name].users:
                    _swapped.pop(name).undo()


@contextmanager
def watched(model: Any) -> Iterator[list[Pair]]:
    """Yield a list that fills with the keys and values that attention in ``model``'s modules receives."""
    seen: list[Pair] = []
    swap, watch = Swap(model.modules()), seen.append
    _watchers.append(watch)
    try:
        yield seen
    finally:
        _watchers.remove(watch)
        swap.close()


def _dispatching(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaled_dot_product_attention(queries: mx.array, keys: Any, values: Any, *rest: Any, **named: Any) -> Any:
        for watch in _watchers:
            watch((keys, values))
        if isinstance(keys, MixedKeyValues):
            return _by_side(scaled_dot_product_attention, queries, keys, values, *rest, **named)
        if isinstance(keys, mx.array) or not isinstance(keys, KeyValues):
            return original(queries, keys, values, *rest, **named)
        return _attended(keys, queries, *rest, **named)

    return scaled_dot_product_attention


def _by_side(
    attention: Callable[..., Any],
    queries: mx.array,
    keys: MixedKeyValues,
    values: Any,
    cache: Any,  # noqa: ARG001 - mlx-lm's parameter; what it would say is in the keys
    scale: float,
    mask: Any = None,
    **named: Any,
) -> mx.array:
    return keys.attend(attention, queries, values, mask, cache=None, scale=scale, **named)


def _attended(
    keys: KeyValues,
    queries: mx.array,
    cache: Any,  # noqa: ARG001 - mlx-lm's parameter, and none of our business
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    return keys.attend(queries, scale, mask, sinks)
