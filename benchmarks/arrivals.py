"""Staggered arrivals of long and short prompts: who waits for whom. It plans nothing; both engines do that themselves.

Requests come at fixed times, whatever the engines do. Measured: mean time to the first token, the worst gap between
two tokens of a row, and tokens a second until the last has left.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import models
from mlx_lm.generate import BatchGenerator
from pairs import Comparison, Report, equal_hash, ratio, spread
from sides import settings, top_two_gap

from oarlock.core import Request
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine

CHUNK = 64
"""Prompt tokens of one forward, ours and one of mlx-lm's: a small share of the long prompts, as 512 is of real ones."""
LENGTHS = (20, 160, 12, 120, 30, 16)
EVERY = 0.4
"""Seconds between two arrivals."""
TOKENS = 16


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
    """Ours, with chunks of the size that `CHUNK` says."""

    name = "oarlock"

    def __init__(self, model: Any) -> None:
        self._engine = Engine(model, config=settings(len(LENGTHS), prefill_chunk=CHUNK))
        self._events: list[tuple[int, int]] = []

    def submit(self, number: int, prompt: Sequence[int]) -> None:
        def take(event: Any) -> None:
            if event.token is not None:
                self._events.append((number, event.token))

        self._engine.submit(Request(prompt_ids=prompt, max_tokens=TOKENS, ignore_eos=True), events=take)

    def step(self) -> tuple[Iterable[tuple[int, int]], bool]:
        busy = self._engine.step()
        events, self._events = self._events, []
        return events, busy


class MlxLmRun(Run):
    """mlx-lm's batch generator."""

    def __init__(self, model: Any, name: str, **options: Any) -> None:
        self.name = name
        self._generator = BatchGenerator(model, **options)
        self._numbers: dict[int, int] = {}

    def submit(self, number: int, prompt: Sequence[int]) -> None:
        (uid,) = self._generator.insert([list(prompt)], max_tokens=[TOKENS])
        self._numbers[uid] = number

    def step(self) -> tuple[Iterable[tuple[int, int]], bool]:
        _, responses = self._generator.next()
        events = [(self._numbers[response.uid], response.token) for response in responses]
        for response in responses:
            if response.finish_reason is not None:
                del self._numbers[response.uid]
        return events, bool(self._numbers)


def drive(run: Run, prompts: Sequence[Sequence[int]], clock: Callable[[], float] = time.perf_counter) -> list[Life]:
    """Let the requests come and run them to their end."""
    lives = [Life(EVERY * number, [], []) for number in range(len(prompts))]
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


def measure(loaded: LoadedModel, rounds: int) -> Report:
    """Serve the same arrivals by all sides in turn."""
    prompts = models.prompts(loaded, LENGTHS)
    runs = [
        OarlockRun(loaded.model),
        MlxLmRun(loaded.model, "mlx-lm at its defaults"),
        MlxLmRun(loaded.model, f"mlx-lm, chunks of {CHUNK}", prefill_step_size=CHUNK),
    ]
    done: dict[str, list[list[Life]]] = {run.name: [] for run in runs}
    for number in range(rounds):
        for run in (*runs[number % len(runs) :], *runs[: number % len(runs)]):
            done[run.name].append(drive(run, prompts))
    gap = lambda row, after: top_two_gap(loaded.model, [*prompts[row], *after])  # noqa: E731
    same = equal_hash({name: [life.tokens for life in lives[0]] for name, lives in done.items()}, gap)
    numbers = {name: [_numbers(lives) for lives in all_lives] for name, all_lives in done.items()}
    figures, comparisons = {}, []
    for place, what in enumerate(("s to the first token, mean", "s of the worst stall", "s in all")):
        ours = [each[place] for each in numbers[runs[0].name]]
        for run in runs:
            theirs = [each[place] for each in numbers[run.name]]
            figures[f"{run.name}: {what}"] = spread(theirs)
            if run is not runs[0]:
                comparisons.append(Comparison(what=f"{what}, {run.name}: times ours", ratio=ratio(ours, theirs)))
    tokens = TOKENS * len(prompts)
    for run in runs:
        figures[f"{run.name}: tokens a second"] = spread([tokens / each[2] for each in numbers[run.name]])
    return Report(
        name=f"staggered arrivals, one every {EVERY} s, chunks of {CHUNK}",
        facts={
            "prompts": len(prompts),
            "prompt tokens": sum(LENGTHS),
            "tokens": tokens,
            "occupancy": round(statistics.mean(_in_flight(lives) for lives in done[runs[0].name]), 2),
            "hash": same,
        },
        figures=figures,
        comparisons=comparisons,
    )


def _numbers(lives: Sequence[Life]) -> tuple[float, float, float]:
    """Return mean time to the first token, the worst stall, and the time in all."""
    first = statistics.mean(life.times[0] - life.due for life in lives)
    return first, max(life.stall for life in lives), max(life.times[-1] for life in lives)


def _in_flight(lives: Sequence[Life]) -> float:
    """Return how many requests were there on average, from due to last token."""
    return sum(life.times[-1] - life.due for life in lives) / max(life.times[-1] for life in lives)
