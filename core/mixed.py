"""One forward for two groups of rows: a decode step takes a preparation's chunk along. It plans neither.

Every token is laid out as a row of one token with a position of its own, so all that a model does token by token
(embeddings, linear layers, norms, experts) is done once for both. Keys, values and queries alone are sorted by group:
each group's own cache stores and attends as in a forward of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from oarlock.core.contracts.layout import BatchCache, Positions
from oarlock.core.head import only
from oarlock.core.row import Row
from oarlock.core.tracing import shared

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


@attrs.frozen(eq=False)
class Side:
    """One group's part of a forward: a cache per layer, ids uint32 ``[B, W]`` and the real tokens of each row.

    ``lines`` are the rows that the lines of ``ids`` belong to; without them the bare model runs.
    """

    caches: Sequence[BatchCache]
    ids: mx.array
    widths: Sequence[int]
    lines: Sequence[Row] = ()

    @property
    def rows(self) -> int:
        """Rows of the group."""
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        """Tokens of the widest row."""
        return self.ids.shape[1]


@attrs.define(eq=False)
class Work:
    """A preparation's next forward, offered to a decode step. It is taken once; then the preparation takes it back.

    It lets go of the caches then: the frames of an error that somebody keeps may hold it.
    """

    _side: Side | None
    _ends: Sequence[int]
    _spans: Callable[[int], AbstractContextManager[Any]]
    _scores: mx.array | None = attrs.field(default=None, init=False)
    width: int = attrs.field(init=False)
    """Tokens of each row."""

    @width.default
    def _width(self) -> int:
        return self._side.width if self._side is not None else 0

    @classmethod
    def of(
        cls,
        caches: Sequence[BatchCache],
        ids: mx.array,
        lines: Sequence[Row],
        ends: Sequence[int],
        spans: Callable[[int], AbstractContextManager[Any]],
    ) -> Work:
        """Offer a forward of ids uint32 ``[P, W]``, all of them real; ``spans(W)`` are open while it is built.

        ``ends`` are the rows whose last token's scores are wanted.
        """
        rows, width = ids.shape
        return cls(Side(caches, ids, [width] * rows, lines), ends, spans)

    def take_back(self) -> mx.array | None:
        """Return the scores ``[len(ends), V]`` where a step took it along, else None: it is still to be done."""
        scores, self._side, self._scores, self._spans = self._scores, None, None, contextlib.nullcontext
        return scores

    def along(
        self,
        bound: BoundModel,
        caches: Sequence[BatchCache],
        ids: mx.array,
        widths: Sequence[int],
        lines: Sequence[Row],
    ) -> mx.array | None:
        """Forward both and return the logits ``[B, W, V]`` of the step, which is to be settled; None the second time.

        The preparation's part is settled here. What is raised while the graph is built leaves all caches as they were.
        """
        side, self._side = self._side, None
        if side is None:
            return None
        counts = {"decode_tokens": ids.size, "prefill_tokens": side.ids.size, "packed_tokens": ids.size + side.ids.size}
        with self._spans(side.width), shared([*lines, *side.lines], "engine.mixed_forward", 1, **counts):
            scored = [range(ids.size), [(end + 1) * side.width - 1 for end in self._ends]]
            scores, self._scores = forward(bound, [Side(caches, ids, widths, lines), side], scored)
        for cache in side.caches:
            cache.commit(side.widths)
        return scores.reshape(*ids.shape, -1)


def forward(bound: BoundModel, sides: Sequence[Side], scored: Sequence[Sequence[int]] | None = None) -> list[mx.array]:
    """Forward all sides at once and return the logits ``[B, W, V]`` of each; all are to be committed.

    ``scored``: for each side the tokens, counted row after row, whose logits are wanted; then it gets ``[n, V]`` of those.
    Nothing is evaluated here. What is raised while the graph is built leaves all caches as they were.
    """
    step = _Step(sides)
    try:
        for side, starts in zip(sides, step.starts, strict=True):
            for cache in side.caches:
                cache.begin(side.widths, starts)
        ids = mx.concatenate([side.ids.reshape(-1, 1) for side in sides])  # (T, 1)
        layers = zip(*(side.caches for side in sides), strict=True)
        lines = [row for side in sides for row in side.lines for _ in range(side.width)]
        wanted = step.lines(scored) if scored is not None else []
        # An adapter may stand in the head, and counts its lines.
        cut = bool(bound.mixing.body and wanted) and not any(row.request.adapter for row in lines)
        with bound.adapters.applied(lines), only(wanted) if cut else contextlib.nullcontext():
            logits: mx.array = bound.model(ids, cache=[MixedCache(step, caches) for caches in layers])  # (T, 1, V)
        if scored is None:
            return [part.reshape(*side.ids.shape, -1) for side, part in zip(sides, step.split(logits), strict=True)]
        logits = logits[:, 0] if cut else logits[mx.array(wanted, dtype=mx.int32), 0]
        ends = [sum(map(len, scored[:end])) for end in range(1, len(scored))]
        return mx.split(logits, ends)  # type: ignore[return-value]  # its stub says one array
    except Exception:
        for side in sides:
            for cache in side.caches:
                cache.commit([0] * side.rows)
        raise


class _Step:
    """Where the tokens of each side stand among all of them, and at which position of their row."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = sides
        self.starts = [Positions(side.caches[0].tokens) for side in sides]
        self._ends = [sum(side.ids.size for side in sides[:end]) for end in range(1, len(sides))]
        pairs = zip(sides, self.starts, strict=True)
        self.positions = Positions(n + i for side, starts in pairs for n in starts for i in range(side.width))

    def lines(self, scored: Sequence[Sequence[int]]) -> list[int]:
        """Return tokens of each side as lines among all tokens."""
        return [start + token for start, own in zip((0, *self._ends), scored, strict=True) for token in own]

    def split(self, flat: mx.array) -> list[mx.array]:
        """Return the tokens ``[T, ...]`` of each side."""
        parts: list[mx.array] = mx.split(flat, self._ends)  # type: ignore[assignment]  # its stub says one array
        return parts

    def by_row(self, flat: mx.array) -> list[mx.array]:
        """Return ``[T, H, 1, D]`` as ``[B, H, W, D]`` of each side."""
        return [
            part.reshape(side.rows, side.width, *part.shape[1::2]).swapaxes(1, 2)
            for side, part in zip(self.sides, self.split(flat), strict=True)
        ]

    def by_token(self, parts: Sequence[mx.array]) -> mx.array:
        """Return ``[B, H, W, D]`` of each side as ``[T, H, 1, D]``."""
        flat = [part.swapaxes(1, 2).reshape(-1, part.shape[1], 1, part.shape[3]) for part in parts]
        return mx.concatenate(flat)


