"""What is compared: oarlock, the bare loop on its caches, and mlx-lm's batch generator. Nothing is timed here but blocks.

All rows run before the first block and none leaves before the last, so prefill stands outside on every side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from oarlock.core import SamplingParams
from oarlock.core.bind import BoundModel
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.engine import Engine
from oarlock.core.forward import forward, settle
from oarlock.plugins.cli.bench.pairs import Block, Stopwatch
from oarlock.plugins.cli.bench.sides import MlxLm, Prompts, Rows, top_two_gap

__all__ = ["BareLoop", "Loop", "MlxLm", "Oarlock", "Prompts", "settings", "top_two_gap"]


def settings(rows: int, **scheduler: Any) -> dict[str, Any]:
    """Return an engine's configuration for ``rows`` rows. Rounds repeat their prompts, so nothing is kept of them."""
    return {
        "scheduler": {"max_batch": max(16, rows), "max_queued": max(64, rows), **scheduler},
        "state_cache": {"name": "none"},
    }


class Oarlock(Rows):
    """Rows on an engine of their own."""

    def __init__(
        self, model: Any, prompts: Prompts, sampling: Sequence[SamplingParams] | None = None, **scheduler: Any
    ) -> None:
        super().__init__(Engine(model, config=settings(len(prompts), **scheduler)), prompts, sampling)

    @property
    def bound(self) -> BoundModel:
        return self.engine.bound

    def close(self) -> None:
        self.engine.close()


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
