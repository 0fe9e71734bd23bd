"""The two sides that anybody can take: oarlock's rows, and mlx-lm's batch generator. Nothing is timed here but blocks.

All rows run before the first block and none leaves before the last, so prefill stands outside on both sides. A block ends
when the device is done: what a pipeline has in flight is paid by the side that put it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from oarlock.core import Request, SamplingParams, TokenEvent
from oarlock.core.engine import Engine
from oarlock.plugins.cli.bench.pairs import Block, Stopwatch

Prompts = Sequence[Sequence[int]]
ENDLESS = 100_000
"""A row's limit, which no run reaches."""


class Rows:
    """The running rows of an engine, driven as its users drive it; events are collected, as they would be."""

    name = "oarlock"

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        sampling: Sequence[SamplingParams] | None = None,
        max_tokens: int | None = ENDLESS,
    ) -> None:
        """Submit the prompts, and step until every row runs and has one step before it to read."""
        self.engine = engine
        self.rows: list[list[int]] = [[] for _ in prompts]
        params = sampling or [SamplingParams()] * len(prompts)
        self._handles = [
            engine.submit(
                Request(prompt_ids=prompt, max_tokens=max_tokens, sampling=sampled, ignore_eos=True),
                events=_collector(row),
            )
            for row, prompt, sampled in zip(self.rows, prompts, params, strict=True)
        ]
        while engine.stats()["active_rows"] < len(prompts):
            engine.step()
            for handle in self._handles if self.ended else ():
                if handle.done:
                    handle.result()  # a row that failed would be waited for in vain
        engine.step()

    @property
    def ended(self) -> bool:
        """Whether a row is over: then a block has less work than the one before."""
        return any(handle.done for handle in self._handles)

    def block(self, steps: int) -> Block:
        """Do ``steps`` iterations."""
        before, step = sum(map(len, self.rows)), self.engine.step
        watch = Stopwatch()
        for _ in range(steps):
            step()
        mx.synchronize()
        return watch.block(steps, sum(map(len, self.rows)) - before)

    def stall(self, prompt: Sequence[int]) -> float:
        """Let a row of ``prompt`` join for one token; see `longest_wait`."""
        joiner = self.engine.submit(Request(prompt_ids=prompt, max_tokens=1, ignore_eos=True, reuse_prefix=False))

        def step() -> int:
            before = sum(map(len, self.rows))
            self.engine.step()
            return sum(map(len, self.rows)) - before

        waited = longest_wait(step, lambda: joiner.done)
        joiner.result()
        return waited

    def close(self) -> None:
        """Cancel the rows, and let the engine go on until it is idle. Raises what a row failed with."""
        for handle in self._handles:
            handle.cancel()
        while not all(handle.done for handle in self._handles):
            self.engine.step()
        for handle in self._handles:
            handle.result()


def _collector(row: list[int]) -> Callable[[TokenEvent], None]:
    def take(event: TokenEvent) -> None:
        if event.token is not None:
            row.append(event.token)

    return take


def longest_wait(step: Callable[[], int], over: Callable[[], bool]) -> float:
    """Return the longest time between two tokens of the running rows, in seconds, from now until they got one after ``over``.

    ``step`` returns how many tokens they got.
    """
    waited, last, joined = 0.0, time.perf_counter(), False
    while True:
        got, now = step(), time.perf_counter()
        if got:
            waited, last = max(waited, now - last), now
            if joined:
                return waited
        joined = over()


class MlxLm:
    """mlx-lm's batch generator through its public interface, at its defaults."""

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        samplers: Sequence[Callable[[mx.array], mx.array]] | None = None,
        processors: Sequence[list[Callable[[mx.array, mx.array], mx.array]]] | None = None,
    ) -> None:
        """Insert the prompts, and go on until every row runs."""
        self.name = "mlx-lm"
        self._generator = BatchGenerator(model, completion_batch_size=max(32, len(prompts) + 1))  # 32 is its default
        self._answered = 0
        self.rows: list[list[int]] = [[] for _ in prompts]
        self._generator.insert(
            [list(prompt) for prompt in prompts],
            max_tokens=[ENDLESS] * len(prompts),
            samplers=list(samplers) if samplers is not None else None,
            logits_processors=list(processors) if processors is not None else None,
        )
        while self._next() < len(prompts):
            pass

    def block(self, steps: int) -> Block:
        """Do ``steps`` steps."""
        tokens = 0
        watch = Stopwatch()
        for _ in range(steps):
            tokens += self._next()
        mx.synchronize(self._generator.stream)
        return watch.block(steps, tokens)

    def stall(self, prompt: Sequence[int]) -> float:
        """Let a row of ``prompt`` join for one token; see `longest_wait`."""
        self._generator.insert([list(prompt)], max_tokens=[1])
        before = self._answered
        return longest_wait(self._next, lambda: self._answered > before)

    def close(self) -> None:
        """Let the generator go."""
        self._generator.close()

    def _next(self) -> int:
        """Do a step and return how many tokens the running rows got; joiners are counted apart."""
        _, responses = self._generator.next()
        mine = [response for response in responses if response.uid < len(self.rows)]
        for response in mine:
            self.rows[response.uid].append(response.token)
        self._answered += len(responses) - len(mine)
        return len(mine)


def top_two_gap(model: Any, tokens: Sequence[int]) -> float:
    """Return how far apart the two best scores after ``tokens`` are, where nothing is cached."""
    logits = model(mx.array([list(tokens)], dtype=mx.uint32))[0, -1]
    scores: Any = mx.sort(logits.astype(mx.float32))[-2:].tolist()
    return float(scores[1] - scores[0])
