"""A user's own model: rows that decode, then rows that wait while a prompt joins. Alone, or in turns with mlx-lm."""

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
from oarlock.plugins.cli.bench.sides import ENDLESS, MlxLm, Prompts, Rows, top_two_gap
from oarlock.plugins.cli.failures import Failure, described

STEPS = 8
"""Steps of one block: short, so that a pair sees the same machine."""


def decode(engine: Engine, lengths: Sequence[int], rounds: int, *, joiner: int = 0, against: bool = False) -> Report:
    """Decode greedily, a row for each of ``lengths`` prompt tokens; ``against``: mlx-lm does the same rounds.

    ``joiner``: tokens of a prompt that joins in as many rounds more, while the longest wait of the running rows is taken.
    Raises `pairs.UnequalTokens` where the two give different tokens though no layout is named by the configuration: one
    that is may store what it rounds, so that a difference is a fact and no fault.
    """
    bound = engine.bound
    asked = prompts(engine.tokenizer, bound.vocabulary, lengths)
    ours = Rows(engine, asked, max_tokens=ENDLESS if bound.positions is None else None)
    sides: list[Rows | MlxLm] = [ours]
    try:
        if against:
            sides.append(_theirs(engine, asked))
        blocks = in_turns(sides, STEPS, rounds)
        stalls = _stalls(sides, prompts(engine.tokenizer, bound.vocabulary, [joiner])[0], rounds) if joiner else {}
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
    seconds = {name: [1 / _rate(block) for block in each] for name, each in blocks.items()}  # a token
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
        }
        | {f"{name}: ms stalled": spread([1e3 * seconds for seconds in each]) for name, each in stalls.items()},
        comparisons=[
            Comparison(what=what, ratio=ratio(times[ours.name], times[side.name]))
            for side in sides[1:]
            for what, times in (("throughput / mlx-lm's", seconds), ("mlx-lm's stall / ours", stalls))
            if times
        ],
    )


def _theirs(engine: Engine, asked: Prompts) -> MlxLm:
    """Return mlx-lm's side, or say in one line that there is none: it runs not all models that run here."""
    try:
        return MlxLm(engine.bound.model, asked)
    except Exception as error:
        msg = f"mlx-lm's batch generator does not run this model, leave out --against ({described(error)})"
        raise Failure(msg) from error


def _stalls(sides: Sequence[Rows | MlxLm], prompt: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Let a prompt join each side in every round, in turns, after one each that warms up and does not count."""
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(-1, rounds):
        for side in sides if number % 2 else sides[::-1]:
            seconds = side.stall(prompt)
            if number >= 0:
                found[side.name].append(seconds)
    return found


def _rate(block: Block) -> float:
    return block.tokens / block.seconds


def _step(block: Block) -> float:
    return 1e3 * block.seconds / block.steps
