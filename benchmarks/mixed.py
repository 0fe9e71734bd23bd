"""An iteration in one forward against the same in two: eight rows that decode beside a chunk of a prompt.

Both sides do the same work again in every step, since what was written is rolled back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx

from oarlock.core import manager
from oarlock.core.bind import BoundModel, bind
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.forward import forward, settle
from oarlock.core.mixed import Side
from oarlock.core.mixed import forward as together
from oarlock.plugins.cli.bench.pairs import Block, Comparison, Report, Stopwatch, equal_hash, in_turns, ratio, spread

ROWS, PROMPT, DONE = 8, 64, 128
"""Running rows, their prompts, and what the other row has behind it, in tokens."""
CHUNKS = (32, 64, 128, 248)
Build = Callable[[Sequence[Side]], list[mx.array]]


class Iterations:
    """Iterations of one kind. ``rows`` collects the best tokens of every running row and of the chunk's last place."""

    def __init__(self, name: str, build: Build, sides: Sequence[Side]) -> None:
        self.name, self._build, self._sides = name, build, sides
        self.rows: list[list[int]] = [[] for _ in range(ROWS + 1)]

    def block(self, steps: int) -> Block:
        """Do ``steps`` iterations."""
        watch = Stopwatch()
        for _ in range(steps):
            decoded, prefilled = self._build(self._sides)
            best = mx.argmax(mx.concatenate([decoded[:, -1], prefilled[:, -1]]), axis=-1)
            mx.async_eval(best)
            mx.eval([array for cache in self._sides[1].caches for array in cache.arrays()])
            for side in self._sides:
                for cache in side.caches:
                    cache.commit([0] * len(side.widths))
            for row, token in zip(self.rows, best.tolist(), strict=True):  # type: ignore[arg-type]
                row.append(token)
        return watch.block(steps, steps * sum(side.ids.size for side in self._sides))


def apart(bound: BoundModel, sides: Sequence[Side]) -> list[mx.array]:
    """Forward each side for itself."""
    return [forward(bound, side.caches, side.ids, side.widths) for side in sides]


def measure(loaded: LoadedModel, rounds: int, steps: int = 2) -> Iterator[Report]:
    """Compare for each of `CHUNKS`. Raises `pairs.UnequalTokens`."""
    bound = bind(loaded.model, EngineConfig.load({}), manager.build())
    with contextlib.closing(bound.swap()):
        running = _filled(bound, ROWS, PROMPT)
        for chunk in CHUNKS:
            sides = [Side(running, _ids(ROWS, 1), [1] * ROWS), Side(_filled(bound, 1, DONE), _ids(1, chunk), [chunk])]
            one = Iterations("one forward", partial(together, bound), sides)
            two = Iterations("two forwards", partial(apart, bound), sides)
            blocks = in_turns([one, two], steps, rounds)
            times = {name: [block.seconds / steps for block in done] for name, done in blocks.items()}
            yield Report(
                name=f"mixed iteration, {ROWS} rows and a chunk of {chunk}",
                facts={"tokens": equal_hash({side.name: side.rows for side in (one, two)}), "rounds": rounds},
                figures={f"{name}, ms": spread([1e3 * each for each in done]) for name, done in times.items()},
                comparisons=[Comparison(what="one forward against two", ratio=ratio(times[one.name], times[two.name]))],
            )


def _ids(rows: int, width: int) -> mx.array:
    return mx.array([[(7 * i + 13 * row + 1) % 20_000 for i in range(width)] for row in range(rows)], dtype=mx.uint32)


def _filled(bound: BoundModel, rows: int, tokens: int) -> list[BatchCache]:
    caches, ids, widths = bound.open_caches(slots=rows, window=1), _ids(rows, tokens), [tokens] * rows
    for cache in caches:
        cache.add(rows)
    forward(bound, caches, ids, widths)
    settle(bound, caches, ids, widths, widths)
    mx.eval([array for cache in caches for array in cache.arrays()])
    return caches
