"""Rotated quantization of keys and values: a random rotation, then a short code for every number.

After the rotation a vector's numbers are nearly normal, whatever it was, so one table of codes serves all heads and
layers (the idea of TurboQuant, Zandieh et al., 2025). Rows are kept apart, one buffer each: joins and leaves move
references, and what attention reads is decoded when it is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState

OARLOCK_API = 1
NAME = "rotated"
STEP = 256
"""Buffers grow by so many columns."""
PLANES = ("keys", "key_norms", "values", "value_norms")


@attrs.frozen
class RotatedOptions:
    """``bits`` a number: 4, two to a byte, or 8."""

    bits: int = attrs.field(default=4, validator=attrs.validators.in_((4, 8)))


@functools.cache
def rotation(size: int) -> mx.array:
    """Return an orthogonal matrix [size, size], always the same one."""
    matrix, _ = mx.linalg.qr(mx.random.normal((size, size), key=mx.random.key(size)), stream=mx.cpu)
    mx.eval(matrix)
    return matrix


@functools.cache
def levels(bits: int) -> mx.array:
    """Return the values of the codes, ascending: the middles of equally probable slices of a normal distribution."""
    count = 2**bits
    table = mx.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    mx.eval(table)
    return table


def encode(x: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Return codes uint8 ``[..., D * bits / 8]`` and norms float32 ``[..., 1]`` of ``x`` [..., D]."""
    x = x.astype(mx.float32)
    norms = mx.linalg.norm(x, axis=-1, keepdims=True)
    normal = (x / mx.maximum(norms, 1e-12)) @ rotation(x.shape[-1]) * math.sqrt(x.shape[-1])
    slices = mx.floor((1 + mx.erf(normal / math.sqrt(2))) * 2 ** (bits - 1))
    codes = mx.clip(slices, 0, 2**bits - 1).astype(mx.uint8)
    return (codes if bits == 8 else codes[..., ::2] + codes[..., 1::2] * 16), norms


