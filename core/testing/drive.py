"""Ways in which requests come to an engine. It judges no result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oarlock.core.engine import Engine
from oarlock.core.handle import Handle
from oarlock.core.request import Request


def arrive(engine: Engine, requests: Sequence[Request], every: int = 0) -> list[Any]:
    """Submit all at once, or one more after each ``every`` steps; run to the end; return the results in order."""
    handles: list[Handle] = []
    waiting = list(requests)
    while waiting or not all(handle.done for handle in handles):
        for request in waiting[: 1 if every else None]:
            handles.append(engine.submit(request))
            waiting.remove(request)
        for _ in range(max(1, every)):
            engine.step()
    return [handle.result() for handle in handles]
