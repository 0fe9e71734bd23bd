"""Recurrent state: convolution tails and matrix states, one value a row and no time axis. It forwards nothing itself.

A state cannot be cut: it is kept whole or put back. Rows that were cut in the middle are forwarded again by the core
(`core.forward.settle`), since a layer has no inputs of its own to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState
from oarlock.layouts.joins import check_cut, check_room, check_slots

OARLOCK_API = 1


@attrs.frozen
class RecurrentOptions:
    """`recurrent` has no options."""


class RecurrentCache(ArraysCache):  # type: ignore[misc]
    """Slots ``[B, ...]``, or None where the model has written none yet; row i is entry i of every slot.

    Models assign whole slots and never write into one, so a snapshot is a list of references. A step writes every
    row's state anew, therefore joins and leaves may copy the slots: they cost less than a step.
    It is an `ArraysCache` since models ask for that type; of it they use items, ``lengths`` and `make_mask`.
    """

    rewinds = False

    def __init__(self, slots: int, state_bytes: int = 0) -> None:
        """Open without rows; ``slots`` is the number of arrays that the layer keeps, of ``state_bytes`` a row."""
        super().__init__(slots)
        self.state_bytes = state_bytes
        self._tokens: tuple[int, ...] = ()
        self._starts = Positions(())
        self._widths: tuple[int, ...] = ()
        self._before: list[mx.array | None] | None = None

    def advance(self, N: int) -> None:
        """Do nothing: some models count ``lengths`` down themselves, here they hold for one forward."""

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward: remember the states, and tell the model the widths where some row is padded."""
        if len(widths) != self.rows or len(starts) != self.rows:
            msg = f"begin got {len(widths)} widths and {len(starts)} starts for {self.rows} rows"
            raise ValueError(msg)
        self._starts, self._widths, self._before = starts, tuple(widths), list(self.cache)
        padded = min(widths, default=0) < max(widths, default=0)
        key = ("recurrent lengths", self._widths)
        self.lengths = starts.shared(key, lambda: mx.array(self._widths, dtype=mx.int32)) if padded else None

    def commit(self, kept: Sequence[int]) -> None:
        """Keep a row's new state, or put its old one back: ``kept[i]`` is 0 or the whole width, else ValueError.

        A row without tokens in the window gets its old state back too: many models put padding into it.
        """
        if self._before is None and not any(kept):
            return  # a forward that failed before it reached this layer
        for row, (n, width) in enumerate(zip(kept, self._widths, strict=True)):
            if n not in (0, width):
                msg = f"row {row} cannot keep {n} of {width} tokens: a recurrent state is kept whole or not at all"
                raise ValueError(msg)
        before = self._before or []
        if not any(kept):
            self.cache = before
        elif not all(kept):
            stays = self._starts.shared(("recurrent rows", tuple(kept)), lambda: mx.array([n > 0 for n in kept]))
            self.cache = [_mixed(stays, new, old) for new, old in zip(self.cache, before, strict=True)]
        self._tokens = tuple(start + n for start, n in zip(self._starts, kept, strict=True))
        self._before = self.lengths = None

    # --- rows -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held."""
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens per row."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(int(state.nbytes) for state in self.arrays())

    @property
    def live_bytes(self) -> int:
        """Bytes of the rows that have any token."""
        return self.nbytes // max(1, self.rows) * sum(n > 0 for n in self._tokens)

    def arrays(self) -> list[mx.array]:
        """Return the slots that exist."""
        return [state for state in self.cache if state is not None]

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return the bytes of the states of so many rows, once any has tokens."""
        row = max(self.state_bytes, self.nbytes // max(1, self.rows))
        return row * len(tokens) if any(tokens) else self.nbytes

    def reserve(self, tokens: Sequence[int]) -> None:
        """Change nothing: every step makes the states anew."""
        check_room(tokens, self._tokens)

    def compact(self) -> None:
        """Nothing is reserved."""

    def add(self, n: int) -> None:
        """Append ``n`` rows of zeros, which is what models take for a state that is not there."""
        empty = RecurrentCache(len(self.cache))
        empty._tokens = (0,) * n
        self.join(empty, range(self.rows, self.rows + n))

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Put the states of ``other`` behind those here. Nothing changes when it raises."""
        if not isinstance(other, RecurrentCache) or len(other.cache) != len(self.cache):
            msg = f"a recurrent cache of {len(self.cache)} states cannot take rows of {type(other).__name__}"
            raise TypeError(msg)
        check_slots(slots, self.rows, other.rows)
        self.cache = [
            _joined(mine, self.rows, theirs, other.rows) for mine, theirs in zip(self.cache, other.cache, strict=True)
        ]
        self._tokens = (*self._tokens, *other.tokens)

    def take(self, indices: Sequence[int]) -> RecurrentCache:
        """Return rows ``indices`` as a cache of their own: this very one when it is all of them."""
        if list(indices) == list(range(self.rows)):
            return self
        part = RecurrentCache(len(self.cache), self.state_bytes)
        part.cache = self._gathered(indices)
        part._tokens = tuple(self._tokens[i] for i in indices)
        mx.async_eval(part.arrays())
        return part

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        if list(indices) != list(range(self.rows)):
            self.cache = self._gathered(indices) if indices else [None] * len(self.cache)
            self._tokens = tuple(self._tokens[i] for i in indices)

    def extract(self, row: int) -> RowState:
        """Return a dispatched copy of a row's states ``[1, ...]``; slots that do not exist are left out."""
        tokens = self._tokens[row]
        states = enumerate(self._gathered([row])) if tokens else ()
        arrays = {f"state{i}": state for i, state in states if state is not None}
        mx.async_eval(list(arrays.values()))
        return RowState(layout="recurrent", tokens=tokens, arrays=arrays, meta={"slots": str(len(self.cache))})

    def reusable(self, tokens: int) -> int:
        """Return the tokens that the state covers if they are within ``tokens``, else 0: it holds no shorter prefix."""
        covered = max(self._tokens, default=0)
        return covered if covered <= tokens and min(self._tokens, default=0) == covered else 0

    def cut(self, tokens: int) -> None:
        """Change nothing: a state can only be cut to what it covers."""
        check_cut(tokens, self.reusable(tokens), self.tokens)

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe what every recurrent layer has: no columns."""
        return ("recurrent",)

    def _gathered(self, indices: Sequence[int]) -> list[mx.array | None]:
        at = mx.array(list(indices), dtype=mx.int32)
        return [None if state is None else mx.take(state, at, axis=0) for state in self.cache]


def _mixed(stays: mx.array, new: mx.array | None, old: mx.array | None) -> mx.array | None:
    """Return ``new`` for the rows that stay [B] and ``old`` for the others; a state that was not there is zero."""
    if new is None:
        return old
    old = mx.zeros_like(new) if old is None else _fitted(old, new.shape).astype(new.dtype)
    return mx.where(stays.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _joined(first: mx.array | None, rows: int, second: mx.array | None, more: int) -> mx.array | None:
    """Return ``rows`` rows of one state before ``more`` rows of the other; zeros for those that have none."""
    if first is None and second is None:
        return None
    if first is not None and second is not None:
        if first.dtype != second.dtype or first.ndim != second.ndim:
            msg = f"states {second.shape} of {second.dtype} cannot join states {first.shape} of {first.dtype}"
            raise ValueError(msg)
        shape = tuple(map(max, first.shape[1:], second.shape[1:]))
        return mx.concatenate([_fitted(first, (rows, *shape)), _fitted(second, (more, *shape))])
    if first is not None:
        return mx.concatenate([first, mx.zeros((more, *first.shape[1:]), first.dtype)]) if more else first
    assert second is not None
    return mx.concatenate([mx.zeros((rows, *second.shape[1:]), second.dtype), second]) if rows else second


def _fitted(state: mx.array, shape: Sequence[int]) -> mx.array:
    """Return ``state`` with zeros before it: the tail of a row younger than the tail is long begins with nothing."""
    if state.shape[1:] == tuple(shape[1:]):
        return state
    return mx.pad(state, [(0, 0), *((want - have, 0) for want, have in zip(shape[1:], state.shape[1:], strict=True))])


@attrs.frozen
class RecurrentLayout:
    """Registers as ``recurrent``; holds the states of convolutions, scans and linear attention."""

    name: str = "recurrent"
    kinds: frozenset[str] = frozenset({"recurrent"})
    options: type = RecurrentOptions

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return None: every recurrent layer can be held."""
        return None

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> RecurrentCache:
        """Return a cache without rows; any window can be aborted, none can be cut."""
        return RecurrentCache(layer.slots, layer.state_bytes)

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row's states, whatever its length."""
        return layer.state_bytes if tokens else 0

    def restore(self, state: RowState) -> RecurrentCache:
        """Return a one-row cache of the state's own arrays; the next forward replaces them."""
        arrays = state.arrays()
        cache = RecurrentCache(int(state.meta()["slots"]))
        cache.cache = [arrays.get(f"state{i}") for i in range(len(cache.cache))]
        cache._tokens = (state.tokens,)
        return cache


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `recurrent`."""
    register(RecurrentLayout())
