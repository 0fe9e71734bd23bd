"""Compiled decode steps against ordinary ones, for few rows that stay: microseconds a step, of the host and on the clock."""

from __future__ import annotations

from typing import Any

from decode import STEPS, busy, facts, seconds
from sides import Oarlock, top_two_gap

from oarlock.plugins.cli.bench.pairs import Comparison, Report, equal_hash, in_turns, ratio, spread

PROMPT = 64


def measure(what: str, model: Any, rounds: int, rows: int) -> Report:
    """Decode greedily; the tokens of both sides must be the same."""
    prompts = [[(7 * row + 3 * i) % 256 for i in range(PROMPT)] for row in range(rows)]
    sides = [Oarlock(model, prompts, compiled=on) for on in (True, False)]
    for side, name in zip(sides, ("compiled", "ordinary"), strict=True):
        side.name = name
        side.block(3 * STEPS)  # what is the same for so long is compiled by then
    blocks = in_turns(sides, STEPS, rounds)
    same = equal_hash({side.name: side.rows for side in sides}, lambda row, t: top_two_gap(model, [*prompts[row], *t]))
    counts = sides[0].engine.stats()
    for side in sides:
        side.close()
    times = {"in the driving thread": busy, "on the clock": seconds}
    return Report(
        name=f"compiled decode, {what}, {rows} rows, greedy",
        facts=facts(prompts, blocks["compiled"], hash=same, traces=counts["compiled_traces"]),
        figures={
            f"{name}: us a step {kind}": spread([1e6 * s / STEPS for s in of(blocks[name])])
            for kind, of in times.items()
            for name in blocks
        },
        comparisons=[
            Comparison(
                what=f"time {kind}: ordinary / compiled", ratio=ratio(of(blocks["compiled"]), of(blocks["ordinary"]))
            )
            for kind, of in times.items()
        ],
    )
