"""What attention gets where a forward's rows stand in several caches of like columns. It stores nothing.

Rows are attended cache by cache and put back in order. Each cache has columns as far as its own rows reach, which are
the first of the mask's columns, or the last ones of a block behind histories of uneven length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.layouts.packed import attended


@attrs.frozen
class Share:
    """What one cache returned for some rows: ``rows`` int32 ``[b]`` are their places among all of them."""

    rows: mx.array
    keys: Any
    values: Any


@attrs.frozen
class Shares:
    """All of them. ``order`` int32 ``[B]``: where each row stands when they are put behind each other.

    ``right``: a cache's columns are the last of the mask's, not the first.
    """

    each: Sequence[Share]
    order: mx.array
    right: bool

    @property
    def columns(self) -> int:
        """Columns of the widest cache, which are those of the mask."""
        widest: int = max(share.keys.shape[2] for share in self.each)
        return widest

    def in_order(self, parts: Sequence[mx.array]) -> mx.array:
        """Return the parts' rows as one array, in order."""
        return mx.concatenate(list(parts))[self.order]

    def stacked(self) -> tuple[mx.array, mx.array]:
        """Return plain keys and values ``[B, H, S, D]``, narrower ones filled up with zeros."""
        keys, values = zip(*((share.keys, share.values) for share in self.each), strict=True)
        return self.in_order([self._filled(x) for x in keys]), self.in_order([self._filled(x) for x in values])

    def _filled(self, array: mx.array) -> mx.array:
        more = self.columns - array.shape[2]
        return mx.pad(array, [(0, 0), (0, 0), (more, 0) if self.right else (0, more), (0, 0)]) if more else array

    def masked(self, share: Share, mask: Any) -> Any:
        """Return the part of a mask that speaks of one cache's rows and columns."""
        if not isinstance(mask, mx.array):
            return mask
        columns = share.keys.shape[2]
        mask = mask[..., -columns:] if self.right else mask[..., :columns]
        return mask[share.rows] if mask.ndim == 4 and mask.shape[0] > 1 else mask


class SharedKeysValues:
    """A `KeyValues` handle over caches of several storages, for one forward."""

    def __init__(self, shares: Shares, like: Sequence[Any]) -> None:
        """Stand for the rows of ``like``, what the caches returned as keys, or as values."""
        _, heads, _, size = like[0].shape
        self.shape = (shares.order.size, heads, shares.columns, size)
        self.dtype = like[0].dtype
        self._shares = shares

    @classmethod
    def pair(cls, shares: Shares) -> tuple[SharedKeysValues, SharedKeysValues]:
        """Return the handles of keys and of values."""
        return cls(shares, [share.keys for share in shares.each]), cls(shares, [share.values for share in shares.each])

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` [B, heads, N, D]."""
        shares, seen = self._shares, []
        for share in shares.each:
            own, part = queries[share.rows], shares.masked(share, mask)
            seen.append(attended(own, share.keys, share.values, scale, part, sinks))
        return shares.in_order(seen)
