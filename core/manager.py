"""Find plugins, load each in isolation, and say what became of it. It knows no plugin by name.

One broken plugin never stops another: it leaves no trace in the registries and is listed with its reason. Order is
oarlock's own distribution first, then by distribution and plugin name, so the disk's order decides nothing.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import attrs
import pluggy
import structlog

from oarlock.core import errors, hookspecs
from oarlock.core.config import EngineConfig
from oarlock.core.registry import Registries, fold

log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class PluginInfo:
    """What is known of one plugin.

    ``state``: "installed" (listed, not imported), "active", "blocked" (by the config or a flag), "off" (not loaded
    unless named) or "broken"; ``reason`` says why. ``registered``: names by kind, of a broken plugin what it tried.
    """

    name: str
    distribution: str
    version: str
    value: str
    state: str = "installed"
    reason: str = ""
    api: int | None = None
    registered: Mapping[str, tuple[str, ...]] = attrs.field(default={}, converter=lambda given: MappingProxyType(dict(given)))

    @property
    def owner(self) -> str:
        """The plugin as messages name it: "distribution version (plugin)"."""
        return f"{self.distribution} {self.version} ({self.name})" if self.version else f"{self.distribution} ({self.name})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(PluginInfo)}
        return {**fields, "registered": {kind: list(names) for kind, names in self.registered.items()}}


@attrs.frozen(eq=False)
class PluginSet:
    """The plugins of one engine: hooks in ``manager``, items in ``registries``, every plugin found in ``infos``."""

    manager: pluggy.PluginManager
    registries: Registries
    infos: tuple[PluginInfo, ...]

    def resolve(self, kind: str, name: str) -> Any:
        """Return the registered item of a kind ("layout", "method", ...).

        Raises `BrokenPlugin` where a broken plugin has or would have registered that name, `DisabledPlugin` where it
        is blocked or off, `UnknownName` else. oarlock's own names are never taken by a plugin that claims them too.
        """
        registry, wanted = self.registries.of(kind), fold(name)
        if name in registry and registry.owner(name).startswith(f"{_OWN} "):
            return registry.get(name)
        for info in self.infos:
            if info.state == "broken" and wanted in map(fold, info.registered.get(kind, ())):
                raise errors.BrokenPlugin(info.name, info.distribution, info.version, info.reason)
        if name not in registry:
            self._explain(name)
        return registry.get(name)

    def _explain(self, name: str) -> None:
        for info in self.infos:
            if fold(info.name) == fold(name) and info.state != "active":
                error = errors.BrokenPlugin if info.state == "broken" else errors.DisabledPlugin
                raise error(info.name, info.distribution, info.version, info.reason)


_OWN = hookspecs.PROJECT


@attrs.frozen
class _Found:
    """An entry point of the group, with the distribution that brings it."""

    entry: importlib.metadata.EntryPoint
    info: PluginInfo


def discover() -> list[_Found]:
    """Read the metadata of what is installed; nothing is imported.

    A distribution that is visible twice counts once: the first on the path, which is the one that imports.
    """
    seen: set[str] = set()
    found: list[_Found] = []
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
            entries = set(distribution.entry_points.select(group=hookspecs.PROJECT))
        except Exception as error:  # the metadata of others may be half deleted or not parse
            log.warning("distribution_unreadable", distribution=str(distribution), error=repr(error))
            continue
        if not name or fold(name) in seen:
            continue
        seen.add(fold(name))
        for entry in entries:
            info = PluginInfo(name=entry.name, distribution=name, version=version, value=entry.value)
            found.append(_Found(entry, info))
    return sorted(found, key=lambda f: (fold(f.info.distribution) != _OWN, fold(f.info.distribution), f.info.name))


def list_plugins(disable: Iterable[str] = ()) -> list[PluginInfo]:
    """Return what is installed, with the state "installed" or "blocked". Imports no plugin."""
    blocked = set(map(fold, disable))
    return [_blocked(found.info, blocked) or found.info for found in discover()]


def _blocked(info: PluginInfo, blocked: set[str]) -> PluginInfo | None:
    if blocked.isdisjoint((fold(info.name), fold(info.distribution))):
        return None
    return attrs.evolve(info, state="blocked", reason="named in plugins.disable, or by a flag")


def build(
    config: EngineConfig | None = None, *, plugins: Sequence[Any] = (), disable: Iterable[str] = ()
) -> PluginSet:
    """Load every installed plugin that is not blocked, then ``plugins`` (modules or objects), which must be sound.

    ``disable`` adds to ``plugins.disable`` of the config: names of plugins or of whole distributions. Raises
    `RequirementUnmet`, `UnknownName` and `BrokenPlugin` for what ``plugins.require`` and ``plugins.enable`` name.
    """
    settings = (config or EngineConfig()).plugins
    for requirement in settings.require:
        check_requirement(requirement)
    manager, registries = _manager(), Registries()
    blocked, enabled = set(map(fold, (*settings.disable, *disable))), set(map(fold, settings.enable))
    infos = []
    for found in discover():
        info = _blocked(found.info, blocked) or _load(found, manager, registries, enabled)
        if info.state == "broken":
            log.warning("plugin_broken", plugin=info.name, distribution=info.distribution, reason=info.reason)
        infos.append(info)
    _check_named(settings.disable, settings.enable, infos)
    for plugin in plugins:
        infos.append(_add_argument(plugin, manager, registries))
    return PluginSet(manager, registries, tuple(infos))


def _check_named(disable: Iterable[str], enable: Iterable[str], infos: Sequence[PluginInfo]) -> None:
    by_name = {fold(info.name): info for info in infos}
    distributions = {fold(info.distribution) for info in infos}
    for name in disable:
        if fold(name) not in by_name and fold(name) not in distributions:
            log.warning("plugin_unknown", key="plugins.disable", plugin=name)
    for name in enable:
        info = by_name.get(fold(name))
        if info is None:
            raise errors.UnknownName("plugin", name, [known.name for known in infos])
        if info.state == "broken":
            raise errors.BrokenPlugin(info.name, info.distribution, info.version, info.reason)


def check_requirement(requirement: str) -> None:
    """Raise `RequirementUnmet` unless an installed distribution meets a PEP 508 requirement."""
    from packaging.requirements import InvalidRequirement, Requirement  # not ours, though mlx-lm brings it: asked late

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement as error:
        raise errors.InvalidConfigValue("plugins.require", requirement, f"PEP 508 requirements ({error})") from error
    if wanted.marker is not None and not wanted.marker.evaluate():
        return
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        raise errors.RequirementUnmet(requirement, "no such distribution") from None
    if not wanted.specifier.contains(version, prereleases=True):
        raise errors.RequirementUnmet(requirement, f"{wanted.name} {version}")


# --- loading one plugin -----------------------------------------------------------------------------------


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


@attrs.define
class _Trial:
    """One plugin on trial: nothing reaches the shared manager and registries before all of it is sound."""

    name: str
    owner: str
    plugin: Any = None
    module: ModuleType | None = None
    api: int | None = None
    items: dict[str, list[Any]] = attrs.field(factory=dict)

    def off(self) -> bool:
        return bool(self._declared("OARLOCK_OFF_BY_DEFAULT", False))

    def check_api(self) -> None:
        declared = self._declared("OARLOCK_API", hookspecs.OARLOCK_API)
        if type(declared) is not int or declared != hookspecs.OARLOCK_API:
            raise errors.ApiMismatch(self.name, declared, hookspecs.OARLOCK_API)
        self.api = declared

    def collect(self) -> None:
        """Check every hook against the specifications, then call those that register."""
        trial = _manager()
        _check_hooks(trial, self.name, self.owner, self.plugin)
        trial.register(self.plugin, self.name)
        for attribute in attrs.fields(Registries):
            registry = getattr(Registries(), attribute.name)
            getattr(trial.hook, f"register_{attribute.name}")(register=self._register(registry.kind, registry.check))

    def commit(self, manager: pluggy.PluginManager, registries: Registries) -> None:
        registries.add_all(self.items, self.owner)
        if not manager.is_registered(self.plugin):  # one object may stand behind two entry points
            manager.register(self.plugin, self.owner)

    def names(self) -> dict[str, tuple[str, ...]]:
        return {kind: tuple(item.name for item in items) for kind, items in self.items.items()}

    def _register(self, kind: str, check: Callable[[Any, str], str]) -> Callable[[Any], None]:
        def register(item: Any) -> None:
            check(item, self.owner)
            self.items.setdefault(kind, []).append(item)

        return register

    def _declared(self, name: str, default: object) -> object:
        return getattr(self.plugin, name, getattr(self.module, name, default))


def _load(found: _Found, manager: pluggy.PluginManager, registries: Registries, enabled: set[str]) -> PluginInfo:
    """Load one entry point; whatever it raises ends here."""
    info = found.info
    trial = _Trial(info.name, info.owner)
    try:
        trial.plugin = found.entry.load()
        trial.module = sys.modules.get(found.entry.module)
        trial.check_api()
        if trial.off() and fold(info.name) not in enabled:
            return attrs.evolve(info, state="off", reason="off unless named in plugins.enable", api=trial.api)
        trial.collect()
        trial.commit(manager, registries)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and what test runners raise stop nobody else
        reason = _reason(error, found)
        return attrs.evolve(info, state="broken", reason=reason, api=trial.api, registered=trial.names())
    return attrs.evolve(info, state="active", api=trial.api, registered=trial.names())


def _add_argument(plugin: Any, manager: pluggy.PluginManager, registries: Registries) -> PluginInfo:
    """Load a plugin that the caller passed; whatever is wrong with it is raised."""
    name = getattr(plugin, "__name__", type(plugin).__name__)
    info = PluginInfo(name=name, distribution="argument", version="", value=name, state="active")
    trial = _Trial(name, info.owner, plugin)
    trial.check_api()
    trial.collect()
    trial.commit(manager, registries)
    return attrs.evolve(info, api=trial.api, registered=trial.names())


def _reason(error: BaseException, found: _Found) -> str:
    text = str(error).strip() or "no message"
    reason = text if isinstance(error, errors.PluginError) else f"{type(error).__name__}: {text}"
    if isinstance(error, ImportError) and "[" in found.entry.value:
        extras = found.entry.value.partition("[")[2].rstrip("] ")
        reason += f"; install '{found.info.distribution}[{extras}]'"
    return reason


def _implementations(manager: pluggy.PluginManager, plugin: Any) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            yield options.get("specname") or attribute, options, getattr(plugin, attribute)


def _check_hooks(manager: pluggy.PluginManager, name: str, owner: str, plugin: Any) -> None:
    """Raise `UnknownHook` for the first hook that could not be called as specified."""
    known = {hook for hook in vars(manager.hook) if not hook.startswith("_")}
    implementations = list(_implementations(manager, plugin))
    if not implementations:
        raise errors.InvalidPlugin(owner, "plugin", plugin, "a module or object with functions marked @hookimpl")
    for hook, options, function in implementations:
        if hook not in known:
            if options["optionalhook"]:
                continue
            raise errors.UnknownHook(name, hook, f"no such hook{errors.did_you_mean(hook, known)}")
        _check_arguments(name, hook, function, getattr(manager.hook, hook).spec.argnames)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise errors.UnknownHook(name, hook, "it is a coroutine function, and hooks are called synchronously")
        if hook in hookspecs.OBSERVERS and (options["wrapper"] or options["hookwrapper"]):
            raise errors.UnknownHook(name, hook, "it is a wrapper, and observers are called one by one")


def _check_arguments(name: str, hook: str, function: Callable[..., Any], allowed: Sequence[str]) -> None:
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            continue
        if argument.default is not argument.empty:
            if argument.name in allowed:  # pluggy passes no argument that has a default
                raise errors.UnknownHook(name, hook, f"argument {argument.name!r} has a default, so it never arrives")
        elif argument.name not in allowed or argument.kind is argument.KEYWORD_ONLY:
            raise errors.UnknownHook(name, hook, f"no argument {argument.name!r}; it has {', '.join(allowed)}")
