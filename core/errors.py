"""The exception tree. It holds no logic: who raises what, and when, is written where it is raised.

OarlockError
├── RequestError (ValueError)            a request is refused before any state changes
│   ├── EmptyPrompt, TokenOutOfRange, PromptTooLong, NoTokenizer, NoChatTemplate
│   ├── InvalidParameter                 ── InvalidMaxTokens, InvalidTemperature, InvalidTopP
│   ├── UnknownRequestKey                a field that no request has
│   └── UnsupportedFeature               a field that needs a plugin which is not bound
├── AdmissionError (RuntimeError)        ── QueueFull, NeverFits
├── EngineClosed (RuntimeError)
├── WrongThread (RuntimeError)
├── RowError (RuntimeError)              one row failed; its neighbours go on ── NonFiniteLogits, SlowConsumer
├── CompositionError (RuntimeError)      a group fails together though no row fails alone
├── LoadError                            ── ModelNotFound, NoModelConfig, NotGGUF, UnsupportedModel, MissingPackage
├── BindError (ValueError)               ── UnsupportedLayer, LayoutRefused, ModelNotBatchable
├── ConfigError (ValueError)             ── UnknownConfigKey, InvalidConfigValue, UnreadableConfig
└── PluginError                          ── BrokenPlugin, DuplicateName, UnknownName, UnknownHook,
                                            ApiMismatch, RequirementUnmet, RegistryFrozen, DisabledPlugin, InvalidPlugin
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known name, or ``""`` when none is near."""
    folded = {other.lower().replace("-", "_"): other for other in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


class OarlockError(Exception):
    """Root of everything oarlock raises on purpose."""


# --- requests ---------------------------------------------------------------------------------------


class RequestError(OarlockError, ValueError):
    """A request is refused; nothing was queued and no state changed."""


class EmptyPrompt(RequestError):
    """A prompt came to zero tokens, and there is nothing to compute scores from."""

    def __init__(self) -> None:
        super().__init__("the prompt is empty: got 0 tokens, at least 1 is needed")


class TokenOutOfRange(RequestError):
    """A token id does not exist in the model's embedding."""

    def __init__(self, token: object, position: int, vocabulary: int, field: str = "prompt_ids") -> None:
        self.token, self.position, self.vocabulary, self.field = token, position, vocabulary, field
        super().__init__(
            f"{field}[{position}] is {token!r}: token ids of this model are integers from 0 to {vocabulary - 1}"
        )


class PromptTooLong(RequestError):
    """The prompt, or prompt plus ``max_tokens``, does not fit the model's positions."""

    def __init__(self, prompt_tokens: int, max_tokens: int, positions: int) -> None:
        self.prompt_tokens, self.max_tokens, self.positions = prompt_tokens, max_tokens, positions
        super().__init__(
            f"prompt of {prompt_tokens} tokens plus max_tokens {max_tokens} exceeds the model's "
            f"{positions} positions; shorten the prompt or pass max_tokens <= {max(0, positions - prompt_tokens)}"
        )


class NoTokenizer(RequestError):
    """Text was given to an engine that has no tokenizer."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(f"{field!r} needs a tokenizer and this engine has none; pass prompt_ids instead")


class NoChatTemplate(RequestError):
    """``messages`` were given, but the tokenizer has no chat template or the template refused them."""

    def __init__(self, reason: str = "this model's tokenizer has no chat template") -> None:
        self.reason = reason
        super().__init__(f"cannot render messages: {reason}; pass prompt instead")


class InvalidParameter(RequestError):
    """A request field has a value outside what is allowed.

    Attributes: ``name``, ``got``, ``allowed``.
    """

    def __init__(self, name: str, got: object, allowed: str) -> None:
        self.name, self.got, self.allowed = name, got, allowed
        super().__init__(f"{name} is {got!r}; allowed: {allowed}")


class InvalidMaxTokens(InvalidParameter):
    """``max_tokens`` is not a whole number of at least 1, nor None."""


class InvalidTemperature(InvalidParameter):
    """``temperature`` is negative or not finite."""


class InvalidTopP(InvalidParameter):
    """``top_p`` is outside (0, 1]."""


class UnknownRequestKey(RequestError):
    """A mapping names a request field that does not exist."""

    def __init__(self, key: str, known: Iterable[str]) -> None:
        self.key, self.known = key, tuple(sorted(known))
        super().__init__(
            f"unknown request field {key!r}{did_you_mean(key, self.known)}; known: {', '.join(self.known)}"
        )


class UnsupportedFeature(RequestError):
    """A request asks for something that no bound plugin provides."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(f"{field!r} cannot be honoured: {reason}")


# --- running ----------------------------------------------------------------------------------------


class AdmissionError(OarlockError, RuntimeError):
    """A valid request was not accepted into the queue."""


class QueueFull(AdmissionError):
    """``max_queued`` requests are already waiting."""

    def __init__(self, queued: int, limit: int) -> None:
        self.queued, self.limit = queued, limit
        super().__init__(f"the queue is full: {queued} requests wait and max_queued is {limit}; try again later")


class NeverFits(AdmissionError):
    """The request exceeds a budget even if it ran alone."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        self.what, self.needed, self.available = what, needed, available
        super().__init__(f"the request needs {needed} {what} and at most {available} are available, even alone")


class EngineClosed(OarlockError, RuntimeError):
    """The engine was closed; it takes no more work."""

    def __init__(self) -> None:
        super().__init__("the engine is closed: open a new one with Engine.load(...)")


class WrongThread(OarlockError, RuntimeError):
    """A second thread tried to drive an engine: MLX arrays belong to the thread that made them."""

    def __init__(self, owner: str, caller: str) -> None:
        self.owner, self.caller = owner, caller
        super().__init__(
            f"thread {caller!r} cannot step this engine: thread {owner!r} drives it; "
            "submit and cancel from any thread, step from one"
        )


class RowError(OarlockError, RuntimeError):
    """One row failed. Attribute ``request_id`` names it."""

    def __init__(self, request_id: str, message: str) -> None:
        self.request_id = request_id
        super().__init__(message)


class NonFiniteLogits(RowError):
    """The model's scores for this row are NaN or all minus infinity."""

    def __init__(self, request_id: str, position: int) -> None:
        self.position = position
        super().__init__(
            request_id, f"request {request_id!r}: the scores after position {position} are not finite; row rejected"
        )


class SlowConsumer(RowError):
    """A consumer of a stream did not keep up within the stated time."""

    def __init__(self, request_id: str, seconds: float, limit: int) -> None:
        self.seconds, self.limit = seconds, limit
        super().__init__(
            request_id,
            f"request {request_id!r}: its consumer left {limit} events unread for {seconds} s; row rejected",
        )


class CompositionError(OarlockError, RuntimeError):
    """A step fails for rows together though each of them succeeds alone.

    Attributes: ``request_ids`` of the rows, ``cause`` the error of the joint step.
    """

    def __init__(self, request_ids: Iterable[str], cause: BaseException) -> None:
        self.request_ids, self.cause = tuple(request_ids), cause
        super().__init__(
            f"{len(self.request_ids)} rows fail together and none fails alone: the model or a layout cannot "
            f"batch them ({type(cause).__name__}: {cause})"
        )


# --- loading and binding ------------------------------------------------------------------------------


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


class ModelNotBatchable(BindError):
    """The bind probe found that rows of different length disturb each other in this model."""

    def __init__(self, model_type: str, reason: str) -> None:
        self.model_type, self.reason = model_type, reason
        super().__init__(f"model type {model_type!r} cannot run rows of different length together: {reason}")


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


# --- plugins ----------------------------------------------------------------------------------------


class PluginError(OarlockError):
    """A plugin is broken, or two do not go together."""


class BrokenPlugin(PluginError):
    """A plugin that was asked for by name could not be loaded."""

    def __init__(self, plugin: str, distribution: str, version: str, reason: str) -> None:
        self.plugin, self.distribution, self.version, self.reason = plugin, distribution, version, reason
        super().__init__(f"plugin {plugin!r} of {distribution} {version} is broken: {reason}")


class DuplicateName(PluginError, ValueError):
    """Two plugins registered one name."""

    def __init__(self, kind: str, name: str, first: str, second: str) -> None:
        self.kind, self.name, self.first, self.second = kind, name, first, second
        super().__init__(f"{kind} {name!r} is registered twice: by {first} and by {second}; disable one of them")


class InvalidPlugin(PluginError, TypeError):
    """A plugin registered something that is not what its kind needs, or is no plugin at all."""

    def __init__(self, owner: str, kind: str, got: object, allowed: str) -> None:
        self.owner, self.kind, self.got, self.allowed = owner, kind, got, allowed
        super().__init__(f"{owner}: {kind} is {got!r}; allowed: {allowed}")


class UnknownName(PluginError, LookupError):
    """A name that nothing registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        super().__init__(
            f"unknown {kind} {name!r}{did_you_mean(name, self.known)}; registered: {', '.join(self.known) or 'none'}"
        )


class DisabledPlugin(PluginError, LookupError):
    """A plugin that was asked for by name is installed, but blocked or off."""

    def __init__(self, plugin: str, distribution: str, version: str, reason: str) -> None:
        self.plugin, self.distribution, self.version, self.reason = plugin, distribution, version, reason
        super().__init__(f"plugin {plugin!r} of {distribution} {version} is not loaded: {reason}")


class UnknownHook(PluginError, AttributeError):
    """A plugin implements a hook that oarlock does not have, or with arguments it does not have."""

    def __init__(self, plugin: str, hook: str, reason: str) -> None:
        self.plugin, self.hook, self.reason = plugin, hook, reason
        super().__init__(f"plugin {plugin!r}, hook {hook!r}: {reason}")


class ApiMismatch(PluginError):
    """A plugin was written for another version of the plugin API."""

    def __init__(self, plugin: str, declared: object, supported: int) -> None:
        self.plugin, self.declared, self.supported = plugin, declared, supported
        super().__init__(
            f"plugin {plugin!r} declares OARLOCK_API = {declared!r} and this oarlock supports {supported}; "
            "install matching versions"
        )


class RequirementUnmet(PluginError):
    """``plugins.require`` names a distribution that is missing or too old."""

    def __init__(self, requirement: str, found: str) -> None:
        self.requirement, self.found = requirement, found
        super().__init__(f"config requires {requirement!r} and found {found}")


class RegistryFrozen(PluginError, RuntimeError):
    """Something was registered after a model was bound."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(f"cannot register {kind} {name!r}: a model is bound and its composition is fixed")
