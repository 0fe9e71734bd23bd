"""Find plugins by their metadata, and load one in isolation. It does not choose which, and keeps none.

Nothing of a plugin stays in the shared hook manager and registries unless all of it is sound.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import attrs
import pluggy
import structlog

from oarlock.core import errors, hookspecs
from oarlock.core.registry import Registries, fold

log = structlog.get_logger(__name__)


def _names(given: Mapping[str, Sequence[str]]) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({kind: tuple(names) for kind, names in given.items()})


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
    registered: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_names)

    @property
    def owner(self) -> str:
        """The plugin as messages name it: "distribution version (plugin)"."""
        return f"{f'{self.distribution} {self.version}'.rstrip()} ({self.name})"

    @property
    def built_in(self) -> bool:
        """True for what oarlock's own distribution brings: it comes first, and nobody takes its names."""
        return fold(self.distribution) == hookspecs.PROJECT

    def named(self) -> Exception:
        """Return the error for whoever names this plugin, or what it registers, though it is not active."""
        error = errors.BrokenPlugin if self.state == "broken" else errors.DisabledPlugin
        return error(self.name, self.distribution, self.version, self.reason)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(PluginInfo)}
        return {**fields, "registered": {kind: list(names) for kind, names in self.registered.items()}}


@attrs.frozen
class Found:
    """An entry point of the group, with the distribution that brings it."""

    entry: importlib.metadata.EntryPoint
    info: PluginInfo


def discover() -> list[Found]:
    """Read the metadata of what is installed; nothing is imported.

    A distribution that is visible twice counts once: the first on the path, which is the one that imports.
    """
    seen: set[str] = set()
    found: list[Found] = []
    for distribution in importlib.metadata.distributions():
        try:
            if not distribution.entry_points.select(group=hookspecs.PROJECT):
                continue  # before its name is read: to parse the metadata of all that is installed takes long
            name = distribution.metadata["Name"]
            if not name or fold(name) in seen:
                continue
            seen.add(fold(name))
            first = importlib.metadata.distribution(name)
            version, entries = first.version, set(first.entry_points.select(group=hookspecs.PROJECT))
        except Exception as error:  # noqa: BLE001 - the metadata of others may be half deleted or not parse
            log.warning("distribution_unreadable", distribution=str(distribution), error=repr(error))
            continue
        for entry in entries:
            info = PluginInfo(name=entry.name, distribution=name, version=version, value=entry.value)
            found.append(Found(entry, info))
    return sorted(found, key=lambda f: (not f.info.built_in, fold(f.info.distribution), f.info.name, f.info.value))


