"""The program around workloads: arguments, order, lines or JSON, exit code. It measures nothing and knows no workload."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from oarlock.plugins.cli.bench.pairs import MIN_PAIRS, Report, UnequalTokens, machine

Workloads = Mapping[str, Callable[[int], Iterator[Report]]]
"""By name: rounds -> reports, one after the other."""


def main(description: str, workloads: Workloads, default: Sequence[str] | None = None, foot: str = "") -> int:
    """Run what the command line names, or ``default`` (None: all). Return the exit code: 1 where tokens differ."""
    usual = list(default or workloads)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(workloads)}; default: {', '.join(usual)}"
    )
    parser.add_argument("--rounds", type=int, default=7, help=f"pairs per ratio, at least {MIN_PAIRS}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.workloads if name not in workloads]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(workloads)}")
    if arguments.rounds < MIN_PAIRS:
        parser.error(f"--rounds is {arguments.rounds}; a ratio takes at least {MIN_PAIRS} pairs")
    facts, reports, failures, start = machine(), [], [], time.perf_counter()
    if not arguments.json:
        print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    for name in arguments.workloads or usual:
        print(f"{time.perf_counter() - start:5.0f} s  {name} ...", file=sys.stderr, flush=True)
        try:
            for report in workloads[name](arguments.rounds):
                reports.append(report)
                if not arguments.json:
                    print(f"\n{report}", flush=True)
        except UnequalTokens as error:
            failures.append(f"{name}: {error}")
    facts |= {"seconds": round(time.perf_counter() - start), "load at the end": round(os.getloadavg()[0], 1)}
    if arguments.json:
        found = {"machine": facts, "reports": [report.plain() for report in reports], "errors": failures}
        print(json.dumps(found | ({"foot": foot} if foot else {}), indent=2))
    else:
        print(f"\n{facts['seconds']} s; load {facts['load']} at the start, {facts['load at the end']} at the end")
        print(foot, end="\n" if foot else "")
    for failure in failures:
        print(f"error: tokens differ in {failure}", file=sys.stderr)
    return 1 if failures else 0
