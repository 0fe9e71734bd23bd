"""Left-aligned rows inside a trace: token t in column t, and positions are an array. It owns no row and no plane."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from oarlock.layouts.planes import Planes


class Storage(Protocol):
    """The cache that is stood for: how keys and values become planes, and are read back."""

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return keys and values as planes."""
        ...

    def decode(self, planes: Planes) -> tuple[Any, Any]:
        """Return what attention gets."""
        ...


class TracedColumns:
    """Stands for a cache while a step of one token a row is traced. ``planes`` are replaced by what is written.

    All of ``columns`` are read whatever the positions, and the mask hides those that a row has not reached.
    """

    def __init__(self, storage: Storage, planes: Planes, positions: mx.array, columns: int) -> None:
        """Stand at ``positions`` int32 ``[B]``."""
        self.planes = dict(planes)
        self._storage, self._positions, self._columns = storage, positions, columns
        self._written = 0

    @property
    def offset(self) -> mx.array:
        """Positions of the next token, int32 ``[B]``."""
        return self._positions + self._written

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return a boolean ``[B, 1, 1, columns]``: what stands at or before each row's position."""
        at, columns = self._positions[:, None, None, None], mx.arange(self._columns)
        mask = columns <= at
        return mask if window_size is None else mask & (columns > at - window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write ``[B, H, 1, D]`` at each row's position and return the first ``columns``."""
        rows = keys.shape[0]
        for name, value in self._storage.encode(keys, values).items():
            if rows == 1:  # a slice takes one start, and costs less than a scatter
                self.planes[name] = mx.slice_update(self.planes[name], value, self._positions, axes=(2,))
            else:
                plane = self.planes[name]
                plane[mx.arange(rows)[:, None], :, self._positions[:, None]] = value.transpose(0, 2, 1, 3)
                self.planes[name] = plane
        self._written = 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the append returned."""
        rows = self._positions.shape[0]
        return self._storage.decode({name: plane[:rows, :, : self._columns] for name, plane in self.planes.items()})
