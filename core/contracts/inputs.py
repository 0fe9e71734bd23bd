"""Prepared input: what takes the place of a prompt's tokens, such as an image's embeddings. Whoever made it owns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import mlx.core as mx

Position = int | tuple[int, ...]


def _positions(value: Sequence[int | Sequence[int]]) -> tuple[Position, ...]:
    """Return positions as whole numbers, or as tuples of equally many of them."""
    whole = value.tolist() if hasattr(value, "tolist") else value
    return tuple(tuple(map(int, each)) if isinstance(each, Sequence) else int(each) for each in whole)


@attrs.frozen(kw_only=True, eq=False)
class PreparedInputs:
    """Embeddings in place of a prompt's tokens, and positions where the row has its own.

    ``embeddings``: floats ``[n, D]``, for a request with n ``prompt_ids``; the model's forward takes them, chunk by
    chunk, as ``input_embeddings`` beside those ids. The row's state is neither reused nor stored.

    ``argument`` names a parameter of the model's forward that takes positions of every token: int32 ``[B, W]``, or
    ``[B, W, k]`` where a position is k numbers. ``positions`` are the prompt's, n of them; generated tokens go on from
    ``next_position``, in all k numbers, one more each. Rows of one ``argument`` decode together, and with no others.
    """

    embeddings: mx.array
    argument: str = ""
    positions: tuple[Position, ...] = attrs.field(default=(), converter=_positions)
    next_position: int = 0

    def at(self, start: int, width: int) -> list[Position]:
        """Return the positions of ``width`` tokens from ``start`` on."""
        return [self._position(place) for place in range(start, start + width)]

    def _position(self, place: int) -> Position:
        if place < len(self.positions):
            return self.positions[place]
        number = self.next_position + place - len(self.positions)
        first = self.positions[0]
        return number if isinstance(first, int) else (number,) * len(first)
