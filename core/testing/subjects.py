"""What is under test, a plugin's object or a registered name, among the plugins that are installed."""

from __future__ import annotations

import functools
from typing import Any

from oarlock.core import hookimpl
from oarlock.core.manager import PluginSet, build


@functools.lru_cache(maxsize=16)
def installed_with(kind: str, subject: Any) -> PluginSet:
    """Build the installed plugins and ``subject``."""
    plugins, disable = arguments(kind, subject)
    return build(plugins=plugins, disable=disable)


def arguments(kind: str, subject: Any) -> tuple[list[Any], list[str]]:
    """Return the plugins to pass and those to disable, so that an object stands in for the installed one of its name."""
    if isinstance(subject, str):
        return [], []
    installed = build()
    registry = installed.registries.of(kind)
    if subject.name in registry and type(registry.get(subject.name)) is type(subject):
        return [], []
    return [Given(kind, subject)], [
        info.name for info in installed.infos if subject.name in info.registered.get(kind, ())
    ]


def name_of(subject: Any) -> str:
    """Return the name under which it is registered."""
    return str(subject if isinstance(subject, str) else subject.name)


def resolved(kind: str, subject: Any) -> Any:
    """Return the object. Raises `errors.UnknownName`, or what a broken or blocked plugin raises."""
    return installed_with(kind, subject).resolve(kind, name_of(subject))


class Given:
    """A plugin that registers one object of a kind."""

    def __init__(self, kind: str, subject: Any) -> None:
        self._kind, self._subject = kind, subject

    @hookimpl
    def register_layouts(self, register: Any) -> None:
        """Register a layout."""
        self._give("layout", register)

    @hookimpl
    def register_methods(self, register: Any) -> None:
        """Register a method."""
        self._give("method", register)

    @hookimpl
    def register_samplers(self, register: Any) -> None:
        """Register a sampler."""
        self._give("sampler", register)

    @hookimpl
    def register_processors(self, register: Any) -> None:
        """Register a processor."""
        self._give("processor", register)

    @hookimpl
    def register_state_caches(self, register: Any) -> None:
        """Register a state cache."""
        self._give("state_cache", register)

    def _give(self, kind: str, register: Any) -> None:
        if kind == self._kind:
            register(self._subject)
