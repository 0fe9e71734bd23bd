"""A second model beside the bound one, lent to a proposer: its caches and forwards. It drafts nothing and keeps no rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from oarlock.core import forward as forwards
from oarlock.core.contracts.layout import BatchCache

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


class Companion:
    """Implements `contracts.proposer.Companion`."""

    def __init__(self, bound: BoundModel) -> None:
        self.vocabulary, self.positions, self.tokenizer = bound.vocabulary, bound.positions, bound.tokenizer
        self._bound = bound
        self._entered = contextlib.ExitStack()

    def enter(self) -> None:
        """Let its layouts attend by themselves."""
        self._entered.enter_context(self._bound.swap())

    def leave(self) -> None:
        """Undo all of `enter`."""
        self._entered.close()

    def open_caches(self, *, window: int) -> list[BatchCache]:
        """Return one empty cache per layer."""
        return self._bound.open_caches(slots=1, window=window)

    def forward(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int]) -> mx.array:
        """Forward; see `core.forward.forward`."""
        return forwards.forward(self._bound, caches, ids, widths)

    def settle(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], kept: Sequence[int]) -> None:
        """Close a forward; see `core.forward.settle`."""
        forwards.settle(self._bound, caches, ids, widths, kept)
