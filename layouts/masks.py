"""Attention masks that several layouts share. They know positions, not storage."""

from __future__ import annotations

import mlx.core as mx

from oarlock.core.contracts.layout import Positions


def causal(starts: Positions, width: int, window: int | None, as_array: bool) -> mx.array | str | None:
    """Return the mask of ``width`` queries per row over columns 0 to starts.longest + width - 1.

    Equal rows get what mlx-lm's serial cache gives: None, "causal" or a boolean ``[width, S]``. Ragged rows get a
    boolean ``[B, 1, width, S]``. ``window`` limits how far back a query looks.
    """
    if starts.equal and window is None and (width == 1 or not as_array):
        return None if width == 1 else "causal"
    columns = mx.arange(starts.longest + width)  # (S,)
    if starts.equal:
        queries = mx.arange(starts[0], starts[0] + width)[:, None]  # (N, 1)
    else:
        queries = starts.columns(width)[:, None, :, None]  # (B, 1, N, 1)
    mask = queries >= columns
    if window is not None:
        mask = mask & (queries < columns + window)
    return mask


def shared_mask(starts: Positions, width: int, window: int | None, as_array: bool) -> mx.array | str | None:
    """Return `causal`, the same object for all layers of a forward: so attention knows it again."""
    key = ("causal", width, window, as_array and starts.equal)
    return starts.shared(key, lambda: causal(starts, width, window, as_array))


def of_row(mask: mx.array, row: int, width: int, tokens: int) -> mx.array:
    """Return the part of a mask, broadcastable to ``[B, heads, N, S]``, that is one row's first columns."""
    if mask.ndim == 4 and mask.shape[0] > 1:
        mask = mask[row : row + 1]
    return mask[..., :width, :tokens] if mask.shape[-2] > 1 else mask[..., :tokens]
