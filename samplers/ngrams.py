"""No n-gram twice: a token scores minus infinity where it would complete n tokens that stand in the row already.

``extra["no_repeat_ngram"]`` is n, from 1 on (1: no token twice); prompt and output both count (Paulus et al., 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from oarlock.core import errors, hookimpl
from oarlock.core.request import is_whole
from oarlock.samplers.histories import Histories, at_most, tally

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Drafted, ProcessedRow, Processor
    from oarlock.core.request import SamplingParams

OARLOCK_API = 1
KEY = "no_repeat_ngram"


class NgramRows(Histories):
    """Rows that repeat no n-gram, each with its own n."""

    def __init__(self, rows: Sequence[ProcessedRow]) -> None:
        super().__init__(rows)
        self._n = [row.params.extra[KEY] for row in rows]

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return the scores, minus infinity for tokens that would repeat an n-gram."""
        past, size = self.lines(rows, drafted), logits.shape[-1]
        n = mx.array(self._n, dtype=mx.int32)[:, None]
        n = n if rows is None else n[rows]  # (R, 1)
        repeats = past.real & (
            past.columns >= n - 1
        )  # (R, C): the token of this column was preceded by what is last now
        for back in range(1, max(self._n)):
            before = mx.pad(past.tokens[:, :-back], [(0, 0), (back, 0)])  # (R, C)
            last = mx.take_along_axis(past.tokens, mx.maximum(past.lengths - back, 0), axis=-1)  # (R, 1)
            repeats = repeats & ((before == last) | (back >= n))
        ids, repeats = at_most(past.tokens, repeats, size)
        scores = mx.take_along_axis(logits, ids, axis=-1)  # (R, C)
        banned = mx.where(tally(ids, repeats, size) > 0, mx.array(-math.inf, dtype=logits.dtype), scores)
        return mx.put_along_axis(logits, ids, banned, axis=-1)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        super().keep(indices)
        self._n = [self._n[i] for i in indices]


class Ngrams:
    """The processor ``no_repeat_ngram``."""

    name = "no_repeat_ngram"
    is_argmax_invariant = False
    fields: frozenset[str] = frozenset()
    extra = frozenset({KEY})

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Raise where n is no length of an n-gram."""
        n = params.extra[KEY]
        if not is_whole(n) or not 1 <= n <= MOST:
            raise errors.InvalidParameter(KEY, n, f"whole numbers from 1 to {MOST}")

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether the row names a length."""
        return KEY in row.params.extra

    def open(self, rows: Sequence[ProcessedRow]) -> NgramRows:
        """Return what ``rows`` must not repeat, in this order."""
        return NgramRows(rows)


MOST = 64
"""The longest n-gram: each token of it costs a comparison of all histories in every step."""


@hookimpl
def register_processors(register: Callable[[Processor], None]) -> None:
    """Register ``no_repeat_ngram``."""
    register(Ngrams())
