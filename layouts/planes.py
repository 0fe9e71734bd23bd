"""Planes: the buffers in which a layer's rows are stored, by name. Which column is whose is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx

from oarlock.core.contracts.layout import LayerInfo

COLUMN_STEP = 256
"""Buffers grow in multiples of this many columns, as mlx-lm's do."""

Planes: TypeAlias = dict[str, mx.array]
"""Buffers ``[slots, H, columns, D]``; D differs from plane to plane, the rest does not."""

Columns: TypeAlias = slice | mx.array
"""Some columns of every row: a slice, an int32 vector ``[S]``, or int32 ``[B, S]`` where rows differ."""


class NamedPlanes:
    """What models reach for in a cache: its keys and values, as they are stored. Mixed into a cache with planes."""

    planes: Planes

    @property
    def keys(self) -> mx.array | None:
        """The keys ``[slots, H, columns, D]``; some models replace them by themselves, after something else."""
        return self.planes.get("keys")

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.planes["keys"] = keys

    @property
    def values(self) -> mx.array | None:
        """The values likewise."""
        return self.planes.get("values")

    @values.setter
    def values(self, values: mx.array) -> None:
        self.planes["values"] = values


class PlainPlanes(NamedPlanes):
    """Keys and values stored as they are."""

    def encode(self, keys: mx.array, values: mx.array) -> Planes:
        """Return both."""
        return {"keys": keys, "values": values}

    def decode(self, planes: Planes) -> tuple[mx.array, mx.array]:
        """Return both."""
        return planes["keys"], planes["values"]


def picked(planes: Planes, rows: int, columns: Columns) -> Planes:
    """Return ``columns`` of the first ``rows``: a view where they are a slice, else a copy."""
    if isinstance(columns, slice):
        return {name: plane[:rows, :, columns] for name, plane in planes.items()}
    if columns.ndim == 1:
        return {name: mx.take(plane[:rows], columns, axis=2) for name, plane in planes.items()}
    at = (mx.arange(rows)[:, None], slice(None), columns)
    return {name: plane[at].transpose(0, 2, 1, 3) for name, plane in planes.items()}


def copied(plane: mx.array, rows: Sequence[int], columns: int) -> mx.array:
    """Copy the first columns of some rows. By slices: gathering with an index array takes three times as long."""
    parts = [plane[row : row + 1, :, :columns] for row in rows]
    return mx.concatenate(parts) if len(parts) > 1 else mx.contiguous(parts[0])


def column_bytes(layer: LayerInfo) -> int:
    """Return the bytes of one token's keys and values as they are."""
    size: int = layer.dtype.size if layer.dtype is not None else 2
    return layer.kv_heads * (layer.key_dim + layer.value_dim) * size


def round_up(columns: int) -> int:
    """Return ``columns`` as a multiple of `COLUMN_STEP`."""
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


def resized(plane: mx.array, rows: int, slots: int, columns: int) -> mx.array:
    """Return the first ``rows`` of ``plane`` in so many slots and columns, zeros behind them."""
    part = plane[:rows, :, :columns]
    if part.shape[::2] == (slots, columns):
        return mx.contiguous(part)
    whole = mx.zeros((slots, plane.shape[1], columns, plane.shape[3]), plane.dtype)
    whole[:rows, :, : part.shape[2]] = part
    return whole


def grown(plane: mx.array, axis: int, more: int) -> mx.array:
    """Return ``plane`` with ``more`` zeros behind it along an axis, always as an object of its own."""
    if more <= 0:
        return plane[:]
    shape = list(plane.shape)
    if axis == 0:  # one run of memory: written into zeros, which takes half the time of putting zeros behind it
        whole = mx.zeros((shape[0] + more, *shape[1:]), plane.dtype)
        whole[: shape[0]] = plane
        return whole
    shape[axis] = more
    return mx.concatenate([plane, mx.broadcast_to(mx.zeros((), plane.dtype), shape)], axis=axis)
