"""What is kept of rows outside the running group: prefixes of prompts that were computed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.errors import InvalidConfigValue
from oarlock.plugins.state_cache.disk import Directory
from oarlock.plugins.state_cache.persistent import PersistentCache
from oarlock.plugins.state_cache.prefixes import PrefixCache

OARLOCK_API = 1


@attrs.frozen
class Memory:
    """Registers as ``memory``: ``state_cache.prefix_bytes`` of states, engine by engine, and directories that are named."""

    name: str = "memory"

    def open(self, bound: Any) -> PrefixCache:
        """Return a cache for a bound model, empty but for what its directories hold.

        Raises `errors.InvalidConfigValue` for a directory that cannot be used, and where nobody knows the weights.
        """
        settings = bound.config.state_cache
        if not (settings.disk or settings.checkpoints):
            return PrefixCache(bound.layers, settings.prefix_bytes)
        disk = _directory(bound, "state_cache.disk", settings.disk)
        apart = settings.checkpoints not in ("", settings.disk)
        checkpoints = _directory(bound, "state_cache.checkpoints", settings.checkpoints) if apart else disk
        return PersistentCache(bound.layers, settings.prefix_bytes, disk, checkpoints)


def _directory(bound: Any, key: str, path: str) -> Directory | None:
    """Return the directory that the setting ``key`` names, if any."""
    if not path:
        return None
    if not bound.identity:
        allowed = "models with an identity: load them by path, or name their weights with Engine(identity=...)"
        raise InvalidConfigValue(key, path, allowed)
    try:
        return Directory(Path(path), bound.config.state_cache.disk_bytes)
    except OSError as error:
        allowed = f"directories that can be written to ({error.strerror})"
        raise InvalidConfigValue(key, path, allowed) from error


@hookimpl
def register_state_caches(register: Callable[[object], None]) -> None:
    """Register `memory`."""
    register(Memory())
