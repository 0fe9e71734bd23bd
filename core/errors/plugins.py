"""Errors of plugins and of the names that they register."""

from __future__ import annotations

from collections.abc import Iterable

from oarlock.core.errors.base import OarlockError, did_you_mean


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
