"""Thousands of random schedules against the invariants of DESIGN 6. A failure names its schedule: run that number."""

from __future__ import annotations

from collections import Counter

import pytest
from harness.schedule import run

PHASES = ("idle", "preparing", "running", "both")
WHOSE = {
    "idle": {"submit", "hold", "release", "close", "task", "task raises", "cancel task", "cancel queued", "cancel ended",
             "admission raises", "state cache raises", "end callback raises"},
    "preparing": {"cancel preparing"},
    "running": {"cancel running"},
    "both": {"cancel preparing", "cancel running", "merge raises"},
}  # fmt: skip
"""Which events can happen in a phase, apart from those that can happen in all but "idle"."""
RESTRICTED = {"cancel preparing", "cancel running", "merge raises"}
AT_LEAST = 20


def possible(event: str, phase: str) -> bool:
    if phase == "idle" or event in RESTRICTED:
        return event in WHOSE[phase]
    return True


def run_all(numbers, tools):
    """Run schedules by number, print what they did, and return nothing thin."""
    table, occupancy, steps, requests, mixed = Counter(), Counter(), Counter(), 0, 0
    for number in numbers:
        report = run(number, tools)
        table += report.table
        occupancy += report.occupancy
        steps += report.steps
        requests += report.requests
        mixed += report.mixed
    events = sum(table.values())
    print(
        f"\n{len(numbers)} schedules, {requests} requests, {events} events, {mixed} mixed forwards; "
        f"rows per step {dict(sorted(occupancy.items()))}"
    )
    assert mixed > 4 * len(numbers)
    print(f"{'':24}" + "".join(f"{phase:>11}" for phase in PHASES))
    for event in sorted({event for event, _ in table}):
        cells = (str(table[event, phase]) if possible(event, phase) else "-" for phase in PHASES)
        print(f"{event:24}" + "".join(f"{cell:>11}" for cell in cells))
    return table, steps, requests / len(numbers), events / len(numbers)


@pytest.mark.timeout(1800)
def test_two_thousand_schedules_hold_every_invariant(tools):
    """Every request settles once and as it would alone, nobody starves or stalls, and nothing is left over."""
    table, steps, requests, events = run_all(range(2000), tools)
    assert requests >= 6
    assert events >= 8
    known = {event for event, _ in table}
    assert len(known) == 22
    assert len(steps) == 16, "each policy runs in each phase"
    assert min(steps.values()) >= AT_LEAST
    thin = [(e, p, table[e, p]) for e in sorted(known) for p in PHASES if possible(e, p) and table[e, p] < AT_LEAST]
    assert not thin, f"too few of (event, phase): {thin}"
    assert not [cell for cell in table if not possible(*cell)]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_thousand_schedules(tools):
    """The same, ten times as many, none of them the same."""
    run_all(range(2000, 22_000), tools)


def test_a_schedule_is_its_number(tools):
    """The same number does the same again: what fails can be repeated."""
    first, second = run(7, tools), run(7, tools)
    assert (first.table, first.occupancy) == (second.table, second.occupancy)
