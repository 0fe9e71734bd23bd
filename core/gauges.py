"""What an engine says of itself when asked. It measures nothing and keeps nothing."""

from __future__ import annotations

from typing import Any

from oarlock.core.driver import Driver
from oarlock.core.recording import memory


def gauges(driver: Driver) -> dict[str, Any]:
    """Return rows, bytes and counters. Legal from any thread.

    ``kv_bytes`` are allocated for running rows, ``kv_live_bytes`` of them hold tokens; ``active_bytes``, ``peak_bytes``
    and ``cache_bytes`` are the allocator's. ``kv_budget`` is in bytes, None without one.
    """
    return {
        "active_rows": driver.active,
        "pending_rows": driver.queued + driver.preparing_rows,
        "preparing_rows": driver.preparing_rows,
        "kv_bytes": driver.group.kv_bytes,
        "kv_live_bytes": driver.group.kv_live_bytes,
        **memory(),
        "delivered_tokens": driver.emitter.delivered,
        "recoveries": driver.group.recovery.recoveries,
        "retries": driver.group.recovery.retries,
        "mixed_forwards": driver.group.log.mixed_forwards,
        "verified_forwards": driver.group.log.verified_forwards,
        "drafted_tokens": driver.group.log.drafted_tokens,
        "accepted_tokens": driver.group.log.accepted_tokens,
        "compiled_steps": driver.group.compiled.steps,
        "compiled_traces": driver.group.compiled.traces,
        "preemptions": driver.relief.preemptions,
        "kv_budget": driver.relief.budget.limit,
    }
