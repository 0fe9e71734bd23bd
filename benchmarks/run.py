"""The benchmarks: ``make bench``, or ``python benchmarks/run.py decode host --json``. It measures nothing itself.

Everything is compared within one run. A default run ends within 15 minutes on two cores. Exit code 1: two sides that
had to give the same tokens did not.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import arrivals
import decode
import membership
import models
from pairs import MIN_PAIRS, Report, UnequalTokens, machine

from oarlock.core.contracts.loader import LoadedModel

EQUAL = 64  # prompt tokens a row
RAGGED = [24 + 5 * row for row in range(16)]


@functools.cache
def smollm2() -> LoadedModel:
    """Load it once, and only where a workload needs it."""
    return models.smollm2()


def run_decode(rounds: int) -> Iterator[Report]:
    for rows in (1, 4, 16):
        yield decode.greedy(smollm2(), [EQUAL] * rows, rounds)
    yield decode.greedy(smollm2(), RAGGED, rounds)
    yield decode.sampled(smollm2(), [EQUAL] * 16, rounds)


def run_host(rounds: int) -> Iterator[Report]:
    for rows in (1, 32):
        yield decode.host(10 * rounds, rows)


def run_membership(rounds: int) -> Iterator[Report]:
    yield membership.measure(rounds)


def run_arrivals(rounds: int) -> Iterator[Report]:
    yield arrivals.measure(smollm2(), max(MIN_PAIRS, rounds - 2))


WORKLOADS: dict[str, Callable[[int], Iterator[Report]]] = {
    "host": run_host,
    "decode": run_decode,
    "membership": run_membership,
    "arrivals": run_arrivals,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare oarlock with its limit and with mlx-lm.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--rounds", type=int, default=7, help=f"pairs per ratio, at least {MIN_PAIRS}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if arguments.rounds < MIN_PAIRS:
        parser.error(f"--rounds is {arguments.rounds}; a ratio takes at least {MIN_PAIRS} pairs")
    facts, reports, failures, start = machine(), [], [], time.perf_counter()
    if not arguments.json:
        print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    for name in arguments.workloads or WORKLOADS:
        print(f"{time.perf_counter() - start:5.0f} s  {name} ...", file=sys.stderr, flush=True)
        try:
            for report in WORKLOADS[name](arguments.rounds):
                reports.append(report)
                if not arguments.json:
                    print(f"\n{report}", flush=True)
        except UnequalTokens as error:
            failures.append(f"{name}: {error}")
    facts |= {"seconds": round(time.perf_counter() - start), "load at the end": round(os.getloadavg()[0], 1)}
    if arguments.json:
        print(json.dumps({"machine": facts, "reports": [r.plain() for r in reports], "errors": failures}, indent=2))
    else:
        print(f"\n{facts['seconds']} s; load {facts['load']} at the start, {facts['load at the end']} at the end")
    for failure in failures:
        print(f"error: tokens differ in {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
