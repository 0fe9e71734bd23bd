"""Build the plugins of an engine, and say what became of each. It knows no plugin by name.

One broken plugin never stops another: it leaves no trace in the registries and is listed with its reason. Order is
oarlock's own distribution first, then by distribution and plugin name, so the disk's order decides nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pluggy
import structlog

from oarlock.core import errors
from oarlock.core.config import EngineConfig
from oarlock.core.discovery import PluginInfo, discover, hook_manager, load_argument, load_installed
from oarlock.core.registry import Registries, fold

log = structlog.get_logger(__name__)


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
        if name in registry and self._built_in(registry.owner(name)):
            return registry.get(name)
        for info in self.infos:
            if info.state == "broken" and wanted in map(fold, (info.name, *info.registered.get(kind, ()))):
                raise info.named()
        for info in self.infos:
            if info.state in ("blocked", "off") and wanted == fold(info.name) and name not in registry:
                raise info.named()
        return registry.get(name)

    def _built_in(self, owner: str) -> bool:
        return any(info.built_in and info.owner == owner for info in self.infos)


def list_plugins(disable: Iterable[str] = ()) -> list[PluginInfo]:
    """Return what is installed, with the state "installed" or "blocked". Imports no plugin."""
    blocked = set(map(fold, disable))
    return [_blocked(found.info, blocked) or found.info for found in discover()]


def _blocked(info: PluginInfo, blocked: set[str]) -> PluginInfo | None:
    if blocked.isdisjoint((fold(info.name), fold(info.distribution))):
        return None
    return attrs.evolve(info, state="blocked", reason="named in plugins.disable, or by a flag")


def build(config: EngineConfig | None = None, *, plugins: Sequence[Any] = (), disable: Iterable[str] = ()) -> PluginSet:
    """Load every installed plugin that is not blocked, then ``plugins`` (modules or objects), which must be sound.

    ``disable`` adds to ``plugins.disable`` of the config: names of plugins or of whole distributions. Raises
    `RequirementUnmet`, `UnknownName` and `BrokenPlugin` for what ``plugins.require`` and ``plugins.enable`` name.
    """
    settings = (config or EngineConfig()).plugins
    for requirement in settings.require:
        check_requirement(requirement)
    manager, registries = hook_manager(), Registries()
    blocked, enabled = set(map(fold, (*settings.disable, *disable))), set(map(fold, settings.enable))
    infos = []
    for found in discover():
        info = _blocked(found.info, blocked) or load_installed(found, manager, registries, enabled)
        if info.state == "broken":
            log.warning("plugin_broken", plugin=info.name, distribution=info.distribution, reason=info.reason)
        infos.append(info)
    _check_named(settings.disable, settings.enable, infos)
    passed = [load_argument(plugin, manager, registries) for plugin in plugins]
    return PluginSet(manager, registries, (*infos, *passed))


def _check_named(disable: Iterable[str], enable: Iterable[str], infos: Sequence[PluginInfo]) -> None:
    for name in disable:
        if all(_blocked(info, {fold(name)}) is None for info in infos):
            log.warning("plugin_unknown", key="plugins.disable", plugin=name)
    for name in enable:
        meant = [info for info in infos if fold(info.name) == fold(name)]
        if not meant:
            raise errors.UnknownName("plugin", name, [info.name for info in infos])
        for info in meant:
            if info.state == "broken":
                raise info.named()


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


# --- checking: each plugin in a child process, so that nothing it does reaches this one --------------------

_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from oarlock.core.manager import _child; _child()"


def check_plugins(disable: Iterable[str] = (), *, timeout: float = 60.0) -> list[PluginInfo]:
    """Return what `list_plugins` does, after importing each plugin that is not blocked in a child process.

    Adds what it registers, its API number and why it is broken. A child that takes longer than ``timeout`` seconds
    is ended, with everything that it started.
    """
    infos = list_plugins(disable)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        checked = pool.map(lambda info: info if info.state == "blocked" else _check(info, timeout), infos)
        return _mark_duplicates(list(checked))


def _check(info: PluginInfo, timeout: float) -> PluginInfo:
    with tempfile.TemporaryDirectory() as folder:
        answer, messages = Path(folder, "answer.json"), Path(folder, "stderr")
        # Files, not pipes: a pipe stays open as long as anything that the plugin started holds it.
        arguments = [json.dumps(sys.path), str(answer), info.distribution, info.name, info.value]
        with messages.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", _CHILD, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            ended = f"its process ended with code {child.wait(timeout)}"
        except subprocess.TimeoutExpired:
            ended = f"its import took longer than {timeout:g} s"
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if answer.exists():
            return PluginInfo(**json.loads(answer.read_text(encoding="utf-8")))
        last = messages.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return attrs.evolve(info, state="broken", reason=f"{ended}: {last}" if last else ended)


def _child() -> None:
    """Load one plugin in this process, write what became of it, and end at once, whatever threads it started."""
    target, *wanted = sys.argv[2:]
    manager, registries = hook_manager(), Registries()
    for found in discover():
        if [found.info.distribution, found.info.name, found.info.value] == wanted:
            answer = load_installed(found, manager, registries, set()).as_dict()
            Path(target).with_suffix(".part").write_text(json.dumps(answer), encoding="utf-8")
            Path(target).with_suffix(".part").rename(target)
    os._exit(0)


def _mark_duplicates(infos: list[PluginInfo]) -> list[PluginInfo]:
    """Mark the second of two plugins that claim one name, as `build` would: the children saw one plugin each."""
    first: dict[tuple[str, str], PluginInfo] = {}
    for place, info in enumerate(infos):
        claims = [(kind, name) for kind, names in info.registered.items() for name in names]
        for kind, name in claims if info.state == "active" else ():
            other = first.get((kind, fold(name)))
            if other is not None and other.value != info.value:
                reason = str(errors.DuplicateName(kind, name, other.owner, info.owner))
                infos[place] = attrs.evolve(info, state="broken", reason=reason)
                break
        else:
            if info.state == "active":
                first.update({(kind, fold(name)): info for kind, name in claims})
    return infos
