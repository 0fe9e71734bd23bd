"""Thousands of random schedules against the invariants of DESIGN 6. A failure names its schedule: run that number."""

from __future__ import annotations

from collections import Counter

import pytest
from harness.schedule import run
from harness.shrink import shrunk

PHASES = ("idle", "preparing", "running", "both", "rebuilding")
ANYWHERE = ("submit", "hold", "release", "close", "task", "task raises", "cancel task", "cancel queued", "cancel ended",
            "state cache raises", "end callback raises", "end raises", "never fits")  # fmt: skip
WHOSE = {
    "idle": {*ANYWHERE, "admission raises"},
    "preparing": {"cancel preparing", "preempted"},
    "running": {"cancel running", "consumer lags", "preempted"},
    "both": {"cancel preparing", "cancel running", "consumer lags", "merge raises", "preempted"},
    "rebuilding": {*ANYWHERE, "cancel running", "cancel rebuilding", "NaN row", "poisoned row", "forward raises",
                   "device fails over a row", "forward raises half way", "sampler raises", "callback stops",
                   "callback raises", "consumer lags", "preempted"},
}  # fmt: skip
"""Which events can happen in a phase, apart from those that can happen in all but "idle" and "rebuilding"."""
RESTRICTED = {"cancel preparing", "cancel running", "cancel rebuilding", "consumer lags", "merge raises", "preempted"}
AT_LEAST = 20
TABLE = range(3000)
"""These say of each event and phase that it happened."""
QUICK = tuple(range(start, start + 500) for start in range(3000, 5000, 500))
LONG = tuple(range(start, start + 2500) for start in range(5000, 50_000, 2500))


def possible(event: str, phase: str) -> bool:
    if phase in ("idle", "rebuilding") or event in RESTRICTED:
        return event in WHOSE[phase]
    return True


def run_all(numbers, tools):
    """Run schedules by number, print what they did, and return it; what fails is written down as a test."""
    table, occupancy, steps, requests, mixed = Counter(), Counter(), Counter(), 0, 0
    for number in numbers:
        try:
            report = run(number, tools)
        except AssertionError as error:
            pytest.fail(f"{error}\n\n{shrunk(number, tools)}")
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
    assert mixed > len(numbers)
    assert requests >= 6 * len(numbers)
    assert events >= 8 * len(numbers)
    assert not [cell for cell in table if not possible(*cell)]
    print(f"{'':24}" + "".join(f"{phase:>11}" for phase in PHASES))
    for event in sorted({event for event, _ in table}):
        cells = (str(table[event, phase]) if possible(event, phase) else "-" for phase in PHASES)
        print(f"{event:24}" + "".join(f"{cell:>11}" for cell in cells))
    return table, steps


@pytest.mark.first
@pytest.mark.timeout(1800)
def test_every_event_happens_in_every_phase(tools):
    """Every request settles once and as it would alone, nobody starves or stalls, and nothing is left over."""
    table, steps = run_all(TABLE, tools)
    known = {event for event, _ in table}
    assert len(known) == 30
    assert len(steps) == 16, "each policy runs in each phase"
    assert min(steps.values()) >= AT_LEAST
    thin = [(e, p, table[e, p]) for e in sorted(known) for p in PHASES if possible(e, p) and table[e, p] < AT_LEAST]
    assert not thin, f"too few of (event, phase): {thin}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("numbers", QUICK, ids=str)
def test_more_schedules_hold_every_invariant(numbers, tools):
    """The same, none of them the same."""
    run_all(numbers, tools)


@pytest.mark.long
@pytest.mark.first
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("numbers", LONG, ids=str)
def test_fifty_thousand_schedules_hold_every_invariant(numbers, tools):
    """All of them together, those of the shorter tests included."""
    run_all(numbers, tools)


def test_a_schedule_is_its_number(tools):
    """The same number does the same again: what fails can be repeated."""
    first, second = run(7, tools), run(7, tools)
    assert (first.table, first.occupancy) == (second.table, second.occupancy)
