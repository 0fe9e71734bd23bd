"""Where the time of a step goes under a small mixed load: prompts of uneven length arrive while rows decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.observe import TIMES, StepReport

EVERY = 6
"""Steps between two arrivals."""
SHARES = (0.2, 1.0, 0.05, 0.6)
"""Lengths of the prompts, by the longest."""


def uneven(requests: int, longest: int) -> list[int]:
    """Return the prompt lengths of so many requests."""
    return [max(1, round(SHARES[i % len(SHARES)] * longest)) for i in range(requests)]


def load(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Let the requests arrive and run them to their end; return how many tokens they got."""
    handles: list[Any] = []
    step = 0
    while len(handles) < len(prompts) or not all(handle.done for handle in handles):
        if step % EVERY == 0 and len(handles) < len(prompts):
            prompt = prompts[len(handles)]
            handles.append(engine.submit(Request(prompt_ids=prompt, max_tokens=tokens, ignore_eos=True)))
        engine.step()
        step += 1
    return sum(len(handle.result().token_ids) for handle in handles)


def lines(report: StepReport) -> list[str]:
    """Return the table: a phase and a kind of time in each line, in milliseconds."""
    table = [f"{'phase':16}{'steps':>7}  {'ms':8}{'mean':>9}{'p50':>9}{'p99':>9}"]
    for phase, times in report.times.items():
        for name in TIMES:
            spread = times[name]
            start = f"{phase:16}{report.steps[phase]:>7}" if name == TIMES[0] else " " * 23
            table.append(f"{start}  {name.removesuffix('_ms'):8}{spread.mean:9.3f}{spread.p50:9.3f}{spread.p99:9.3f}")
    return table
