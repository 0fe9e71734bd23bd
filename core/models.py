"""Ask the registered loaders for a model. How files are read is theirs to know."""

from __future__ import annotations

from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.errors import ModelNotFound
from oarlock.core.manager import PluginSet


def load_model(source: str, config: EngineConfig, plugins: PluginSet) -> LoadedModel:
    """Load ``source`` with the first loader that accepts it, in order of registration.

    Raises `errors.ModelNotFound` where none does, and whatever `errors.LoadError` the loader raises.
    """
    for loader in plugins.registries.loaders:
        if loader.accepts(source):
            return loader.load(source, dtype=config.model.dtype)
    known = ", ".join(plugins.registries.loaders.names()) or "none installed"
    raise ModelNotFound(source, f"no loader accepts it (loaders: {known}); give a directory, a file or a hub name")
