"""How anything here is measured and compared: sides in turn, pairs, quartiles, hashes. It knows no engine.

A round gives every side one block of the same work, and the order turns from round to round, so that whatever else
the machine does falls on all of them. Only times of one round are compared with each other.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib import metadata
from typing import Any, Protocol

import attrs

from oarlock.plugins.cli.machine import blas_library, device

MIN_PAIRS = 5
NEAR_TIE = 1e-3
"""Below this gap between the two best scores, rounding may choose either token."""


class UnequalTokens(Exception):
    """Two sides that had to give the same tokens did not: their times compare different work."""


@attrs.frozen
class Spread:
    """A median and its quartiles over ``pairs`` measurements."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        digits = max(0, 2 - math.floor(math.log10(abs(self.median)))) if self.median else 0
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of ``values``."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0], len(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return how many times ours goes into theirs, pair by pair. Of times: above 1, ours is the faster."""
    if len(ours) != len(theirs) or len(ours) < MIN_PAIRS:
        msg = f"a ratio takes at least {MIN_PAIRS} pairs; got {len(ours)} and {len(theirs)} measurements"
        raise ValueError(msg)
    return spread([their / our for our, their in zip(ours, theirs, strict=True)])


@attrs.frozen
class Block:
    """One side's part of a round. ``host``: seconds of computing in the driving thread, which a busy machine spares.

    ``cpu``: of computing in all threads of the process, those included that wait for work in a loop.
    """

    seconds: float
    host: float
    steps: int
    tokens: int
    cpu: float = 0.0


class Stopwatch:
    """Seconds on the clock, and of computing in this thread and in the process, since it was made."""

    def __init__(self) -> None:
        self._clock, self._thread, self._process = time.perf_counter(), time.thread_time(), time.process_time()

    def block(self, steps: int, tokens: int) -> Block:
        """Stop, and return what was measured."""
        clock, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        return Block(clock - self._clock, thread - self._thread, steps, tokens, process - self._process)


class Side(Protocol):
    """One of the things compared, at work on the same rows as the others."""

    name: str

    def block(self, steps: int) -> Block:
        """Do ``steps`` steps, wait for the device, and say what it took."""
        ...


def in_turns(sides: Sequence[Side], steps: int, rounds: int) -> dict[str, list[Block]]:
    """Let every side do a block per round, after one block each that warms up and does not count."""
    blocks: dict[str, list[Block]] = {side.name: [] for side in sides}
    for side in sides:
        side.block(steps)
    for number in range(rounds):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            blocks[side.name].append(side.block(steps))
    return blocks


def token_hash(rows: Sequence[Sequence[int]]) -> str:
    """Return a short hash of all rows' tokens."""
    return hashlib.sha256(repr([list(row) for row in rows]).encode()).hexdigest()[:16]


def common(sides: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[int]]]:
    """Cut each row to the tokens that every side has: some have read one more than others."""
    lengths = [min(map(len, row)) for row in zip(*sides.values(), strict=True)]
    return {
        name: [list(row[:length]) for row, length in zip(rows, lengths, strict=True)] for name, rows in sides.items()
    }


def equal_hash(
    sides: Mapping[str, Sequence[Sequence[int]]], gap: Callable[[int, Sequence[int]], float] | None = None
) -> str:
    """Return the one hash of all sides' tokens. Raises `UnequalTokens`.

    ``gap(row, tokens)`` is the distance between the two best scores after a row's ``tokens``: the error names it for
    the first step at which a row differs, so that a near-tie is told from a fault.
    """
    cut = common(sides)
    (first, expected), *others = cut.items()
    differences = [line for name, rows in others for line in _differences(first, expected, name, rows, gap)]
    if differences:
        raise UnequalTokens("\n".join(differences))
    return token_hash(expected)


def _differences(
    first: str,
    expected: Sequence[Sequence[int]],
    name: str,
    rows: Sequence[Sequence[int]],
    gap: Callable[[int, Sequence[int]], float] | None,
) -> list[str]:
    lines = []
    for place, (ours, theirs) in enumerate(zip(expected, rows, strict=True)):
        step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if step is None:
            continue
        line = f"row {place}, token {step}: {first} has {ours[step]}, {name} has {theirs[step]}"
        if gap is not None:
            distance = gap(place, ours[:step])
            tie = ", a near-tie" if distance < NEAR_TIE else ""
            line += f"; the two best scores are {distance:.2g} apart{tie}"
        lines.append(line)
    return lines


@attrs.frozen(kw_only=True)
class Comparison:
    """One ratio, and whether it reaches what it should: the lower quartile does, where there is a target."""

    what: str
    ratio: Spread
    target: float | None = None

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.ratio.low >= self.target

    def __str__(self) -> str:
        verdict = {None: "", True: f"  reaches {self.target}", False: f"  MISSES {self.target}"}[self.reached]
        return f"{self.what:44} {self.ratio!s:24}{verdict}"


@attrs.define(kw_only=True)
class Report:
    """What one workload found."""

    name: str
    facts: dict[str, Any] = attrs.field(factory=dict)
    figures: dict[str, Spread] = attrs.field(factory=dict)
    comparisons: list[Comparison] = attrs.field(factory=list)
    table: str = ""

    def __str__(self) -> str:
        lines = [f"## {self.name}", "   " + "  ".join(f"{key} {value}" for key, value in self.facts.items())]
        lines += [f"   {key:44} {value}" for key, value in self.figures.items()]
        lines += [f"   {comparison}" for comparison in self.comparisons]
        return "\n".join(lines) + (f"\n\n{self.table}" if self.table else "")

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "name": self.name,
            "facts": self.facts,
            "figures": {key: attrs.asdict(value) for key, value in self.figures.items()},
            "comparisons": [attrs.asdict(each) | {"reached": each.reached} for each in self.comparisons],
        } | ({"table": self.table} if self.table else {})


def machine() -> dict[str, Any]:
    """Return what a figure depends on: cores, device, versions, the BLAS in use, and how busy the machine is."""
    import mlx.core as mx

    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))  # a product, so that the library is mapped
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the day where it ran
        "cores": cores,
        "machine": platform.machine(),
        "device": device(),
        "blas": blas_library() or "not told",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("oarlock", "mlx", "mlx-lm")},
        "load": round(os.getloadavg()[0], 1),
    }
