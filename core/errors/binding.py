"""Errors of loading a model, of the configuration, and of binding the two."""

from __future__ import annotations

from collections.abc import Iterable

from oarlock.core.errors.base import OarlockError, did_you_mean


class LoadError(OarlockError):
    """A model could not be loaded. Attribute ``source``: what was asked for."""

    def __init__(self, source: str, message: str) -> None:
        self.source = source
        super().__init__(f"cannot load {source!r}: {message}")


class ModelNotFound(LoadError, FileNotFoundError):
    """Nothing that a loader knows stands under this name."""


class NoModelConfig(LoadError, FileNotFoundError):
    """A model directory has no config.json."""


class NotGGUF(LoadError, ValueError):
    """A file does not begin as a GGUF file does, or ends too soon."""


class UnsupportedModel(LoadError, ValueError):
    """The architecture or a tensor type is not one that the loader reads."""


class MissingPackage(LoadError, ImportError):
    """A package is needed that is not installed; the message says which command installs it."""


class BindError(OarlockError, ValueError):
    """Model, config and plugins do not fit together."""


class UnsupportedLayer(BindError):
    """No layout can hold a layer of the model. Attributes: ``layer`` (path), ``kind``."""

    def __init__(self, layer: str, kind: str, reason: str) -> None:
        self.layer, self.kind, self.reason = layer, kind, reason
        super().__init__(f"layer {layer} ({kind}) cannot be batched: {reason}")


class LayoutRefused(BindError):
    """A layout named in the config cannot hold the layer it was named for."""

    def __init__(self, layout: str, layer: str, reason: str) -> None:
        self.layout, self.layer, self.reason = layout, layer, reason
        super().__init__(f"layout {layout!r} cannot hold layer {layer}: {reason}")


class AdapterRefused(BindError):
    """An adapter that the config names cannot be put onto this model. Attribute ``adapter``: its name there."""

    def __init__(self, adapter: str, reason: str) -> None:
        self.adapter, self.reason = adapter, reason
        super().__init__(f"adapter {adapter!r} cannot be used: {reason}")


class ModelNotBatchable(BindError):
    """The bind probe found that rows disturb each other in this model. ``layer``: where first, if it is known."""

    def __init__(self, model_type: str, reason: str, layer: str | None = None) -> None:
        self.model_type, self.reason, self.layer = model_type, reason, layer
        super().__init__(f"model type {model_type!r} cannot run rows together: {reason}")


class MixedRefused(BindError):
    """The config asks for mixed forwards, which this model or its layouts cannot do. ``layer``: which, if it is one."""

    def __init__(self, model_type: str, reason: str, layer: str | None = None) -> None:
        self.model_type, self.reason, self.layer = model_type, reason, layer
        super().__init__(
            f"scheduler.mixed is true, but model type {model_type!r} cannot decode and prefill in one forward: {reason}; "
            'allowed here: "auto", false'
        )


class ProposerRefused(BindError):
    """Drafts of this proposer cannot be used for this model."""

    def __init__(self, proposer: str, model_type: str, reason: str) -> None:
        self.proposer, self.model_type, self.reason = proposer, model_type, reason
        super().__init__(f"proposer {proposer!r} cannot draft for model type {model_type!r}: {reason}")


class CompiledRefused(BindError):
    """The config asks for compiled decode steps, which this model or a layout cannot do. ``layer``: which, if it is one."""

    def __init__(self, model_type: str, reason: str, layer: str | None = None) -> None:
        self.model_type, self.reason, self.layer = model_type, reason, layer
        super().__init__(
            f"scheduler.compiled is true, but decode steps of model type {model_type!r} cannot be compiled: {reason}; "
            'allowed here: "auto", false'
        )


class ConfigError(OarlockError, ValueError):
    """The engine configuration is wrong."""


class UnknownConfigKey(ConfigError):
    """A key that no section of the configuration has."""

    def __init__(self, key: str, section: str, known: Iterable[str]) -> None:
        self.key, self.section, self.known = key, section, tuple(sorted(known))
        where = f"[{section}]" if section else "the top level"
        super().__init__(
            f"unknown config key {key!r} in {where}{did_you_mean(key, self.known)}; known: {', '.join(self.known)}"
        )


class InvalidConfigValue(ConfigError):
    """A config value has the wrong type or is outside what is allowed."""

    def __init__(self, key: str, got: object, allowed: str) -> None:
        self.key, self.got, self.allowed = key, got, allowed
        super().__init__(f"config {key} is {got!r}; allowed: {allowed}")


class UnreadableConfig(ConfigError):
    """A config file cannot be read, or is not TOML."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"cannot read config file {path!r}: {reason}")
