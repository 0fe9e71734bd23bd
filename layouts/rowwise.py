"""Attention over rows in slots, one by one, where their lengths differ: padding is not read. It writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.masks import of_row, shared_mask
from oarlock.layouts.packed import attended

SPARED: Mapping[Any, int] = {mx.cpu: 1 << 15, mx.gpu: 1 << 20}
"""Bytes of padding a row that are worth an attention of the row's own, by device. No GPU was measured: there it is what
memory gives in the time of a few dispatches."""


def worth(starts: Positions, column_bytes: int) -> bool:
    """Return whether rows at ``starts`` are read one by one: the padding left out takes longer than the dispatches."""
    columns = starts.shared("padding", lambda: len(starts) * starts.longest - sum(starts))
    return columns * column_bytes > len(starts) * SPARED[mx.default_device().type]


class RowwiseKeyValues:
    """A `KeyValues` handle over planes ``[B, H, S, D]`` of one forward, rows aligned left, lengths not all equal.

    A row sees exactly the columns that it would see alone.
    """

    def __init__(self, keys: mx.array, values: mx.array, starts: Positions, width: int) -> None:
        """Stand for ``keys``; of each row the first ``starts[row] + width`` columns count."""
        self.shape, self.dtype = keys.shape, keys.dtype
        self._keys, self._values, self._starts, self._width = keys, values, starts, width

    @classmethod
    def pair(
        cls, keys: mx.array, values: mx.array, starts: Positions, width: int
    ) -> tuple[RowwiseKeyValues, RowwiseKeyValues]:
        """Return the handles of keys and of values."""
        return cls(keys, values, starts, width), cls(values, keys, starts, width)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` [B, heads, N, D]; columns beyond a row's own are never looked at."""
        starts, width = self._starts, self._width
        if mask is shared_mask(starts, width, None, as_array=False):
            mask = "causal" if width > 1 else None
        split = mx.split(queries, len(starts)) if len(starts) > 1 else [queries]
        seen = []
        for row, (start, own) in enumerate(zip(starts, split, strict=True)):
            tokens = start + width
            part = of_row(mask, row, width, tokens) if isinstance(mask, mx.array) else mask
            keys, values = (plane[row : row + 1, :, :tokens] for plane in (self._keys, self._values))
            seen.append(attended(own, keys, values, scale, part, sinks))
        return mx.concatenate(seen)
