"""Uniform decode: all rows run, nobody joins or leaves. Against the bare loop and against mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models
from mlx_lm.sample_utils import make_sampler
from sides import BareLoop, MlxLm, Oarlock, Prompts, top_two_gap

from oarlock.core import SamplingParams
from oarlock.core.contracts.loader import LoadedModel
from oarlock.plugins.cli.bench.pairs import Block, Comparison, Report, equal_hash, in_turns, ratio, spread

STEPS = 8
"""Steps of one block: short, so that a pair sees the same machine."""
GREEDY_TARGET, SAMPLED_TARGET = 0.97, 1.2


def facts(prompts: Prompts, blocks: Sequence[Block], **more: Any) -> dict[str, Any]:
    """Return what the design wants printed beside a ratio."""
    steps, tokens = sum(block.steps for block in blocks), sum(block.tokens for block in blocks)
    return {
        "prompts": len(prompts),
        "prompt tokens": sum(map(len, prompts)),
        "tokens": tokens,
        "occupancy": round(tokens / steps, 2),
        **more,
    }


def seconds(blocks: Sequence[Block]) -> list[float]:
    return [block.seconds for block in blocks]


def busy(blocks: Sequence[Block]) -> list[float]:
    return [block.host for block in blocks]


def greedy(loaded: LoadedModel, lengths: Sequence[int], rounds: int) -> Report:
    """Decode greedily; the tokens of all three sides must be the same."""
    prompts = models.prompts(loaded, lengths)
    ours = Oarlock(loaded.model, prompts)
    sides = [ours, BareLoop(ours.bound, prompts), MlxLm(loaded.model, prompts)]
    blocks = in_turns(sides, STEPS, rounds)
    tokens = {side.name: side.rows for side in sides}
    same = equal_hash(tokens, lambda row, after: top_two_gap(loaded.model, [*prompts[row], *after]))
    for side in sides:
        side.close()
    kind = "equal lengths" if len(set(lengths)) == 1 else f"lengths {min(lengths)} to {max(lengths)}"
    return Report(
        name=f"uniform decode, {len(lengths)} rows, {kind}, greedy",
        facts=facts(prompts, blocks[ours.name], hash=same),
        figures={f"{name}: ms a step": spread([1e3 * b.seconds / b.steps for b in blocks[name]]) for name in blocks},
        comparisons=[
            Comparison(
                what=f"throughput against {side.name}",
                ratio=ratio(seconds(blocks[ours.name]), seconds(blocks[side.name])),
                target=GREEDY_TARGET,
            )
            for side in sides[1:]
        ],
    )


def sampled(loaded: LoadedModel, lengths: Sequence[int], rounds: int) -> Report:
    """Decode with another temperature and top_p in every row."""
    prompts = models.prompts(loaded, lengths)
    last = len(lengths) - 1
    pairs = [(0.5 + 0.7 * i / last, 0.8 + 0.18 * i / last) for i in range(len(lengths))]
    params = [SamplingParams(temperature=t, top_p=p, seed=i) for i, (t, p) in enumerate(pairs)]
    ours = Oarlock(loaded.model, prompts, params)
    theirs = MlxLm(loaded.model, prompts, [make_sampler(temp=t, top_p=p) for t, p in pairs])
    blocks = in_turns([ours, theirs], STEPS, rounds)
    ours.close()
    theirs.close()
    return Report(
        name=f"uniform decode, {len(lengths)} rows, temperature 0.5 to 1.2 and top_p 0.8 to 0.98 by row",
        facts=facts(prompts, blocks[ours.name]),
        figures={f"{name}: ms a step": spread([1e3 * b.seconds / b.steps for b in blocks[name]]) for name in blocks},
        comparisons=[
            Comparison(
                what="throughput against mlx-lm",
                ratio=ratio(seconds(blocks[ours.name]), seconds(blocks[theirs.name])),
                target=SAMPLED_TARGET,
            )
        ],
    )


def host(rounds: int, rows: int) -> Report:
    """Step a model so small that the host's part is nearly all: microseconds a step on all sides."""
    model = models.tiny()
    prompts = [[(7 * row + 3 * i) % 256 for i in range(16)] for row in range(rows)]
    ours = Oarlock(model, prompts)
    sides = [ours, BareLoop(ours.bound, prompts), MlxLm(model, prompts)]
    blocks = in_turns(sides, STEPS, rounds)
    same = equal_hash({side.name: side.rows for side in sides}, lambda row, t: top_two_gap(model, [*prompts[row], *t]))
    for side in sides:
        side.close()
    figures, comparisons = {}, []
    for what, times in (("in the driving thread", busy), ("on the clock", seconds)):
        for name in blocks:
            figures[f"{name}: us a step {what}"] = spread([1e6 * s / STEPS for s in times(blocks[name])])
        comparisons += [
            Comparison(
                what=f"time {what}: {side.name} / ours",
                ratio=ratio(times(blocks[ours.name]), times(blocks[side.name])),
                target=1.0 if side.name == "mlx-lm" else None,
            )
            for side in sides[1:]
        ]
    return Report(
        name=f"host time, tiny model, {rows} rows, greedy",
        facts=facts(prompts, blocks[ours.name], hash=same),
        figures=figures,
        comparisons=comparisons,
    )
