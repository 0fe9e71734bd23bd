"""The processor `example`: lowers the score of the token that a row ended with, so that nothing stutters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.sampler import Drafted, ProcessedRow
from oarlock.core.errors import InvalidParameter
from oarlock.core.request import SamplingParams
from oarlock.samplers.histories import Histories

OARLOCK_API = 1
KEY = "example"
"""``SamplingParams(extra={"example": 2.0})`` asks for it: by how much the score is lowered."""


class ExampleRows(Histories):
    """The rows of a group, whose tokens `Histories` keeps on the device. R lines of scores, V tokens."""

    def __init__(self, rows: Sequence[ProcessedRow]) -> None:
        """Put the parameters where the scores are: this happens when rows join or leave, not in a step."""
        super().__init__(rows)
        self._less = mx.array([row.params.extra[KEY] for row in rows], dtype=mx.float32)[:, None]  # (B, 1)

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return the scores [R, V] rewritten; ``rows`` says whose each line is, ``drafted`` what it would have taken before."""
        past = self.lines(rows, drafted)
        less = self._less if rows is None else self._less[rows]
        last = mx.take_along_axis(past.tokens, past.lengths - 1, axis=-1)  # (R, 1)
        score = mx.take_along_axis(logits, last, axis=-1)
        return mx.put_along_axis(logits, last, (score - less).astype(logits.dtype), axis=-1)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        super().keep(indices)
        self._less = self._less[mx.array(list(indices), dtype=mx.int32)]


class Example:
    """Registers as `example`."""

    name = "example"
    is_argmax_invariant = False
    fields: frozenset[str] = frozenset()
    extra = frozenset({KEY})

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether a row asks for it."""
        return KEY in row.params.extra

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Refuse a value that cannot be, when a request is submitted."""
        value = params.extra[KEY]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise InvalidParameter(KEY, value, "numbers from 0 and below 1e6")

    def open(self, rows: Sequence[ProcessedRow]) -> ExampleRows:
        """Return the processor for these rows, in this order."""
        return ExampleRows(rows)


@hookimpl
def register_processors(register: Callable[[Any], None]) -> None:
    """Register `example`."""
    register(Example())
