"""Processors made of plain functions of one row, as mlx-lm has them: ``(tokens, logits) -> logits``.

    from oarlock.samplers.callables import per_row

    class Plugin:
        @hookimpl
        def register_processors(self, register):
            register(per_row("quiet", lambda strength: make_quiet(strength)))

and requests ask for it by ``SamplingParams(extra={"quiet": 0.5})``.

It costs one call and a graph of its own for each row and step, on the host, where a processor of this engine is called
once for all rows. The device is not waited for: ``tokens`` are unread. Functions that read them wait each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from oarlock.core import errors
from oarlock.samplers.histories import Histories

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Drafted, ProcessedRow
    from oarlock.core.request import SamplingParams

RowFunction = Callable[[mx.array, mx.array], mx.array]
"""From all tokens of a row, uint32 ``[N]``, and its scores ``[1, V]`` to scores ``[1, V]``; nothing else decides."""


def per_row(name: str, make: Callable[[Any], RowFunction], *, is_argmax_invariant: bool = False) -> PerRow:
    """Return a processor that calls what ``make`` returns for each row's ``extra[name]``.

    ``make`` is called when such a request is submitted, where its error refuses the request, and whenever the row's
    batch is opened anew: so the function may keep nothing between calls but what it was made with.
    """
    return PerRow(name, make, is_argmax_invariant)


class CallableRows(Histories):
    """Rows with a function each."""

    def __init__(self, rows: Sequence[ProcessedRow], functions: Sequence[RowFunction]) -> None:
        super().__init__(rows)
        self._functions = list(functions)

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return the scores of all lines, each by its row's function."""
        owners: Any = range(logits.shape[0]) if rows is None else rows.tolist()
        lines = mx.concatenate([self._line(i, row, logits[i : i + 1], drafted) for i, row in enumerate(owners)])
        # Else tokens that no function reads would pile up.
        result: mx.array = mx.depends([lines], [self.tokens])[0]
        return result

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        super().keep(indices)
        self._functions = [self._functions[i] for i in indices]

    def _line(self, line: int, row: int, scores: mx.array, drafted: Drafted | None) -> mx.array:
        tokens = self.line(row)  # (N,)
        if drafted is not None:
            tokens = mx.concatenate([tokens, drafted.tokens[line, : drafted.counts[line]].astype(mx.uint32)])
        result = self._functions[row](tokens, scores)
        if result.shape != scores.shape:
            msg = f"a row's function returned scores of shape {result.shape}; allowed: {scores.shape}, as it was given"
            raise ValueError(msg)
        return result.astype(scores.dtype)


class PerRow:
    """What `per_row` returns."""

    fields: frozenset[str] = frozenset()

    def __init__(self, name: str, make: Callable[[Any], RowFunction], is_argmax_invariant: bool) -> None:
        self.name, self.is_argmax_invariant = name, is_argmax_invariant
        self.extra = frozenset({name})
        self._make = make

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Raise where ``make`` does, with its words."""
        value = params.extra[self.name]
        try:
            self._make(value)
        except Exception as error:
            raise errors.InvalidParameter(self.name, value, f"what its maker takes: {error}") from error

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether the row names it."""
        return self.name in row.params.extra

    def open(self, rows: Sequence[ProcessedRow]) -> CallableRows:
        """Return the functions of ``rows``, in this order."""
        return CallableRows(rows, [self._make(row.params.extra[self.name]) for row in rows])