def decode(codes: mx.array, norms: mx.array, bits: int, dtype: mx.Dtype) -> mx.array:
    """Return what `encode` was given, nearly, in ``dtype``."""
    if bits == 4:
        codes = mx.stack([codes % 16, codes // 16], axis=-1).reshape(*codes.shape[:-1], -1)
    x = levels(bits)[codes] @ rotation(codes.shape[-1]).T
    return (x * norms / math.sqrt(codes.shape[-1])).astype(dtype)


class RotatedCache:
    """One layer of a group: per row four buffers ``[1, H, columns, ...]``, named as `PLANES`."""

    rewinds = True

    def __init__(self, bits: int, dtype: mx.Dtype, token_bytes: int = 0) -> None:
        """Open without rows, whose tokens take ``token_bytes`` each. The bits are not called so here: mlx-lm takes whatever has ``bits`` for its own cache."""
        self.width, self.dtype, self.token_bytes = bits, dtype, token_bytes
        self.buffers: list[dict[str, mx.array]] = []
        self.tokens: tuple[int, ...] = ()
        self._starts, self._written = Positions(()), 0

    # --- what models see: the columns of the longest row, each row's own aligned left --------------------------

    @property
    def offset(self) -> int | mx.array:
        """Where the next token stands."""
        return (self._starts.longest if self._starts.equal else self._starts.array) + self._written

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask of the coming forward."""
        if self._starts.equal and window_size is None and not (return_array and N > 1):
            return None if N == 1 else "causal"
        columns, places = mx.arange(self._starts.longest + N), self._starts.columns(N)[:, None, :, None]
        mask = places >= columns if window_size is None else (places >= columns) & (places < columns + window_size)
        return mask[0, 0] if self._starts.equal else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``[B, H, N, D]`` and return columns 0 to max(starts) + N - 1."""
        new = dict(zip(PLANES, (*encode(keys, self.width), *encode(values, self.width)), strict=True))
        self._written = keys.shape[2]
        for row, (held, start) in enumerate(zip(self.buffers, self._starts, strict=True)):
            for name, plane in new.items():
                held[name] = _with_room(held.get(name), plane, start + self._written)
                held[name][:, :, start : start + self._written] = plane[row : row + 1]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last append returned."""
        wide = self._starts.longest + self._written
        rows = [
            {name: _with_room(plane, plane, wide)[:, :, :wide] for name, plane in held.items()} for held in self.buffers
        ]
        whole = {name: mx.concatenate([row[name] for row in rows]) for name in PLANES}
        keys = decode(whole["keys"], whole["key_norms"], self.width, self.dtype)
        return keys, decode(whole["values"], whole["value_norms"], self.width, self.dtype)

    # --- one forward -------------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward."""
        self._starts, self._written = starts, 0

    def commit(self, kept: Sequence[int]) -> None:
        """Keep ``kept[i]`` tokens of row i: the rest is written over."""
        self.tokens = tuple(start + n for start, n in zip(self._starts, kept, strict=True))
        self._starts, self._written = Positions(self.tokens), 0

    # --- rows --------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held."""
        return len(self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(array.nbytes) for array in self.arrays())

    @property
    def live_bytes(self) -> int:
        """Bytes of the columns that hold tokens."""
        each = zip(self.buffers, self.tokens, strict=True)
        return sum(int(plane.nbytes) // plane.shape[2] * n for held, n in each for plane in held.values())

    def arrays(self) -> list[mx.array]:
        """Return all buffers."""
        return [plane for held in self.buffers for plane in held.values()]

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return the bytes of a row of each of ``tokens``: a buffer grows by itself, and none is cut on the way."""
        needed = [_columns(n) for n in tokens]
        if not exact:
            have = [next(iter(held.values())).shape[2] if held else 0 for held in self.buffers]
            needed = [max(both) for both in itertools.zip_longest(needed, have, fillvalue=0)]
        return sum(needed) * self.token_bytes

    def reserve(self, tokens: Sequence[int]) -> None:
        """Cut or enlarge every row's buffers; rows that join bring their own."""
        if len(tokens) < self.rows or any(n < held for n, held in zip(tokens, self.tokens, strict=False)):
            msg = f"room was asked for rows of {list(tokens)} tokens; the rows hold {list(self.tokens)}, the least allowed"
            raise ValueError(msg)
        rows = zip(self.buffers, map(_columns, tokens), strict=False)
        self._set([_sized(held, columns) for held, columns in rows], self.tokens)

    def compact(self) -> None:
        """Cut every buffer to what its row needs."""
        self.reserve(self.tokens)

    def add(self, n: int) -> None:
        """Append empty rows."""
        self._set([*self.buffers, *({} for _ in range(n))], (*self.tokens, *[0] * n))

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Share the other's buffers: whoever writes first gets a copy, since MLX writes into no array that two hold."""
        if not isinstance(other, RotatedCache) or (other.width, other.dtype) != (self.width, self.dtype):
            msg = f"rows of {type(other).__name__} cannot join rows of {self.width} rotated bits and {self.dtype}"
            raise TypeError(msg)
        if list(slots) != list(range(self.rows, self.rows + other.rows)):
            msg = f"slots are {list(slots)}; the next free one is {self.rows}"
            raise ValueError(msg)
        shapes = {name: plane.shape[1::2] for held in self.buffers for name, plane in held.items()}
        if any(
            plane.shape[1::2] != shapes.get(name, plane.shape[1::2])
            for held in other.buffers
            for name, plane in held.items()
        ):
            msg = "rows of another geometry cannot join"
            raise ValueError(msg)
        self._set([*self.buffers, *map(_shared, other.buffers)], (*self.tokens, *other.tokens))

    def take(self, indices: Sequence[int]) -> RotatedCache:
        """Return rows as a cache of their own: this one when it is all of them."""
        if list(indices) == list(range(self.rows)):
            return self
        part = RotatedCache(self.width, self.dtype, self.token_bytes)
        part._set([_shared(self.buffers[i]) for i in indices], tuple(self.tokens[i] for i in indices))
        return part

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self._set([self.buffers[i] for i in indices], tuple(self.tokens[i] for i in indices))

    def extract(self, row: int) -> RowState:
        """Return a copy of a row's columns."""
        arrays = _cut(self.buffers[row], self.tokens[row]) if self.tokens[row] else {}
        mx.async_eval(list(arrays.values()))
        meta = {
            "bits": str(self.width),
            "token_bytes": str(self.token_bytes),
            "dtype": str(self.dtype).rpartition(".")[2],
        }
        return RowState(layout=NAME, tokens=self.tokens[row], arrays=arrays, meta=meta)

    def reusable(self, tokens: int) -> int:
        """Return ``tokens``: any prefix is one."""
        return min(tokens, min(self.tokens, default=0))

    def cut(self, tokens: int) -> None:
        """Let rows go back to their first ``tokens``; what stays behind them is overwritten."""
        if not 0 < tokens == self.reusable(tokens):
            msg = f"rows of {list(self.tokens)} tokens cannot be cut to {tokens}"
            raise ValueError(msg)
        self._set(self.buffers, (tokens,) * self.rows)

    def columns(self, widths: Sequence[int]) -> tuple[str, int]:
        """Describe what is read: token t in column t."""
        return ("left", max(self.tokens, default=0) + max(widths, default=0))

    def _set(self, buffers: list[dict[str, mx.array]], tokens: tuple[int, ...]) -> None:
        self.buffers, self.tokens, self._starts = buffers, tokens, Positions(tokens)


def _with_room(held: mx.array | None, like: mx.array, columns: int) -> mx.array:
    """Return ``held`` with at least so many columns; the new ones are zero."""
    have = 0 if held is None else held.shape[2]
    if held is not None and have >= columns:
        return held
    more = mx.zeros((1, like.shape[1], _columns(columns) - have, like.shape[3]), like.dtype)
    return more if held is None else mx.concatenate([held, more], axis=2)


def _columns(tokens: int) -> int:
    """Return how many columns a row of ``tokens`` has."""
    return -(-tokens // STEP) * STEP


def _sized(held: dict[str, mx.array], columns: int) -> dict[str, mx.array]:
    """Return buffers of ``columns``; a row that has been written none gets its own when it is."""
    if all(plane.shape[2] == columns for plane in held.values()):
        return held
    return _cut({name: _with_room(plane, plane, columns) for name, plane in held.items()}, columns)


def _cut(held: dict[str, mx.array], columns: int) -> dict[str, mx.array]:
    return {name: mx.contiguous(plane[:, :, :columns]) for name, plane in held.items()} if columns else {}


def _shared(held: dict[str, mx.array]) -> dict[str, mx.array]:
    return {name: plane[:] for name, plane in held.items()}


@attrs.frozen
class RotatedLayout:
    """Registers as ``rotated``; holds full attention."""

    name: str = NAME
    kinds: frozenset[str] = frozenset({"full"})
    options: type = RotatedOptions

    def refuses(self, layer: LayerInfo, options: RotatedOptions) -> str | None:
        """Return why a layer cannot be held: two codes to a byte need an even head size."""
        odd = [size for size in (layer.key_dim, layer.value_dim) if size % 2 or not size]
        return f"its head size {odd[0]} is not even" if odd else None

    def open(self, layer: LayerInfo, options: RotatedOptions, *, slots: int, window: int) -> RotatedCache:
        """Return a cache without rows; nothing is reserved, and any window can be rolled back."""
        return RotatedCache(options.bits, layer.dtype, self.bytes_at(layer, options, STEP) // STEP)

    def bytes_at(self, layer: LayerInfo, options: RotatedOptions, tokens: int) -> int:
        """Return the bytes of one row at ``tokens``, reserve included."""
        token = (layer.key_dim + layer.value_dim) * options.bits // 8 + 2 * 4
        return layer.kv_heads * token * _columns(tokens)

    def restore(self, state: RowState) -> RotatedCache:
        """Return the row that ``state`` describes."""
        meta = state.meta()
        cache = RotatedCache(int(meta["bits"]), getattr(mx, meta["dtype"]), int(meta["token_bytes"]))
        cache._set([_shared(state.arrays())], (state.tokens,))
        return cache


@hookimpl
def register_layouts(register: Callable[[Any], None]) -> None:
    """Register `rotated`."""
    register(RotatedLayout())
