"""Thousands of random schedules against the invariants of DESIGN 6. A failure names its schedule: run that number."""

from __future__ import annotations

from collections import Counter

import pytest
from harness.schedule import run
from harness.shrink import shrunk

PHASES = ("idle", "preparing", "running", "both", "rebuilding")
WHOSE = {
    "idle": {"submit", "hold", "release", "close", "task", "task raises", "cancel task", "cancel queued", "cancel ended",
             "admission raises", "state cache raises", "end callback raises", "end raises", "never fits"},
    "preparing": {"cancel preparing", "never fits", "preempted"},
    "running": {"cancel running", "never fits"},
    "both": {"cancel preparing", "cancel running", "merge raises", "preempted"},
    "rebuilding": {"submit", "hold", "task", "task raises", "cancel task", "cancel queued",
                   "cancel running", "cancel rebuilding", "NaN row", "poisoned row", "device fails over a row",
                   "forward raises", "forward raises half way", "sampler raises", "callback stops",
                   "state cache raises"},
}  # fmt: skip
"""Which events can happen in a phase, apart from those that can happen in all but "idle" and "rebuilding"."""
RESTRICTED = {"cancel preparing", "cancel running", "cancel rebuilding", "merge raises", "never fits", "preempted"}
SELDOM = {
    *(
        (event, "rebuilding")
        for event in (
            "release",
            "close",
            "cancel ended",
            "end raises",
            "never fits",
            "end callback raises",
            "callback raises",
        )
    ),
    *(("preempted", phase) for phase in ("idle", "running")),
    ("never fits", "both"),
}
"""What happens too seldom to be counted on."""
AT_LEAST = 20
QUICK = (range(2000),)
"""The first says of each event and phase that it happened; processes share them."""
LONG = tuple(range(start, start + 5000) for start in range(2000, 52_000, 5000))


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
    assert not [cell for cell in table if not possible(*cell) and cell not in SELDOM]
    print(f"{'':24}" + "".join(f"{phase:>11}" for phase in PHASES))
    for event in sorted({event for event, _ in table}):
        cells = (str(table[event, phase]) if possible(event, phase) else "-" for phase in PHASES)
        print(f"{event:24}" + "".join(f"{cell:>11}" for cell in cells))
    return table, steps


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("numbers", QUICK, ids=str)
def test_two_thousand_schedules_hold_every_invariant(numbers, tools):
    """Every request settles once and as it would alone, nobody starves or stalls, and nothing is left over."""
    table, steps = run_all(numbers, tools)
    if numbers.start:
        return
    known = {event for event, _ in table}
    assert len(known) == 29
    assert len(steps) == 16, "each policy runs in each phase"
    assert min(steps.values()) >= AT_LEAST
    thin = [(e, p, table[e, p]) for e in sorted(known) for p in PHASES if possible(e, p) and table[e, p] < AT_LEAST]
    assert not thin, f"too few of (event, phase): {thin}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("numbers", LONG, ids=str)
def test_fifty_thousand_more(numbers, tools):
    """The same, none of them the same."""
    run_all(numbers, tools)


def test_a_schedule_is_its_number(tools):
    """The same number does the same again: what fails can be repeated."""
    first, second = run(7, tools), run(7, tools)
    assert (first.table, first.occupancy) == (second.table, second.occupancy)
