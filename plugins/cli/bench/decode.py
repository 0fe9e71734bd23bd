"""Uniform decode of a user's own model: all rows run, nobody joins or leaves. Alone, or in turns with mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence

from oarlock.core.engine import Engine
from oarlock.plugins.cli.bench.pairs import (
    Block,
    Comparison,
    Report,
    UnequalTokens,
    equal_hash,
    in_turns,
    ratio,
    spread,
    token_hash,
)
from oarlock.plugins.cli.bench.prompts import prompts
from oarlock.plugins.cli.bench.sides import ENDLESS, MlxLm, Rows, top_two_gap
from oarlock.plugins.cli.failures import Failure

STEPS = 8
"""Steps of one block: short, so that a pair sees the same machine."""


def decode(engine: Engine, lengths: Sequence[int], rounds: int, *, against: bool) -> Report:
    """Decode greedily, a row for each of ``lengths`` prompt tokens; ``against``: mlx-lm does the same rounds.

    Raises `pairs.UnequalTokens` where the two give different tokens though no layout is named by the configuration: one
    that is may store what it rounds, so that a difference is a fact and no fault.
    """
    bound = engine.bound
    asked = prompts(engine.tokenizer, bound.vocabulary, lengths)
    ours = Rows(engine, asked, max_tokens=ENDLESS if bound.positions is None else None)
    sides: list[Rows | MlxLm] = [ours, *([MlxLm(bound.model, asked)] if against else [])]
    try:
        blocks = in_turns(sides, STEPS, rounds)
        if ours.ended:
            msg = f"a row ended within {rounds} rounds: the model takes {bound.positions} positions"
            raise Failure(msg + "; use a smaller --rounds or --prompt-tokens")
    finally:
        for side in sides:
            side.close()
    tokens = {side.name: side.rows for side in sides}
    try:
        same = equal_hash(tokens, lambda row, after: top_two_gap(bound.model, [*asked[row], *after]))
    except UnequalTokens:
        if not (bound.config.layouts.kinds or bound.config.layouts.layers):
            raise
        same = f"{token_hash(ours.rows)}, not mlx-lm's"
    mine = blocks[ours.name]
    steps = sum(block.steps for block in mine)
    return Report(
        name=f"decode, {len(lengths)} rows of {max(lengths)} prompt tokens, greedy",
        facts={
            "rows": len(lengths),
            "prompt tokens": sum(lengths),
            "tokens": sum(block.tokens for block in mine),
            "tokens a step": round(sum(block.tokens for block in mine) / steps, 2),
            "hash": same,
        },
        figures={
            f"{name}: {unit}": spread([value(block) for block in each])
            for name, each in blocks.items()
            for unit, value in (("tokens a second", _rate), ("ms a step", _step))
        },
        comparisons=[
            Comparison(
                what="throughput against mlx-lm",
                ratio=ratio([1 / _rate(b) for b in mine], [1 / _rate(b) for b in blocks[side.name]]),
            )
            for side in sides[1:]
        ],
    )


def _rate(block: Block) -> float:
    return block.tokens / block.seconds


def _step(block: Block) -> float:
    return 1e3 * block.seconds / block.steps
