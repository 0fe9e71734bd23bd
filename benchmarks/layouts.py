"""Layouts beside each other and beside mlx-lm's padded batch: ``python benchmarks/layouts.py [bytes] [rows] [decode]``.

It runs nothing itself. Throughput is that of SmolLM2 with its real weights; all layouts go on from the same keys and
values. A default run ends within 15 minutes on two cores. Exit code 1: layouts that had to give the same tokens did not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import models
import program
import reads
import rows

from oarlock.plugins.cli.bench.pairs import Report

FOOT = """Measured on this device only: on a GPU a dispatch costs more and memory is faster, and attention row by row, what it
saves and what a gather costs have to be measured there again. mlx-lm cannot batch quantized caches, so quantized rows
stand beside its plain batch; its time for a join and a leave holds no decode step."""


def run_bytes(rounds: int) -> Iterator[Report]:  # noqa: ARG001 - nothing is timed
    yield rows.held()


def run_rows(rounds: int) -> Iterator[Report]:
    yield from rows.moves(rounds)


def run_decode(rounds: int) -> Iterator[Report]:
    yield from reads.measure(models.smollm2(), rounds)


WORKLOADS = {"bytes": run_bytes, "rows": run_rows, "decode": run_decode}

if __name__ == "__main__":
    sys.exit(program.main("Compare the layouts.", WORKLOADS, foot=FOOT))
