"""Ask the registered loaders for a model. How files are read is theirs to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import LoadedModel, PreparingLoader
from oarlock.core.errors import ModelNotFound, UnsupportedModel
from oarlock.core.manager import PluginSet


def load_model(
    source: str, config: EngineConfig, plugins: PluginSet, prepare: Callable[[Any], None] | None = None
) -> LoadedModel:
    """Load ``source`` with the first loader that accepts it, in order of registration.

    ``prepare`` changes the model before its weights are evaluated. Raises `errors.ModelNotFound` where no loader
    accepts it, `errors.UnsupportedModel` where that one prepares nothing, and whatever else it raises.
    """
    for loader in plugins.registries.loaders:
        if not loader.accepts(source):
            continue
        if prepare is None:
            return loader.load(source, dtype=config.model.dtype)
        if not isinstance(loader, PreparingLoader):
            raise UnsupportedModel(
                source, f"loader {loader.name!r} evaluates weights before a part of them can be taken"
            )
        return loader.load(source, dtype=config.model.dtype, prepare=prepare)
    known = ", ".join(plugins.registries.loaders.names()) or "none installed"
    raise ModelNotFound(source, f"no loader accepts it (loaders: {known}); give a directory, a file or a hub name")
