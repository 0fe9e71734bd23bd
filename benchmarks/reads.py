"""Decode throughput of every layout against `full`: the same rows, the same keys and values, one bare loop each.

Texts are prefilled once, by mlx-lm's serial caches; every layout gets what they hold. So no side owes its speed to
another past, and storages that lose nothing must choose the same tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import models
from graphs import dispatches, gathered
from groups import CHUNK, LAYOUTS
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from rows import LENGTHS, WINDOW
from sides import Loop, top_two_gap

from oarlock.core.bind import BoundModel
from oarlock.core.contracts.layout import BatchCache, Positions
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.core.forward import forward, settle
from oarlock.plugins.cli.bench.pairs import Comparison, Report, equal_hash, in_turns, ratio, spread, token_hash

ROWS, EQUAL, PREFIX, TAIL, STEPS = 16, 1024, 960, 32, 4
GATHERED = "paged, gathered"
SIDES = {**LAYOUTS, GATHERED: {"name": "paged", "reads": "gather"}}
EXACT = ("full", "paged", GATHERED)
"""Sides that store the same numbers: they choose the same tokens, or the program fails."""
TARGETS = {"equal": 0.9, "uneven": 1.0}
"""Throughput of `paged` over that of `full`."""

Past = list[tuple[mx.array, mx.array]]
"""Keys and values ``[1, H, T, D]`` of one text, layer by layer."""


@dataclass(frozen=True)
class Row:
    """A row to begin with: of ``prompt``, the first ``length`` tokens are a text's, the last is the first step's.

    What stands between them is its own and is forwarded by every side.
    """

    prompt: list[int]
    past: Past
    length: int


def measure(loaded: LoadedModel, rounds: int) -> Iterator[Report]:
    """Compare all layouts at equal and at uneven lengths, and those of full attention on one common prefix."""
    engines = {name: _engine(loaded.model, choice) for name, choice in SIDES.items()}
    bound = {name: engine.bound for name, engine in engines.items()}
    texts = models.prompts(loaded, [EQUAL + ROWS] * 4)
    pasts = [past(loaded.model, text[:EQUAL]) for text in texts]
    rows = [Row([*texts[i % 4][:EQUAL], texts[i % 4][EQUAL + i]], pasts[i % 4], EQUAL) for i in range(ROWS)]
    yield _compared("equal", f"{ROWS} rows of {EQUAL} tokens", loaded.model, bound, rows, rounds)
    (text,) = models.prompts(loaded, [max(LENGTHS) + ROWS])
    whole = past(loaded.model, text[: max(LENGTHS)])
    rows = [Row([*text[:length], text[length + i]], whole, length) for i, length in enumerate(LENGTHS)]
    name = f"{ROWS} rows of {min(LENGTHS)} to {max(LENGTHS)} tokens"
    yield _compared("uneven", name, loaded.model, bound, rows, rounds)
    exact = {name: bound[name] for name in EXACT}
    rows = [Row([*text[:PREFIX], *text[i : i + TAIL + 1]], whole, PREFIX) for i in range(ROWS)]
    name = f"{ROWS} rows on one prefix of {PREFIX} tokens, {TAIL} of their own"
    yield _compared("shared", name, loaded.model, exact, rows, rounds)
    for engine in engines.values():
        engine.close()


def past(model: Any, tokens: Sequence[int]) -> Past:
    """Prefill ``tokens`` alone."""
    caches = make_prompt_cache(model)
    for start in range(0, len(tokens), CHUNK):
        mx.eval(model(mx.array([tokens[start : start + CHUNK]]), cache=caches))
    return [(cache.keys[:, :, : len(tokens)], cache.values[:, :, : len(tokens)]) for cache in caches]


def _engine(model: Any, choice: Mapping[str, Any]) -> Engine:
    """Bind ``model`` with one layout; for `rotating`, a twin on the same weights whose layers see a window."""
    kind = "full"
    if choice["name"] == "rotating":
        model, layers, kind = copy.copy(model), len(model.layers), "rotating"
        model.make_cache = lambda: [RotatingKVCache(max_size=WINDOW, keep=0) for _ in range(layers)]
    return Engine(model, config={"layouts": {kind: dict(choice)}})


def _compared(
    kind: str, name: str, model: Any, bound: Mapping[str, BoundModel], rows: Sequence[Row], rounds: int
) -> Report:
    first = mx.array([row.prompt[-1] for row in rows], dtype=mx.uint32)
    sides = [Loop(side, each, _filled(each, rows), first) for side, each in bound.items()]
    costs = {side.name: _cost(side) for side in sides}
    blocks = in_turns(sides, STEPS, rounds)
    tokens = {side.name: side.rows for side in sides}
    for side in sides:
        side.close()
    gap = lambda row, after: top_two_gap(model, [*rows[row].prompt, *after])  # noqa: E731
    same = equal_hash({side: tokens[side] for side in EXACT}, gap)
    seconds = {side: [block.seconds for block in each] for side, each in blocks.items()}
    spent = {side: [block.cpu for block in each] for side, each in blocks.items()}
    pairs = [(side, "full", TARGETS.get(kind) if side == "paged" else None) for side in bound if side != "full"]
    pairs.append(("paged", GATHERED, None))
    return Report(
        name=f"decode, {name}, greedy, {model.args.model_type} of {len(model.layers)} layers",
        facts={
            "prompt tokens": sum(len(row.prompt) for row in rows),
            "hash of the exact": same,
            **{f"of {side}": token_hash(tokens[side]) for side in bound if side not in EXACT},
        },
        figures={f"{side}: ms a step": spread([1e3 * s / STEPS for s in each]) for side, each in seconds.items()},
        comparisons=[
            Comparison(what=f"{what}: {ours} / {theirs}", ratio=ratio(times[ours], times[theirs]), target=target)
            for ours, theirs, wanted in pairs
            for what, times, target in (("throughput", seconds, wanted), ("  by CPU time", spent, None))
        ],
        table=_table(costs),
    )


def _cost(side: Loop) -> tuple[int, int]:
    """Do two steps; return the kernels that the second runs and the bytes that it gathers: the first may grow a pool."""
    mx.eval(side.build())
    with gathered() as copies:
        tokens = side.build()
    count = dispatches([tokens, *side.arrays()])
    mx.eval(tokens)
    return count, sum(copies)


def _table(costs: Mapping[str, tuple[int, int]]) -> str:
    lines = ["| | dispatches a step | MB gathered a step |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {side} | {count} | {size / 1e6:.1f} |" for side, (count, size) in costs.items())])


def _filled(bound: BoundModel, rows: Sequence[Row]) -> list[BatchCache]:
    """Return caches with these rows; those that go on with tokens of their own are one row that joins again and again."""
    caches = bound.open_caches(slots=1, window=1)
    tails = [row.prompt[row.length : -1] for row in rows]
    one: list[BatchCache] = []
    for place, row in enumerate(rows):
        if not one or not tails[0]:
            one = _alone(bound, row.past, row.length)
        for cache, other in zip(caches, one, strict=True):
            cache.join(other, [place])
        mx.eval([array for cache in caches for array in cache.arrays()])
    if tails[0]:
        ids, widths = mx.array(tails, dtype=mx.uint32), [len(tail) for tail in tails]
        mx.eval(forward(bound, caches, ids, widths))
        settle(bound, caches, ids, widths, widths)
    return caches


def _alone(bound: BoundModel, past_: Past, length: int) -> list[BatchCache]:
    """Return one row, written in chunks as a prefill does."""
    caches = bound.open_caches(slots=1, window=1)
    for cache in caches:
        cache.add(1)
    for start in range(0, length, CHUNK):
        widths = [min(CHUNK, length - start)]
        for cache in caches:
            cache.begin(widths, Positions([start]))
        at = slice(start, start + widths[0])
        for cache, (keys, values) in zip(caches, past_, strict=True):
            cache.update_and_fetch(keys[:, :, at], values[:, :, at])  # type: ignore[attr-defined]
        for cache in caches:
            cache.commit(widths)
        mx.eval([array for cache in caches for array in cache.arrays()])
    return caches
