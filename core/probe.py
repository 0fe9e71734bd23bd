"""The bind probe: does a row keep its scores in company? It compares; it repairs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from oarlock.core.contracts.layout import BatchCache
from oarlock.core.errors import ModelNotBatchable
from oarlock.core.forward import ForwardFailed, forward, settle

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_LENGTHS = (5, 3)
_STEPS = 2
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest difference allowed, as a share of the scores' spread: kernels may differ by rows, masks must not."""

Prompt = Sequence[int]


def probe(bound: BoundModel) -> None:
    """Run rows alone, beside one of another length, and three of one length, which share one offset.

    Kernels take another way in each of the three. Raises `errors.ModelNotBatchable` with the reason.
    """
    long, short = ([(7919 * i + 13 * row + 1) % bound.vocabulary for i in range(n)] for row, n in enumerate(_LENGTHS))
    try:
        alone, beside = _run(bound, [[long]]), _run(bound, [[short]])
        ragged = _run(bound, [[long], [short]])
        equal = _run(bound, [[short] * 3])
    except ForwardFailed as failure:
        reason = f"{type(failure.cause).__name__}: {failure.cause}"
        raise ModelNotBatchable(bound.model_type, f"a forward of rows raises {reason}") from failure.cause
    _compare(bound, [alone, beside], ragged, "a row beside one of another length")
    _compare(bound, [beside] * 3, equal, "a row among three of one length")


def _compare(bound: BoundModel, alone: Sequence[mx.array], together: mx.array, who: str) -> None:
    solo = mx.concatenate(list(alone), axis=1).astype(mx.float32)  # (steps, rows, V)
    batch = together.astype(mx.float32)
    spread = mx.max(solo) - mx.min(solo)
    worst: float = (mx.max(mx.abs(solo - batch)) / mx.maximum(spread, 1e-6)).item()  # type: ignore[assignment]
    allowed = _TOLERANCE.get(str(together.dtype).rpartition(".")[2], _TOLERANCE["bfloat16"])
    if not worst <= allowed:
        reason = f"scores of {who} differ by {worst:.2g} of their spread (at most {allowed})"
        raise ModelNotBatchable(bound.model_type, reason)


def _run(bound: BoundModel, cohorts: Sequence[Sequence[Prompt]]) -> mx.array:
    """Prefill each cohort's prompts together, join the cohorts, decode fixed tokens; return logits [steps, rows, V]."""
    group: list[BatchCache] = []
    rows: list[Prompt] = []
    firsts: list[mx.array] = []
    for prompts in cohorts:
        caches = bound.open_caches(slots=1, window=1)
        for cache in caches:
            cache.add(len(prompts))
        firsts.append(_step(bound, caches, [list(prompt) for prompt in prompts]))
        mx.eval([array for cache in caches for array in cache.arrays()])
        places = range(len(rows), len(rows) + len(prompts))
        rows += prompts
        if not group:
            group = caches
            continue
        for cache, other in zip(group, caches, strict=True):
            cache.join(other, places)
    steps = [_step(bound, group, [[prompt[step]] for prompt in rows]) for step in range(_STEPS)]
    return mx.stack([mx.concatenate(firsts), *steps])


def _step(bound: BoundModel, caches: Sequence[BatchCache], tokens: list[list[int]]) -> mx.array:
    ids = mx.array(tokens, dtype=mx.uint32)
    widths = [ids.shape[1]] * ids.shape[0]
    logits = forward(bound, caches, ids, widths)
    settle(bound, caches, ids, widths, widths)
    return logits[:, -1]
