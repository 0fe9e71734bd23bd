"""Penalties on tokens that were there before: repetition, presence and frequency.

For a token with score x that stands c times in what was generated, and with penalties r, p and f:

    x = x / r if x > 0 else x * r    where it stands in the prompt or in what was generated (Keskar et al., 2019)
    x = x - p - f * c                where c > 0

in this order, in float32. Repetition counts prompt and output, presence and frequency the output alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.samplers.histories import Histories, at_most, tally

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Drafted, ProcessedRow, Processor
    from oarlock.core.request import SamplingParams

OARLOCK_API = 1


class PenaltyRows(Histories):
    """Rows with penalties; one that a row does not ask for leaves its scores as they are, bit for bit."""

    def __init__(self, rows: Sequence[ProcessedRow]) -> None:
        super().__init__(rows)
        self._set([row.params for row in rows])

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return the scores after the penalties."""
        past, size = self.lines(rows, drafted), logits.shape[-1]
        repetition, presence, frequency = (
            each if rows is None else each[rows] for each in (self._repetition, self._presence, self._frequency)
        )  # (R, 1)
        ids, real = at_most(past.tokens, past.real, size)  # (R, C)
        scores = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32)  # (R, C)
        if self._repeats:
            seen = tally(ids, real, size) > 0  # (R, C)
            scores = mx.where(seen, mx.where(scores > 0, scores / repetition, scores * repetition), scores)
        if self._counts:
            counts = tally(ids, real & past.generated, size)  # (R, C)
            scores = mx.where(counts > 0, scores - presence - frequency * counts, scores)
        return mx.put_along_axis(logits, ids, scores.astype(logits.dtype), axis=-1)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        super().keep(indices)
        self._set([self._params[i] for i in indices])

    def _set(self, params: Sequence[SamplingParams]) -> None:
        def column(values: list[float]) -> mx.array:
            return mx.array(values, dtype=mx.float32)[:, None]  # (B, 1)

        self._params = list(params)
        self._repetition = column([row.repetition_penalty for row in params])
        self._presence = column([row.presence_penalty for row in params])
        self._frequency = column([row.frequency_penalty for row in params])
        self._repeats = any(row.repetition_penalty != 1 for row in params)
        self._counts = any(row.presence_penalty or row.frequency_penalty for row in params)


class Penalties:
    """The processor ``penalties``."""

    name = "penalties"
    is_argmax_invariant = False
    fields = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether one of the three penalties is on."""
        params = row.params
        return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)

    def open(self, rows: Sequence[ProcessedRow]) -> PenaltyRows:
        """Return the penalties of ``rows``, in this order."""
        return PenaltyRows(rows)


@hookimpl
def register_processors(register: Callable[[Processor], None]) -> None:
    """Register ``penalties``."""
    register(Penalties())
