"""What the settings that say "auto" stand for on the device at hand. It composes nothing.

A CPU hardly returns from dispatching a step before the work is done: a step that is read late gains nothing there, and
tokens come a step late. Its forwards take time by the token, so what a running row waits for goes by their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core.config import EngineConfig

MEANT: Mapping[Any, Mapping[str, Any]] = {
    mx.cpu: {"pipeline": False, "mixed_token_budget": 64},
    mx.gpu: {"pipeline": True, "mixed_token_budget": 256},
}
"""By device, settings of ``[scheduler]``; those of a CPU were measured (``benchmarks/arrivals.py``), no GPU was."""


def settled(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with what it leaves to the default device."""
    meant = MEANT[mx.default_device().type]
    chosen = {name: value for name, value in meant.items() if getattr(config.scheduler, name) == "auto"}
    return attrs.evolve(config, scheduler=attrs.evolve(config.scheduler, **chosen)) if chosen else config
