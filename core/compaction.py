"""Where rows go when others leave. Pure; it moves none."""

from __future__ import annotations

from collections.abc import Sequence


def compacted(survivors: Sequence[int], total: int) -> list[int]:
    """Return the order after a leave: the last rows move into the holes, everyone else stays in place."""
    alive = set(survivors)
    movers = [i for i in survivors if i >= len(survivors)]
    return [i if i in alive else movers.pop() for i in range(len(survivors))] if total else []
