"""Draft models that err: a model with every weight a little off, and a loader that has it. It chooses no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from oarlock.core import hookimpl
from oarlock.core.contracts.loader import LoadedModel

NOISE = 0.03
"""How far each weight is off, as a share of it."""


def spoiled(model: Any) -> Any:
    """Return ``model`` itself, changed. Seeds MLX's own generator of the calling thread."""
    mx.random.seed(1)

    def off(weight: mx.array) -> mx.array:
        return weight * (1 + NOISE * mx.random.normal(weight.shape)).astype(weight.dtype)

    model.update(tree_map(off, model.parameters()))
    mx.eval(model.parameters())
    return model


class Drafts:
    """A loader, and its plugin, of models that ``made`` makes, by name."""

    name = "drafts"

    def __init__(self, made: Mapping[str, Callable[[], Any]]) -> None:
        """Make nothing yet."""
        self._made = made

    def accepts(self, source: str) -> bool:
        """Return whether it makes this one."""
        return source in self._made

    def load(self, source: str, *, dtype: str = "auto") -> LoadedModel:
        """Make it, without a tokenizer."""
        model = self._made[source]()
        return LoadedModel(model=model, tokenizer=None, identity=source, model_type=str(model.model_type))

    @hookimpl
    def register_loaders(self, register: Callable[[object], None]) -> None:
        """Register itself."""
        register(self)
