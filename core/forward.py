"""One forward over all rows, and how it is closed. It decides nothing about which rows run or what they sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from oarlock.core.contracts.composition import PartedCache
from oarlock.core.contracts.layout import BatchCache, Positions
from oarlock.core.inputs import arguments
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


class ForwardFailed(Exception):
    """Internal: a forward raised while it was built; the caches were put back. Carries its inputs for a retry."""

    def __init__(
        self,
        cause: Exception,
        caches: Sequence[BatchCache],
        ids: mx.array,
        widths: Sequence[int],
        rows: Sequence[Row] = (),
    ) -> None:
        super().__init__(str(cause))
        self.cause, self.caches, self.ids, self.widths, self.rows = cause, caches, ids, widths, rows


def forward(
    bound: BoundModel,
    caches: Sequence[BatchCache],
    ids: mx.array,
    widths: Sequence[int],
    rows: Sequence[Row] = (),
) -> mx.array:
    """Forward ``ids`` uint32 ``[B, W]`` and return logits ``[B, W, V]``; `settle` must follow.

    Row i has ``widths[i]`` real tokens; what stands behind them is padding. ``rows`` are those that the lines of
    ``ids`` belong to; without them the bare model runs. Nothing is evaluated here.
    Raises `ForwardFailed` with the caches as they were before.
    """
    starts = Positions(caches[0].tokens)
    try:
        for cache in caches:
            cache.begin(widths, starts)
        if bound.verdict.ragged:
            given = arguments(rows, starts, ids.shape[1])
            with bound.adapters.applied(rows), bound.tap.watching(caches, rows, starts):
                logits: mx.array = bound.model(ids, cache=list(caches), **given)
        else:
            logits = _by_part(bound, caches, ids, rows, starts)
    except Exception as cause:
        nothing = [0] * len(starts)
        for cache in caches:
            cache.commit(nothing)
        raise ForwardFailed(cause, caches, ids, widths, rows) from cause
    return logits


def _by_part(
    bound: BoundModel, caches: Sequence[Any], ids: mx.array, rows: Sequence[Row], starts: Sequence[int]
) -> mx.array:
    """Return logits ``[B, W, V]``, computed in one forward for each part of the rows."""
    whole: PartedCache = caches[0]
    logits, order = [], []
    for index, part in enumerate(whole.parts):
        lines = ids[mx.array(part.places, dtype=mx.int32)]
        own = [rows[place] for place in part.places] if rows else []
        given = arguments(own, [starts[place] for place in part.places], ids.shape[1])
        with bound.adapters.applied(own):
            logits.append(bound.model(lines, cache=[cache.parts[index].cache for cache in caches], **given))
        order += part.places
    back = sorted(range(len(order)), key=order.__getitem__)
    scores = mx.concatenate(logits) if len(logits) > 1 else logits[0]
    return scores[mx.array(back, dtype=mx.int32)] if back != list(range(len(order))) else scores


def settle(
    bound: BoundModel,
    caches: Sequence[BatchCache],
    ids: mx.array,
    widths: Sequence[int],
    kept: Sequence[int],
    rows: Sequence[Row] = (),
) -> None:
    """Close a forward so that row i holds ``kept[i]`` of its tokens on every layer.

    Layers that cannot rewind (recurrent) drop a row that was cut in the middle; its accepted tokens are then
    forwarded again: once for models that honour ``lengths``, else once per distinct count, since padding spoils
    the states of those models. For the same reason they keep no row that was padded. ``rows`` as in `forward`.
    Raises what that second forward raises: then some rows have been closed and others not, so it cannot be repeated.
    """
    bound.tap.settled(caches, kept)
    window = max(widths, default=0)
    sound = [bound.honours_lengths or width in (0, window) for width in widths]
    if all(cache.rewinds for cache in caches) or (list(kept) == list(widths) and all(sound)):
        for cache in caches:
            cache.commit(kept)
        return
    whole = [n if n == width and ok else 0 for n, width, ok in zip(kept, widths, sound, strict=True)]
    for cache in caches:
        cache.commit(whole)
    left = [n - done for n, done in zip(kept, whole, strict=True)]
    counts = [left] if bound.honours_lengths else [[n if n == count else 0 for n in left] for count in {*left} - {0}]
    for again in counts:
        if any(again):
            try:
                forward(bound, caches, ids[:, : max(again)], again, rows)
            except ForwardFailed as failed:
                raise failed.cause from None
            for cache in caches:
                cache.commit(again)
