"""Random requests for a long time: ``python benchmarks/soak.py --minutes 10``. What is held at the end beside the start.

Requests of all lengths come and go, some are cancelled, some fail in their consumer; the budget makes some wait and
some leave. After a minute of warm-up the process and MLX's allocator must hold what they will hold at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import models

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.plugins.cli.bench.pairs import machine

GROWTH = 1.05
"""Most that may be held at the end, by what was held after the warm-up."""


def resident() -> int:
    """Return the process's resident bytes, where the system tells them; else 0."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


STORED = "16MiB"
"""Of stored prefixes: full before the warm-up is over, so that they come and go for the rest of the time."""


def request(rng: random.Random, vocabulary: int) -> Request:
    """Return one of any kind."""
    fails = rng.random() < 0.05

    def consume(event: Any) -> None:
        if fails and event.index == 3:
            raise RuntimeError("the consumer fails")

    sampling = SamplingParams(temperature=rng.choice((0.0, 0.7)), top_p=rng.choice((1.0, 0.9)), seed=rng.randrange(99))
    prompt = [rng.randrange(vocabulary) for _ in range(rng.choice((4, 40, 200, 700)))]
    return Request(prompt_ids=prompt, max_tokens=rng.randint(1, 80), sampling=sampling, on_token=consume)


def work(engine: Engine, rng: random.Random, until: Callable[[], bool]) -> int:
    """Keep the queue filled until it is time; return how many requests ended."""
    handles: list[Any] = []
    ended = 0
    while not until():
        while engine.stats()["pending_rows"] < 4:
            handles.append(engine.submit(request(rng, engine.bound.vocabulary)))
        engine.step()
        if handles and rng.random() < 0.01:
            rng.choice(handles).cancel()
        ended += sum(handle.done for handle in handles)
        handles = [handle for handle in handles if not handle.done]
    while engine.step():
        pass
    return ended + len(handles)


def held() -> dict[str, int]:
    """Return what is held while nothing runs."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return {"resident": resident(), "active": mx.get_active_memory()}


def run(
    model: Any,
    warm_up: float,
    seconds: float,
    layouts: dict[str, Any],
    stored: str = STORED,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Work for a while and return what was held after the warm-up, on the way, and at the end."""
    rng, samples, ended = random.Random(0), [], 0
    scheduler = {"max_batch": 8, "prefill_chunk": 128, "kv_budget": "256MiB", "overcommit": 2.0}
    config = {"scheduler": scheduler, "layouts": layouts, "state_cache": {"prefix_bytes": stored}}
    with Engine(model, config=config) as engine:
        parts: Sequence[float] = (warm_up, *([seconds / 8] * 8))
        for part in parts:
            end = clock() + part
            ended += work(engine, rng, lambda end=end: clock() >= end)
            samples.append(held())
        stats = engine.stats()
    start, last = samples[0], {key: median(sample[key] for sample in samples[-3:]) for key in samples[0]}
    growth = {key: round(last[key] / max(1, start[key]), 4) for key in start}
    return {"requests": ended, "preemptions": stats["preemptions"], "samples": samples, "growth": growth}


def main() -> int:
    """Print one JSON object; exit code 1 where more is held at the end than may be."""
    parser = argparse.ArgumentParser(description="Run random requests for a long time and say what is held.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=1.0, metavar="MINUTES")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--layout", default="full", help="of full attention layers")
    arguments = parser.parse_args()
    model = models.tiny() if arguments.model == "tiny" else models.smollm2().model
    found = run(model, 60 * arguments.warm_up, 60 * arguments.minutes, {"full": arguments.layout})
    print(json.dumps({"machine": machine(), **found}, indent=1))
    return int(any(value > GROWTH for value in found["growth"].values()))


if __name__ == "__main__":
    sys.exit(main())
