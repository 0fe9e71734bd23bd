"""What an engine says of itself when asked. It measures nothing and keeps nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from oarlock.core.driver import Driver
from oarlock.core.recording import memory


def gauges(driver: Driver) -> dict[str, Any]:
    """Return rows, bytes and counters. Legal from any thread.

    ``kv_bytes`` are allocated for running rows, by layout in ``kv_bytes_by_layout``; ``kv_live_bytes`` of them hold tokens; ``active_bytes``, ``peak_bytes``
    and ``cache_bytes`` are the allocator's. ``kv_budget`` is in bytes, None without one. ``drafted_by_position`` and
    ``accepted_by_position`` count drafts that were the first of their window, the second, and so on;
    ``tokens_per_verify`` is what a forward that verified drafts gave all its rows on average, 0 without any.
    """
    log = driver.group.log
    held = driver.group.kv_bytes
    drafted, accepted = _by_position(log.drafted), _by_position(log.accepted)
    return {
        "active_rows": driver.active,
        "pending_rows": driver.queued + driver.preparing_rows,
        "preparing_rows": driver.preparing_rows,
        "kv_bytes": sum(held.values()),
        "kv_bytes_by_layout": dict(held),
        "kv_live_bytes": driver.group.kv_live_bytes,
        **memory(),
        "delivered_tokens": driver.emitter.delivered,
        "recoveries": driver.group.recovery.recoveries,
        "retries": driver.group.recovery.retries,
        "mixed_forwards": log.mixed_forwards,
        "verified_forwards": log.verified_forwards,
        "drafted_tokens": sum(drafted),
        "accepted_tokens": sum(accepted),
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
        "tokens_per_verify": log.verified_tokens / max(1, log.verified_forwards),
        "compiled_steps": driver.group.compiled.steps,
        "compiled_traces": driver.group.compiled.traces,
        "preemptions": driver.relief.preemptions,
        "kv_budget": driver.relief.budget.limit,
    }


def _by_position(counts: Counter[int]) -> list[int]:
    """Return the counts of 0, 1 and so on, up to the last that was counted; the driving thread may be counting."""
    return [counts[position] for position in range(len(counts))]
