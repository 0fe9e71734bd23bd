"""Where the time of a step goes under a small mixed load: ``python benchmarks/trace.py``. It compares nothing.

Requests with prompts of uneven length arrive every few steps, so that rows are prefilled beside rows that decode.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import models

from oarlock.core.engine import Engine
from oarlock.core.observe import StepReport, StepTrace
from oarlock.plugins.cli.bench.pairs import machine
from oarlock.plugins.cli.bench.trace import lines, load, uneven


def measure(model: Any, prompts: Sequence[Sequence[int]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the load once to warm up and once to be traced; return facts, memory and the report."""
    trace = StepTrace(attribution=arguments.attribution)
    scheduler = {
        "max_batch": arguments.rows,
        "max_queued": len(prompts),
        "policy": arguments.policy,
        "prefill_chunk": arguments.chunk,
        "stall_bound_ms": arguments.stall_bound_ms,
    }
    with Engine(model, config={"scheduler": scheduler}, plugins=[trace]) as engine:
        load(engine, prompts, arguments.tokens)
        trace.report()
        delivered = load(engine, prompts, arguments.tokens)
        stats = engine.stats()
    memory = {name: value for name, value in stats.items() if name.endswith("_bytes")}
    facts = {"requests": len(prompts), "prompt tokens": sum(map(len, prompts)), "tokens": delivered}
    return {"load": facts, "memory": memory, "report": trace.report()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print where the time of a step goes: build, read, emit, gap.")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8, help="scheduler.max_batch")
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=64, help="scheduler.prefill_chunk")
    parser.add_argument("--policy", default="decode_first", help="scheduler.policy")
    parser.add_argument("--stall-bound-ms", type=float, default=0, help="scheduler.stall_bound_ms")
    parser.add_argument("--attribution", action="store_true", help="wait for the device after each phase")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    for name in ("requests", "rows", "longest", "tokens", "chunk"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; at least 1 is allowed")
    return arguments


def main() -> int:
    """Print the report."""
    arguments = parse()
    lengths = uneven(arguments.requests, arguments.longest)
    if arguments.model == "smollm2":
        loaded = models.smollm2()
        model, prompts = loaded.model, models.prompts(loaded, lengths)
    else:
        model, prompts = models.tiny(), [[(row + 7 * i) % 250 for i in range(n)] for row, n in enumerate(lengths)]
    found = measure(model, prompts, arguments)
    report: StepReport = found.pop("report")
    if arguments.json:
        print(json.dumps({"machine": machine(), **found, "report": attrs.asdict(report)}, indent=2))
        return 0
    for facts in (machine(), *found.values()):
        print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print("\n".join(["", *lines(report)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