@attrs.frozen(eq=False)
class Masks:
    """What stands for a mask: that of each side, made by the cache which was asked. Models hand it on as it is."""

    each: Sequence[Any]


class MixedCache:
    """One layer's caches of all sides, as a model sees them."""

    def __init__(self, step: _Step, caches: Sequence[Any]) -> None:
        """``caches``: one of each side, in their order."""
        self.sides = step.sides
        self._step, self._caches = step, caches
        self._written = False

    @property
    def offset(self) -> mx.array:
        """Position of each token, int32 ``[T]``; after the append, of the token behind it."""
        positions = self._step.positions
        return positions.shared("behind", lambda: positions.array + 1) if self._written else positions.array

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Masks:
        """Ask each side's cache for the mask of its own width."""
        pairs = zip(self._caches, self._step.sides, strict=True)
        return Masks([c.make_mask(s.width, return_array=return_array, window_size=window_size) for c, s in pairs])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[MixedKeyValues, MixedKeyValues]:
        """Append ``[T, H, 1, D]`` to each side's cache."""
        new = zip(self._caches, self._step.by_row(keys), self._step.by_row(values), strict=True)
        fetched = [cache.update_and_fetch(k, v) for cache, k, v in new]
        self._written = True
        return MixedKeyValues.pair(self._step, fetched)

    def keys_and_values(self) -> tuple[MixedKeyValues, MixedKeyValues]:
        """Return what the last append returned."""
        return MixedKeyValues.pair(self._step, [cache.keys_and_values() for cache in self._caches])


class MixedKeyValues:
    """What every side's cache returned as keys, or as values: arrays or handles ``[B, H, S, D]``."""

    def __init__(self, step: _Step, each: Sequence[Any]) -> None:
        """Stand for ``[T, H, S, D]``, S being the most columns of a side."""
        _, heads, _, size = each[0].shape
        self.shape = (len(step.positions), heads, max(part.shape[2] for part in each), size)
        self.dtype = each[0].dtype
        self._step, self.each = step, each

    @classmethod
    def pair(cls, step: _Step, fetched: Sequence[tuple[Any, Any]]) -> tuple[MixedKeyValues, MixedKeyValues]:
        """Return those of keys and of values."""
        return cls(step, [keys for keys, _ in fetched]), cls(step, [values for _, values in fetched])

    def attend(
        self, attention: Callable[..., mx.array], queries: mx.array, values: MixedKeyValues, mask: Any, **named: Any
    ) -> mx.array:
        """Let ``attention`` see each side's queries; ``queries`` [T, heads, 1, D] come back in their order.

        Raises TypeError for a mask that no cache of the forward made: it would speak of other columns.
        """
        if not isinstance(mask, Masks):
            msg = f"attention in a mixed forward got a mask of type {type(mask).__name__}; allowed: what a cache made"
            raise TypeError(msg)
        sides = zip(self._step.by_row(queries), self.each, values.each, mask.each, strict=True)
        return self._step.by_token([attention(q, k, v, mask=own, **named) for q, k, v, own in sides])
