"""Staggered arrivals of long and short prompts: ``python benchmarks/arrivals.py [busy] [policies] [switches]``.

Requests come at fixed times, whatever the engines do. Measured: time to the first token, the gaps between two tokens of
a row, and tokens a second until the last has left. It plans nothing; the engines do that themselves.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import models
import program
from mlx_lm.generate import BatchGenerator
from sides import settings, top_two_gap

from oarlock.core import Request
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.plugins.cli.bench.pairs import MIN_PAIRS, Comparison, Report, equal_hash, ratio, spread


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Request ``i`` comes ``every`` seconds after the one before, with ``lengths[i]`` prompt tokens, for ``tokens[i]``.

    ``rows`` run at once; ``chunk``: prompt tokens of one forward where mlx-lm is given ours.
    """

    lengths: Sequence[int]
    tokens: Sequence[int]
    every: float
    rows: int
    chunk: int


SHORT = Arrivals(lengths=(20, 160, 12, 120, 30, 16), tokens=(16,) * 6, every=0.4, rows=16, chunk=64)
"""A small share of what follows, for a run of all benchmarks."""
BUSY = Arrivals(
    lengths=(40, 600, 20, 180, 320, 90, 480, 30, 250, 60, 400, 140, 24, 560, 110, 200),
    tokens=(64, 24, 48, 32, 56, 40, 24, 64, 30, 52, 28, 44, 60, 36, 48, 40),
    every=1.0,
    rows=8,
    chunk=256,
)
"""Keeps eight rows busy, with prompts of very different lengths."""


