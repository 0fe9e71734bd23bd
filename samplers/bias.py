"""What is done to named tokens, whatever stands before them: bias, banned tokens, and no end before min_tokens.

`SamplingParams.logit_bias` is added to the scores of its tokens, in float32. The tokens that
``extra["banned_tokens"]`` lists, and until `Request.min_tokens` are generated those that end the row, score minus
infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from oarlock.core import errors, hookimpl
from oarlock.core.request import is_whole

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Drafted, ProcessedRow, Processor
    from oarlock.core.request import SamplingParams

OARLOCK_API = 1
BANNED = "banned_tokens"


class BiasRows:
    """What is added to which tokens, a row each."""

    def __init__(self, rows: Sequence[ProcessedRow]) -> None:
        self._added = [_added(row.params) for row in rows]
        self._device: tuple[mx.array, mx.array] | None = None

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return the scores with the bias added."""
        ids, added = self._device = self._device or self._on_device(logits.shape[-1])  # (B, K)
        if rows is not None:
            ids, added = ids[rows], added[rows]  # (R, K)
        scores = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32) + added  # (R, K)
        return mx.put_along_axis(logits, ids, scores.astype(logits.dtype), axis=-1)

    def push(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Do nothing."""

    def rollback(self, counts: Sequence[int]) -> None:
        """Do nothing."""

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self._added, self._device = [self._added[i] for i in indices], None

    def _on_device(self, size: int) -> tuple[mx.array, mx.array]:
        """Return ids and what is added; a row that names fewer than others repeats its first, which changes nothing."""
        pairs = [[pair for pair in row.items() if pair[0] < size] or [(0, -0.0)] for row in self._added]
        widest = max(map(len, pairs))
        table = [row + row[:1] * (widest - len(row)) for row in pairs]
        ids = [[token for token, _ in row] for row in table]
        return mx.array(ids, dtype=mx.int32), mx.array([[amount for _, amount in row] for row in table])


class Bias:
    """The processor ``bias``."""

    name = "bias"
    is_argmax_invariant = False
    fields = frozenset({"logit_bias"})
    extra = frozenset({BANNED})

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Raise where ``banned_tokens`` is no list of ids, or bans all there are."""
        banned = params.extra[BANNED]
        allowed = f"lists of token ids from 0 to {vocabulary - 1}, not of all"
        if not isinstance(banned, Sequence) or isinstance(banned, str):
            raise errors.InvalidParameter(BANNED, banned, allowed)
        for token in banned:
            if not is_whole(token) or not 0 <= token < vocabulary:
                raise errors.InvalidParameter(BANNED, token, allowed)
        if len(set(banned)) == vocabulary:
            raise errors.InvalidParameter(BANNED, f"all {vocabulary} ids", allowed)

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether any token is named."""
        return bool(row.params.logit_bias or row.params.extra.get(BANNED))

    def open(self, rows: Sequence[ProcessedRow]) -> BiasRows:
        """Return the bias of ``rows``, in this order."""
        return BiasRows(rows)


class MinTokensRows:
    """How many tokens each row has and needs, and which it may not take before."""

    def __init__(self, rows: Sequence[ProcessedRow]) -> None:
        self._stops = [row.stop_ids for row in rows]
        self._needed = [row.min_tokens for row in rows]
        self._generated = [len(row.generated) for row in rows]
        self._mask: mx.array | None = None

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return the scores, minus infinity for tokens that would end a row too early."""
        missing = [needed - have for needed, have in zip(self._needed, self._generated, strict=True)]
        if max(missing) <= 0:
            return logits
        if self._mask is None:
            self._mask = self._on_device(logits.shape[-1])  # (B, V)
        left, mask = mx.array(missing, dtype=mx.int32), self._mask
        if rows is not None:
            left, mask = left[rows], mask[rows]
        if drafted is not None:
            left = left - mx.array(list(drafted.counts), dtype=mx.int32)
        return mx.where(mask & (left > 0)[:, None], mx.array(-math.inf, dtype=logits.dtype), logits)

    def push(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Count drawn tokens."""
        self._generated = [have + count for have, count in zip(self._generated, counts, strict=True)]

    def rollback(self, counts: Sequence[int]) -> None:
        """Take counted tokens back."""
        self._generated = [have - count for have, count in zip(self._generated, counts, strict=True)]

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self._stops = [self._stops[i] for i in indices]
        self._needed = [self._needed[i] for i in indices]
        self._generated = [self._generated[i] for i in indices]
        self._mask = None

    def _on_device(self, size: int) -> mx.array:
        mask = np.zeros((len(self._stops), size), dtype=bool)
        for line, stops in zip(mask, self._stops, strict=True):
            line[[token for token in stops if token < size]] = True
        return mx.array(mask)


class MinTokens:
    """The processor ``min_tokens``."""

    name = "min_tokens"
    is_argmax_invariant = False
    fields = frozenset({"min_tokens"})

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether the row needs tokens yet and something could end it before."""
        return bool(row.stop_ids) and row.min_tokens > len(row.generated)

    def open(self, rows: Sequence[ProcessedRow]) -> MinTokensRows:
        """Return what ``rows`` need, in this order."""
        return MinTokensRows(rows)


def _added(params: SamplingParams) -> dict[int, float]:
    """Return what is added to which token."""
    return {**(params.logit_bias or {}), **dict.fromkeys(params.extra.get(BANNED, ()), -math.inf)}


@hookimpl
def register_processors(register: Callable[[Processor], None]) -> None:
    """Register ``bias`` and ``min_tokens``."""
    register(Bias())
    register(MinTokens())
