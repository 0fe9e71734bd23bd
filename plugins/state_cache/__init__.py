"""What is kept of rows outside the running group: prefixes of prompts that were computed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.errors import InvalidConfigValue
from oarlock.plugins.state_cache.persistent import PersistentCache
from oarlock.plugins.state_cache.prefixes import PrefixCache

OARLOCK_API = 1


@attrs.frozen
class Memory:
    """Registers as ``memory``: ``state_cache.prefix_bytes`` of states, engine by engine, and a directory where one is named."""

    name: str = "memory"

    def open(self, bound: Any) -> PrefixCache:
        """Return a cache for a bound model, empty but for what the directory ``state_cache.disk`` holds.

        Raises `errors.InvalidConfigValue` for a directory that cannot be used, and where nobody knows the weights.
        """
        settings = bound.config.state_cache
        if not settings.disk:
            return PrefixCache(bound.layers, settings.prefix_bytes)
        if not bound.identity:
            allowed = "models with an identity: load them by path, or name their weights with Engine(identity=...)"
            raise InvalidConfigValue("state_cache.disk", settings.disk, allowed)
        try:
            return PersistentCache(bound.layers, settings.prefix_bytes, Path(settings.disk), settings.disk_bytes)
        except OSError as error:
            allowed = f"directories that can be written to ({error.strerror})"
            raise InvalidConfigValue("state_cache.disk", settings.disk, allowed) from error


@hookimpl
def register_state_caches(register: Callable[[object], None]) -> None:
    """Register `memory`."""
    register(Memory())
