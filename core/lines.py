"""Which row, and which place of a window, a line of scores belongs to. It forwards and draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from oarlock.core.contracts.sampler import Drafted


class Lines:
    """The lines of a window of ``ids`` uint32 ``[B, W]``, of which row i has its first ``widths[i]``: row after row.

    Line j of a row is what it draws after its first j + 1 tokens of the window: j draws from now.
    """

    def __init__(self, ids: mx.array, widths: Sequence[int]) -> None:
        """Read nothing: the tokens stay on the device."""
        self.ids, self.widths = ids, widths
        self.places = [(row, place) for row, width in enumerate(widths) for place in range(width)]

    @property
    def whose(self) -> list[int]:
        """The row of each line."""
        return [row for row, _ in self.places]

    @cached_property
    def rows(self) -> mx.array:
        """The row of each line, int32 ``[R]``."""
        return mx.array(self.whose, dtype=mx.int32)

    @property
    def drafted(self) -> Drafted:
        """What stands before each line and nobody has accepted: the window without its first tokens."""
        return Drafted(self.ids[:, 1:][self.rows], [place for _, place in self.places])

    def table(self, lines: mx.array) -> mx.array:
        """Return one number a line ``[R]`` as ``[B, W]``; behind a row's own stands its last."""
        ends = [sum(self.widths[: row + 1]) for row in range(len(self.widths))]
        window = range(self.ids.shape[1])
        pairs = zip(ends, self.widths, strict=True)
        return lines[mx.array([[end - width + min(place, width - 1) for place in window] for end, width in pairs])]
