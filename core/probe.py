"""The bind probe: does a row keep its scores beside a row of another length? It compares; it repairs nothing."""

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


def probe(bound: BoundModel) -> None:
    """Run two ragged rows alone and together. Raises `errors.ModelNotBatchable` with the reason."""
    prompts = [[(7919 * i + 13 * row + 1) % bound.vocabulary for i in range(n)] for row, n in enumerate(_LENGTHS)]
    try:
        alone = [_run(bound, [prompt]) for prompt in prompts]
        together = _run(bound, prompts)
    except ForwardFailed as failure:
        reason = f"{type(failure.cause).__name__}: {failure.cause}"
        raise ModelNotBatchable(bound.model_type, f"a ragged forward raises {reason}") from failure.cause
    solo = mx.concatenate(alone, axis=1).astype(mx.float32)  # (steps, rows, V)
    batch = together.astype(mx.float32)
    spread = mx.max(solo) - mx.min(solo)
    worst: float = (mx.max(mx.abs(solo - batch)) / mx.maximum(spread, 1e-6)).item()  # type: ignore[assignment]
    allowed = _TOLERANCE.get(str(together.dtype).rpartition(".")[2], _TOLERANCE["bfloat16"])
    if not worst <= allowed:
        raise ModelNotBatchable(
            bound.model_type,
            f"scores of a row beside another differ by {worst:.2g} of their spread (at most {allowed})",
        )


def _run(bound: BoundModel, prompts: Sequence[Sequence[int]]) -> mx.array:
    """Prefill each prompt alone, join them, decode fixed tokens together; return logits [steps, rows, V]."""
    group: list[BatchCache] = []
    for place, prompt in enumerate(prompts):
        caches = bound.open_caches(slots=1, window=1)
        for cache in caches:
            cache.add(1)
        _step(bound, caches, [list(prompt)])
        mx.eval([array for cache in caches for array in cache.arrays()])
        if not group:
            group = caches
            continue
        for cache, other in zip(group, caches, strict=True):
            cache.join(other, [place])
    steps = [_step(bound, group, [[prompt[step]] for prompt in prompts]) for step in range(_STEPS)]
    return mx.stack(steps)


def _step(bound: BoundModel, caches: Sequence[BatchCache], tokens: list[list[int]]) -> mx.array:
    ids = mx.array(tokens, dtype=mx.uint32)
    widths = [ids.shape[1]] * ids.shape[0]
    logits = forward(bound, caches, ids, widths)
    settle(bound, caches, ids, widths, widths)
    return logits[:, -1]
