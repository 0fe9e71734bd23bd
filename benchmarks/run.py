"""The benchmarks: ``make bench``, or ``python benchmarks/run.py decode host --json``. It measures nothing itself.

Everything is compared within one run. A default run ends within 15 minutes on two cores. Exit code 1: two sides that
had to give the same tokens did not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import arrivals
import compiled
import decode
import layouts
import membership
import mixed
import models
import program

from oarlock.core.contracts.loader import LoadedModel
from oarlock.plugins.cli.bench.pairs import MIN_PAIRS, Report

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


def run_mixed(rounds: int) -> Iterator[Report]:
    yield from mixed.measure(smollm2(), rounds)


def run_compiled(rounds: int) -> Iterator[Report]:
    for rows in (1, 3):
        yield compiled.measure("tiny model", models.tiny(), 10 * rounds, rows)
        yield compiled.measure("SmolLM2", smollm2().model, rounds, rows)


def run_layouts(rounds: int) -> Iterator[Report]:
    for workload in layouts.WORKLOADS.values():
        yield from workload(rounds)


WORKLOADS: dict[str, Callable[[int], Iterator[Report]]] = {
    "host": run_host,
    "decode": run_decode,
    "membership": run_membership,
    "arrivals": run_arrivals,
}
ON_REQUEST = {"layouts": run_layouts, "mixed": run_mixed, "compiled": run_compiled}
"""Those that a default run has no time for."""


if __name__ == "__main__":
    sys.exit(program.main("Compare oarlock with its limit and with mlx-lm.", {**WORKLOADS, **ON_REQUEST}, [*WORKLOADS]))
