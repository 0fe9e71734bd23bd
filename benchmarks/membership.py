"""Joins, leaves and rollbacks at long context: `full` against the obvious other storages. docs/decisions quotes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from storages import CAPACITY, LAYERS, Left, Padded, Separate, Storage

from oarlock.plugins.cli.bench.pairs import Comparison, Report, Spread, ratio, spread

ROWS, TOKENS = 15, 2048
WIDTH = 4
"""Tokens of the window that is rolled back, to another count in each row."""


@dataclass
class Cost:
    """What an operation took, round by round, and the most memory it needed beyond what was there."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0

    def add(self, seconds: float, peak: int) -> None:
        self.seconds.append(seconds)
        self.bytes = max(self.bytes, peak)

    def __str__(self) -> str:
        return f"{spread([1e3 * s for s in self.seconds])} ms, +{self.bytes / 1e6:.0f} MB"


Costs = dict[tuple[str, str], Cost]
"""By operation and storage."""


def timed(costs: Costs, operation: str, storage: Storage, work: Callable[[], list[mx.array]]) -> None:
    """Do ``work`` and evaluate what it returns."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, start = mx.get_active_memory(), time.perf_counter()
    mx.eval(work())
    costs.setdefault((operation, storage.name), Cost()).add(time.perf_counter() - start, mx.get_peak_memory() - before)


def steps(storage: Storage, count: int) -> list[mx.array]:
    """Do pipelined steps: each is dispatched before the one before it is read."""
    previous = None
    for _ in range(count):
        current = storage.step()
        mx.async_eval(current)
        if previous is not None:
            mx.eval(previous)
        previous = current
    return [] if previous is None else [previous]


def appends(lengths: Sequence[int], rounds: int, kind: str, costs: Costs) -> None:
    """Time one step of each storage, in turns; then, on ragged rows, everything that moves rows."""
    separate = Separate(lengths)
    storages: list[Storage] = [Left(lengths, ROWS + 1), Padded(lengths), separate]
    for storage in storages:
        mx.eval(storage.arrays())
        mx.eval(steps(storage, 2))
    for number in range(rounds):
        for storage in _turned(storages, number):
            timed(costs, f"append, {kind}", storage, lambda s=storage: [s.step()])  # type: ignore[misc]
            if not number:  # for its memory
                timed(costs, f"4 pipelined steps, {kind}", storage, lambda s=storage: steps(s, 4))  # type: ignore[misc]
        separate.name, separate.gather = "one buffer a row, a kernel a row", False
        timed(costs, f"append, {kind}", separate, lambda: [separate.step()])
        separate.name, separate.gather = "one buffer a row", True
        if kind == "ragged":
            for storage in _turned(storages, number):
                _moves(storage, costs)


def _moves(storage: Storage, costs: Costs) -> None:
    """Roll back, join and leave once each; the storage ends with as many rows as before."""

    def operation(name: str, work: Callable[[], None]) -> None:
        def whole() -> list[mx.array]:
            work()
            return storage.arrays()

        timed(costs, name, storage, whole)

    mx.eval(storage.step(WIDTH), storage.arrays())
    kept = [1 + row % WIDTH for row in range(len(storage.lengths))]
    operation("rollback", lambda: storage.roll_back(kept, WIDTH))
    prepared = storage.joiner(TOKENS)
    operation("join", lambda: storage.join(prepared, TOKENS))
    prepared = []
    mx.eval(storage.step())
    timed(costs, "append, ragged, a row more", storage, lambda: [storage.step()])
    operation("leave", lambda: storage.leave(0))
    mx.eval(storage.step())


def _turned(storages: Sequence[Storage], number: int) -> list[Storage]:
    first = number % len(storages)
    return [*storages[first:], *storages[:first]]


def growing_join(costs: Costs) -> None:
    """Join where no slot is free: `full` doubles its slots. Once: it is what reserving avoids."""
    storage = Left([TOKENS] * ROWS, ROWS)
    mx.eval(storage.arrays())
    prepared = storage.joiner(TOKENS)

    def join() -> list[mx.array]:
        storage.join(prepared, TOKENS)
        return storage.arrays()

    timed(costs, "join that grows", storage, join)


def measure(rounds: int) -> Report:
    """Measure everything and lay it out as the table that docs/decisions shows."""
    costs: Costs = {}
    appends([TOKENS] * ROWS, rounds, "equal", costs)
    appends([TOKENS - 8 * row for row in range(ROWS)], rounds, "ragged", costs)
    mx.clear_cache()
    growing_join(costs)
    figures: dict[str, Spread] = {}
    comparisons = []
    for (operation, storage), cost in costs.items():
        figures[f"{storage}: ms of {operation}"] = spread([1e3 * s for s in cost.seconds])
        ours = costs[operation, Left.name]
        if storage == Padded.name and len(ours.seconds) > 1:
            comparisons.append(
                Comparison(what=f"{operation}, {storage}: times ours", ratio=ratio(ours.seconds, cost.seconds))
            )
    return Report(
        name=f"membership, {ROWS} rows x {TOKENS} tokens, {LAYERS} layers in SmolLM2's geometry",
        facts={"rows": ROWS, "tokens a row": TOKENS, "columns reserved": CAPACITY},
        comparisons=comparisons,
        figures=figures,
        table=table(costs),
    )


def table(costs: Costs) -> str:
    """Return markdown: an operation a line, a storage a column; medians and quartiles, and the peak beyond the rows."""
    operations, storages = (list(dict.fromkeys(key[i] for key in costs)) for i in (0, 1))
    lines = [f"| | {' | '.join(storages)} |", f"|---|{'---|' * len(storages)}"]
    lines += [
        f"| {operation} | {' | '.join(str(costs.get((operation, storage), '')) for storage in storages)} |"
        for operation in operations
    ]
    return "\n".join(lines)
