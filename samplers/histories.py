"""Each row's tokens on the device, growing by what was drawn before anybody has read it. It rewrites no scores.

What a processor reads of them and writes to scores are single tokens: work follows the histories, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.sampler import Drafted, ProcessedRow

STEP = 256
"""Columns by which the storage grows, so that shapes change rarely."""


@attrs.frozen(eq=False)
class Past:
    """The tokens before each line of scores, from the first; what stands in columns that are not real is anything."""

    tokens: mx.array  # (R, C) uint32
    lengths: mx.array  # (R, 1) int32
    prompts: mx.array  # (R, 1) int32

    @property
    def columns(self) -> mx.array:
        """Return int32 ``[C]``: the number of each column."""
        return mx.arange(self.tokens.shape[1], dtype=mx.int32)

    @property
    def real(self) -> mx.array:
        """Return bool ``[R, C]``: where there is a token."""
        return self.columns < self.lengths

    @property
    def generated(self) -> mx.array:
        """Return bool ``[R, C]``: where there is a token that does not belong to the prompt."""
        return self.real & (self.columns >= self.prompts)


class Histories:
    """The tokens of opened rows; their lengths are known on the host. Processors of rows that remember are made of it."""

    def __init__(self, rows: Sequence[ProcessedRow]) -> None:
        self._prompts = [len(row.prompt) for row in rows]
        self._lengths = [len(row.prompt) + len(row.generated) for row in rows]
        tokens = np.zeros((len(rows), _capacity(max(self._lengths, default=0))), dtype=np.uint32)
        for line, row in zip(tokens, rows, strict=True):
            known = (*row.prompt, *row.generated)
            line[: len(known)] = known
        self.tokens = mx.array(tokens)  # (B, C) uint32

    def push(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Append the first ``counts[i]`` tokens of line i of uint32 ``[B, W]`` to row i."""
        needed = max(self._lengths) + tokens.shape[1]
        if needed > self.tokens.shape[1]:
            self.tokens = mx.pad(self.tokens, [(0, 0), (0, _capacity(needed) - self.tokens.shape[1])])
        self.tokens = _written(self.tokens, mx.array(self._lengths, dtype=mx.int32)[:, None], tokens)
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last ``counts[i]`` tokens of row i."""
        self._lengths = [length - count for length, count in zip(self._lengths, counts, strict=True)]

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self.tokens = self.tokens[mx.array(list(indices), dtype=mx.int32)]
        self._lengths = [self._lengths[i] for i in indices]
        self._prompts = [self._prompts[i] for i in indices]

    def lines(self, rows: mx.array | None = None, drafted: Drafted | None = None) -> Past:
        """Return what stands before each line; see `contracts.sampler.ProcessorRows.apply`."""
        tokens, lengths, prompts = (
            self.tokens,
            mx.array(self._lengths, dtype=mx.int32)[:, None],
            mx.array(self._prompts, dtype=mx.int32)[:, None],
        )
        if rows is not None:
            tokens, lengths, prompts = tokens[rows], lengths[rows], prompts[rows]
        if drafted is not None and drafted.tokens.shape[1]:
            tokens = _written(mx.pad(tokens, [(0, 0), (0, drafted.tokens.shape[1])]), lengths, drafted.tokens)
            lengths = lengths + mx.array(list(drafted.counts), dtype=mx.int32)[:, None]
        return Past(tokens, lengths, prompts)

    def line(self, row: int) -> mx.array:
        """Return the tokens of one row, uint32 ``[N]``."""
        return self.tokens[row, : self._lengths[row]]


def at_most(tokens: mx.array, real: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Return ids int32 ``[R, C]`` that may index a vocabulary of ``size``, and which of them are ``real`` tokens."""
    real = real & (tokens < size)
    return mx.where(real, tokens, 0).astype(mx.int32), real


def tally(ids: mx.array, marked: mx.array, size: int) -> mx.array:
    """Return int32 ``[R, C]``: how often the id of each column stands in a marked column of its line."""
    lines = mx.arange(ids.shape[0], dtype=mx.int32)[:, None]  # (R, 1)
    table = mx.zeros((ids.shape[0], size), dtype=mx.int32).at[lines, ids].add(marked.astype(mx.int32))  # (R, V)
    return mx.take_along_axis(table, ids, axis=-1)


def _capacity(tokens: int) -> int:
    return (tokens // STEP + 1) * STEP


def _written(tokens: mx.array, starts: mx.array, new: mx.array) -> mx.array:
    """Return ``tokens`` with ``new`` uint32 ``[R, W]`` in the columns from ``starts`` int32 ``[R, 1]`` on."""
    columns = starts + mx.arange(new.shape[1], dtype=mx.int32)  # (R, W)
    return mx.put_along_axis(tokens, columns, new.astype(mx.uint32), axis=-1)