@dataclass
class Life:
    """One request: when it was due, and when each token came, in seconds since the run began."""

    due: float
    tokens: list[int]
    times: list[float]

    @property
    def stall(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Run:
    """One engine's side: submits what is due, steps, and notes when tokens came."""

    name: str

    def submit(self, number: int, prompt: Sequence[int]) -> None:
        """Hand over request ``number``."""
        raise NotImplementedError

    def step(self) -> tuple[Iterable[tuple[int, int]], bool]:
        """Do one iteration; return (request, token) pairs and whether anything is left to do."""
        raise NotImplementedError


class OarlockRun(Run):
    """Ours; ``scheduler`` changes its settings, ``full`` is the layout of full attention."""

    def __init__(self, model: Any, work: Arrivals, name: str = "oarlock", full: Any = "full", **scheduler: Any) -> None:
        self.name, self._work = name, work
        config = settings(work.rows)
        chosen = {**config["scheduler"], "max_batch": work.rows, **scheduler}
        self._engine = Engine(model, config={**config, "scheduler": chosen, "layouts": {"full": full}})
        self._events: list[tuple[int, int]] = []

    def submit(self, number: int, prompt: Sequence[int]) -> None:
        def take(event: Any) -> None:
            if event.token is not None:
                self._events.append((number, event.token))

        self._engine.submit(
            Request(prompt_ids=prompt, max_tokens=self._work.tokens[number], ignore_eos=True), events=take
        )

    def step(self) -> tuple[Iterable[tuple[int, int]], bool]:
        busy = self._engine.step()
        events, self._events = self._events, []
        return events, busy


class MlxLmRun(Run):
    """mlx-lm's batch generator."""

    def __init__(self, model: Any, work: Arrivals, name: str, **options: Any) -> None:
        self.name, self._work = name, work
        self._generator = BatchGenerator(model, completion_batch_size=work.rows, **options)
        self._numbers: dict[int, int] = {}

    def submit(self, number: int, prompt: Sequence[int]) -> None:
        (uid,) = self._generator.insert([list(prompt)], max_tokens=[self._work.tokens[number]])
        self._numbers[uid] = number

    def step(self) -> tuple[Iterable[tuple[int, int]], bool]:
        _, responses = self._generator.next()
        events = [(self._numbers[response.uid], response.token) for response in responses]
        for response in responses:
            if response.finish_reason is not None:
                del self._numbers[response.uid]
        return events, bool(self._numbers)


def drive(
    run: Run, prompts: Sequence[Sequence[int]], every: float, clock: Callable[[], float] = time.perf_counter
) -> list[Life]:
    """Let the requests come and run them to their end."""
    lives = [Life(every * number, [], []) for number in range(len(prompts))]
    waiting = deque(range(len(prompts)))
    start, busy = clock(), False
    while waiting or busy:
        while waiting and lives[waiting[0]].due <= clock() - start:
            number = waiting.popleft()
            run.submit(number, prompts[number])
        events, busy = run.step()
        now = clock() - start
        for number, token in events:
            lives[number].tokens.append(token)
            lives[number].times.append(now)
        if not busy and waiting:
            time.sleep(max(0.0, lives[waiting[0]].due - (clock() - start)))
    return lives


def measure(loaded: LoadedModel, rounds: int, work: Arrivals = SHORT) -> Report:
    """Serve the same arrivals by us and by mlx-lm in turn."""
    targets = {"stall": 0.15, "first": 0.5, "rate": 1.6}, {"stall": 0.5, "rate": 1.2}
    runs = [
        OarlockRun(loaded.model, work),
        MlxLmRun(loaded.model, work, "mlx-lm at its defaults"),
        MlxLmRun(loaded.model, work, f"mlx-lm, chunks of {work.chunk}", prefill_step_size=work.chunk),
    ]
    return _report(loaded, rounds, work, runs, targets if work is BUSY else ({}, {}))


def switched(loaded: LoadedModel, rounds: int, switches: Mapping[str, Mapping[str, Any]]) -> Report:
    """Serve the busy arrivals by us with our defaults, and with one setting changed at a time."""
    runs = [OarlockRun(loaded.model, BUSY)]
    runs += [OarlockRun(loaded.model, BUSY, name, **settings) for name, settings in switches.items()]
    return _report(loaded, rounds, BUSY, runs, [{}] * len(switches))


def _report(
    loaded: LoadedModel, rounds: int, work: Arrivals, runs: Sequence[Run], targets: Sequence[Mapping[str, float]]
) -> Report:
    prompts = models.prompts(loaded, work.lengths)
    done: dict[str, list[list[Life]]] = {run.name: [] for run in runs}
    for number in range(rounds):
        for run in (*runs[number % len(runs) :], *runs[: number % len(runs)]):
            done[run.name].append(drive(run, prompts, work.every))
    gap = lambda row, after: top_two_gap(loaded.model, [*prompts[row], *after])  # noqa: E731
    same = equal_hash({name: [life.tokens for life in lives[0]] for name, lives in done.items()}, gap)
    figures, comparisons = {}, []
    for what, unit, of, better in MEASURES:
        found = {run.name: [of(lives) for lives in done[run.name]] for run in runs}
        figures |= {f"{name}: {unit}": spread(values) for name, values in found.items()}
        ours = found[runs[0].name]
        for run, target in zip(runs[1:], targets, strict=True):
            # Of times it is theirs through ours, of rates ours through theirs: above 1 we are better.
            ratios = ratio(ours, found[run.name]) if better == "less" else ratio(found[run.name], ours)
            least = target.get(what)
            least = 1 / least if least is not None and better == "less" else least
            comparisons.append(Comparison(what=f"{unit}, against {run.name}", ratio=ratios, target=least))
    return Report(
        name=f"arrivals, one every {work.every} s, {work.rows} rows",
        facts={
            "prompts": len(prompts),
            "prompt tokens": sum(work.lengths),
            "tokens": sum(work.tokens),
            "occupancy": round(statistics.mean(_in_flight(lives) for lives in done[runs[0].name]), 2),
            "hash": same,
        },
        figures=figures,
        comparisons=comparisons,
    )


def _first(lives: Sequence[Life]) -> float:
    return statistics.mean(life.times[0] - life.due for life in lives)


def _late_first(lives: Sequence[Life]) -> float:
    return max(life.times[0] - life.due for life in lives)


def _stall(lives: Sequence[Life]) -> float:
    """Return the 99th percentile of the gaps between tokens of a row, over all rows."""
    gaps = sorted(b - a for life in lives for a, b in zip(life.times, life.times[1:], strict=False))
    return gaps[math.ceil(0.99 * len(gaps)) - 1]


def _rate(lives: Sequence[Life]) -> float:
    return sum(len(life.tokens) for life in lives) / max(life.times[-1] for life in lives)


MEASURES: Sequence[tuple[str, str, Callable[[Sequence[Life]], float], str]] = (
    ("first", "s to the first token, mean", _first, "less"),
    ("late", "s to the first token, the last of sixteen", _late_first, "less"),
    ("stall", "s between two tokens, 99th percentile", _stall, "less"),
    ("rate", "tokens a second", _rate, "more"),
)


def _in_flight(lives: Sequence[Life]) -> float:
    """Return how many requests were there on average, from due to last token."""
    return sum(life.times[-1] - life.due for life in lives) / max(life.times[-1] for life in lives)


SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "fifo": {"policy": "fifo"},
    "prefill_first": {"policy": "prefill_first"},
    "fair_share": {"policy": "fair_share"},
    "no mixed forwards": {"mixed": False},
    "no mixed forwards, stall bound of 500 ms": {"mixed": False, "stall_bound_ms": 500},
    "mixed forwards of 256": {"mixed_token_budget": 256},
    "pipeline": {"pipeline": True},
    "padding read": {"full": {"name": "full", "reads": "padded"}},
    "paged": {"full": "paged"},
}


def run_busy(rounds: int) -> Iterator[Report]:
    yield measure(models.smollm2(), max(MIN_PAIRS, rounds - 2), BUSY)


def run_policies(rounds: int) -> Iterator[Report]:
    yield switched(models.smollm2(), max(MIN_PAIRS, rounds - 2), dict(list(SWITCHES.items())[:3]))


def run_switches(rounds: int) -> Iterator[Report]:
    for part in (list(SWITCHES.items())[3:6], list(SWITCHES.items())[6:]):  # each beside runs at the defaults
        yield switched(models.smollm2(), max(MIN_PAIRS, rounds - 2), dict(part))


WORKLOADS = {"busy": run_busy, "policies": run_policies, "switches": run_switches}

if __name__ == "__main__":
    sys.exit(program.main("Serve staggered arrivals.", WORKLOADS, default=["busy"]))
