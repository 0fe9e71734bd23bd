"""What is compared: oarlock, the bare loop on its caches, and mlx-lm's batch generator. Nothing is timed here but blocks.

All rows run before the first block and none leaves before the last, so prefill stands outside on every side. A block
ends when the device is done: what a pipeline has in flight is paid by the side that put it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from pairs import Block, Stopwatch

from oarlock.core import Request, SamplingParams
from oarlock.core.bind import BoundModel
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.engine import Engine
from oarlock.core.forward import forward, settle

Prompts = Sequence[Sequence[int]]
ENDLESS = 100_000
"""A row's limit, which no run reaches."""


def settings(rows: int, **scheduler: Any) -> dict[str, Any]:
    """Return an engine's configuration for ``rows`` rows. Rounds repeat their prompts, so nothing is kept of them."""
    return {
        "scheduler": {"max_batch": max(16, rows), "max_queued": max(64, rows), **scheduler},
        "state_cache": {"name": "none"},
    }


class Oarlock:
    """The engine, driven as its users drive it; events are collected, as they would be."""

    name = "oarlock"

    def __init__(
        self, model: Any, prompts: Prompts, sampling: Sequence[SamplingParams] | None = None, **scheduler: Any
    ) -> None:
        self.engine = Engine(model, config=settings(len(prompts), **scheduler))
        self.rows: list[list[int]] = [[] for _ in prompts]
        params = sampling or [SamplingParams()] * len(prompts)
        for row, prompt, sampled in zip(self.rows, prompts, params, strict=True):
            request = Request(prompt_ids=prompt, max_tokens=ENDLESS, sampling=sampled, ignore_eos=True)
            self.engine.submit(request, events=_collector(row))
        while self.engine.stats()["active_rows"] < len(prompts):
            self.engine.step()
        self.engine.step()  # from now on each step has one before it to read

    @property
    def bound(self) -> BoundModel:
        return self.engine.bound

    def block(self, steps: int) -> Block:
        """Do ``steps`` iterations."""
        before, step = sum(map(len, self.rows)), self.engine.step
        watch = Stopwatch()
        for _ in range(steps):
            step()
        mx.synchronize()
        return watch.block(steps, sum(map(len, self.rows)) - before)

    def close(self) -> None:
        self.engine.close()


def _collector(row: list[int]) -> Callable[[Any], None]:
    def take(event: Any) -> None:
        if event.token is not None:
            row.append(event.token)

    return take


class Loop:
    """Forward, argmax, read, over rows that are there; no request, no sampling parameter, nobody who may leave.

    Pipelined as the engine is: the next step is dispatched before the previous one is read. ``first``: the tokens to
    begin with, ``[B]``.
    """

    def __init__(self, name: str, bound: BoundModel, caches: Sequence[BatchCache], first: mx.array) -> None:
        self.name = name
        self._bound, self._caches, self._register = bound, caches, first
        self._widths = [1] * first.shape[0]
        self.rows: list[list[int]] = [[] for _ in self._widths]

    def build(self) -> mx.array:
        """Build one step, without evaluating it; return the tokens that it will choose, ``[B]``."""
        ids, widths = self._register[:, None], self._widths  # (B, 1)
        logits = forward(self._bound, self._caches, ids, widths)  # (B, 1, V)
        settle(self._bound, self._caches, ids, widths, widths)
        self._register = mx.argmax(logits[:, -1], axis=-1)
        return self._register

    def block(self, steps: int) -> Block:
        """Do ``steps`` steps."""
        watch = Stopwatch()
        for _ in range(steps):
            previous = self._register
            mx.async_eval(self.build())
            for row, token in zip(self.rows, previous.tolist(), strict=True):
                row.append(token)
        mx.synchronize()
        return watch.block(steps, steps * len(self.rows))

    def arrays(self) -> list[mx.array]:
        """Return what the caches hold."""
        return [array for cache in self._caches for array in cache.arrays()]

    def close(self) -> None:
        """Drop the caches."""
        self._caches = []


class BareLoop(Loop):
    """The limit: the same model on the same caches as an engine's, and nothing around them."""

    def __init__(self, bound: BoundModel, prompts: Prompts) -> None:
        first: list[mx.array] = []
        rows: list[BatchCache] = []
        for place, prompt in enumerate(prompts):
            caches = bound.open_caches(slots=len(prompts) if not place else 1, window=1)
            for cache in caches:
                cache.add(1)
            ids, widths = mx.array([list(prompt)], dtype=mx.uint32), [len(prompt)]
            first.append(mx.argmax(forward(bound, caches, ids, widths)[:, -1], axis=-1))
            settle(bound, caches, ids, widths, widths)
            mx.eval(first[-1], *(array for cache in caches for array in cache.arrays()))
            if not place:
                rows = caches
                continue
            for cache, other in zip(rows, caches, strict=True):
                cache.join(other, [place])
        super().__init__("bare loop", bound, rows, mx.concatenate(first))


class MlxLm:
    """mlx-lm's batch generator through its public interface, at its defaults or with a chunk size."""

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        samplers: Sequence[Callable[[mx.array], mx.array]] | None = None,
        processors: Sequence[list[Callable[[mx.array, mx.array], mx.array]]] | None = None,
    ) -> None:
        self.name = "mlx-lm"
        self._generator = BatchGenerator(model)
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

    def close(self) -> None:
        self._generator.close()

    def _next(self) -> int:
        _, responses = self._generator.next()
        for response in responses:
            self.rows[response.uid].append(response.token)
        return len(responses)


def top_two_gap(model: Any, tokens: Sequence[int]) -> float:
    """Return how far apart the two best scores after ``tokens`` are, with mlx-lm's serial caches."""
    logits = model(mx.array([list(tokens)], dtype=mx.uint32), cache=make_prompt_cache(model))[0, -1]
    second, best = mx.sort(logits.astype(mx.float32))[-2:].tolist()
    return best - second