def hook_manager() -> pluggy.PluginManager:
    """Return a manager that knows oarlock's hooks and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


@attrs.define
class _Trial:
    """One plugin on trial: nothing of it stays in the manager and the registries unless all of it is sound."""

    name: str
    owner: str
    plugin: Any = None
    module: ModuleType | None = None
    api: int | None = None
    items: dict[str, list[Any]] = attrs.field(factory=dict)
    names: dict[str, list[str]] = attrs.field(factory=dict)

    def check_api(self) -> None:
        declared = self.declared("OARLOCK_API", hookspecs.OARLOCK_API)
        if type(declared) is not int or declared != hookspecs.OARLOCK_API:
            raise errors.ApiMismatch(self.name, declared, hookspecs.OARLOCK_API)
        self.api = declared

    def load(self, manager: pluggy.PluginManager, registries: Registries) -> None:
        """Check every hook, call those that register, then add everything, or raise and add nothing."""
        if any(self.plugin is other for other in manager.get_plugins()):
            return  # one object behind two entry points, or installed and passed as well
        _check_hooks(manager, self.name, self.owner, self.plugin)
        manager.register(self.plugin, self.owner)
        try:
            self._collect(manager)
            registries.add_all(self.items, self.owner)
        except BaseException:
            manager.unregister(self.plugin)
            raise

    def _collect(self, manager: pluggy.PluginManager) -> None:
        """Call the hooks by which this plugin, and no other, registers."""
        scratch = Registries()
        for attribute in attrs.fields(Registries):
            hook, registry = f"register_{attribute.name}", getattr(scratch, attribute.name)
            others = [
                each.plugin for each in getattr(manager.hook, hook).get_hookimpls() if each.plugin is not self.plugin
            ]
            manager.subset_hook_caller(hook, others)(register=self._register(registry.kind, registry.check))

    def _register(self, kind: str, check: Callable[[Any, str], str]) -> Callable[[Any], None]:
        def register(item: Any) -> None:
            self.names.setdefault(kind, []).append(str(getattr(item, "name", "(none)")))
            check(item, self.owner)
            self.items.setdefault(kind, []).append(item)

        return register

    def declared(self, name: str, default: object) -> object:
        """Return what the plugin declares under a name, or the module that it stands in."""
        return getattr(self.plugin, name, getattr(self.module, name, default))


def load_installed(
    found: Found, manager: pluggy.PluginManager, registries: Registries, enabled: set[str]
) -> PluginInfo:
    """Load one entry point; whatever it raises ends here."""
    info = found.info
    trial = _Trial(info.name, info.owner)
    try:
        trial.plugin = found.entry.load()
        trial.module = sys.modules.get(found.entry.module)
        trial.check_api()
        if trial.declared("OARLOCK_OFF_BY_DEFAULT", False) and fold(info.name) not in enabled:
            return attrs.evolve(info, state="off", reason="off unless named in plugins.enable", api=trial.api)
        trial.load(manager, registries)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit, and what test runners raise, stop nobody else
        reason = _reason(error, found)
        return attrs.evolve(info, state="broken", reason=reason, api=trial.api, registered=trial.names)
    return attrs.evolve(info, state="active", api=trial.api, registered=trial.names)


def load_argument(plugin: Any, manager: pluggy.PluginManager, registries: Registries) -> PluginInfo:
    """Load a plugin that the caller passed; whatever is wrong with it is raised."""
    value = getattr(plugin, "__name__", type(plugin).__name__)
    info = PluginInfo(name=value, distribution="argument", version="", value=value, state="active")
    for number in itertools.count(2):  # several instances of one class are several plugins
        if not manager.has_plugin(info.owner):
            break
        info = attrs.evolve(info, name=f"{value} #{number}")
    trial = _Trial(info.name, info.owner, plugin)
    trial.check_api()
    trial.load(manager, registries)
    return attrs.evolve(info, api=trial.api, registered=trial.names)


def _reason(error: BaseException, found: Found) -> str:
    """Return one line, whatever the foreign error is made of."""
    try:
        text = " ".join(str(error).split()) or "no message"
    except Exception:  # noqa: BLE001 - its __str__ is foreign code as well
        text = "its message cannot be shown"
    reason = text if isinstance(error, errors.PluginError) else f"{type(error).__name__}: {text}"
    if isinstance(error, ImportError) and found.entry.extras:
        reason += f"; install '{found.info.distribution}[{','.join(found.entry.extras)}]'"
    return reason


def _check_hooks(manager: pluggy.PluginManager, plugin_name: str, owner: str, plugin: Any) -> None:
    """Raise `UnknownHook` for the first hook that could not be called as specified."""
    known = {hook for hook in vars(manager.hook) if not hook.startswith("_")}
    marked = {name: options for name in dir(plugin) if (options := manager.parse_hookimpl_opts(plugin, name))}
    if not marked:
        raise errors.InvalidPlugin(owner, "plugin", plugin, "a module or object with functions marked @hookimpl")
    for attribute, options in marked.items():
        hook, function = options.get("specname") or attribute, getattr(plugin, attribute)
        if hook not in known:
            if options["optionalhook"]:
                continue
            raise errors.UnknownHook(plugin_name, hook, f"no such hook{errors.did_you_mean(hook, known)}")
        _check_arguments(plugin_name, hook, function, getattr(manager.hook, hook).spec.argnames)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise errors.UnknownHook(
                plugin_name, hook, "it is a coroutine function, and hooks are called synchronously"
            )
        if hook in hookspecs.OBSERVERS and (options["wrapper"] or options["hookwrapper"]):
            raise errors.UnknownHook(plugin_name, hook, "it is a wrapper, and observers are called one by one")


def _check_arguments(name: str, hook: str, function: Callable[..., Any], allowed: Sequence[str]) -> None:
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            continue
        if argument.default is not argument.empty:
            if argument.name in allowed:  # pluggy passes no argument that has a default
                raise errors.UnknownHook(name, hook, f"argument {argument.name!r} has a default, so it never arrives")
        elif argument.name not in allowed or argument.kind is argument.KEYWORD_ONLY:
            raise errors.UnknownHook(name, hook, f"no argument {argument.name!r}; it has {', '.join(allowed)}")
