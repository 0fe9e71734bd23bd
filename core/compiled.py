"""A decode step that is traced once and replayed, for a lone row and for few rows that stay. It samples nothing.

Positions are arrays and caches go in and out, so a trace holds until the columns that attention reads run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import structlog

from oarlock.core.contracts.layout import BatchCache, Positions
from oarlock.core.recovery import Recovery
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_log = structlog.get_logger(__name__)
MAX_ROWS = 4
"""Rows of a small batch: each number of rows is a trace of its own."""
STABLE = 16
"""Ordinary steps that a batch of the same rows has behind it before it is compiled: a trace takes as long as a few."""
COLUMN_STEP = 256
"""The fewest columns by which two traces differ."""


def reading(tokens: int) -> int:
    """Return how many columns a trace reads for rows of ``tokens``: at most a quarter more, `COLUMN_STEP` at least."""
    step = max(COLUMN_STEP, 1 << tokens.bit_length() >> 3)
    return -(-tokens // step) * step


@attrs.define(eq=False)
class _Tracing:
    """What a trace needs and a replay does not: the caches that are stood for. The compiled function holds this alone."""

    model: Any
    caches: Sequence[Any] = ()
    traces: int = 0

    def compiled(self) -> Any:
        """Return a function of ids, positions, every layer's planes and the columns to read: logits and planes."""

        def step(
            ids: mx.array, positions: mx.array, planes: list[dict[str, mx.array]], columns: int
        ) -> tuple[mx.array, list[dict[str, mx.array]]]:
            pairs = zip(self.caches, planes, strict=True)
            standing = [cache.traced(own, positions, columns) for cache, own in pairs]
            logits = self.model(ids, cache=standing)
            self.traces += 1
            return logits, [each.planes for each in standing]

        return mx.compile(step)


class CompiledStep:
    """The model's forward for one token a row, compiled for every shape that its caches come to have."""

    def __init__(self, model: Any) -> None:
        """Compile nothing yet."""
        self._tracing = _Tracing(model)
        self._function = self._tracing.compiled()

    @property
    def traces(self) -> int:
        """How often the model's own code ran."""
        return self._tracing.traces

    def __call__(self, caches: Sequence[Any], ids: mx.array, starts: Positions) -> mx.array:
        """Forward ids uint32 ``[B, 1]`` and return logits ``[B, 1, V]``. The caches have begun; `settle` must follow.

        Nothing is evaluated here. What is raised leaves the caches as they were.
        """
        rooms = [room for cache in caches if (room := cache.fixed_columns(starts.longest + 1)) is not None]
        columns = min([reading(starts.longest + 1), *rooms])
        self._tracing.caches = caches
        try:
            logits, written = self._function(ids, starts.array, [cache.planes for cache in caches], columns)
        finally:
            self._tracing.caches = ()
        for cache, planes in zip(caches, written, strict=True):
            cache.planes = planes
        return logits  # type: ignore[no-any-return]


class CompiledRows:
    """Says which steps of a group are compiled, and lets the ordinary step do what a compiled one could not.

    A lone row is compiled from its first step, unless it was ever merged; a batch of up to `MAX_ROWS` once it has been
    the same for `STABLE` steps, and a row of which one failed never again. ``steps`` counts compiled steps.
    """

    def __init__(self, bound: BoundModel, recovery: Recovery) -> None:
        """Failed steps count as recoveries."""
        self.steps = 0
        self._on, self._step, self._recovery = bound.compiling.on, CompiledStep(bound.model), recovery
        self._ids: tuple[str, ...] = ()
        self._same = 0

    @property
    def traces(self) -> int:
        """Traces made so far."""
        return self._step.traces

    def forward(
        self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], rows: Sequence[Row]
    ) -> mx.array | None:
        """Return logits ``[B, 1, V]`` of a step that is to be settled, or None: it is the ordinary step's.

        Nothing is evaluated here. Where the compiled step raises, the caches are as they were.
        """
        if not self._on or ids.shape[1] != 1 or 0 in widths or not self._marked(rows):
            return None
        starts = Positions(caches[0].tokens)
        try:
            for cache in caches:
                cache.begin(widths, starts)
            logits = self._step(caches, ids, starts)
        except Exception as error:  # noqa: BLE001 - if it is a row's, the ordinary step raises it again
            for cache in caches:
                cache.commit([0] * len(rows))
            for row in rows:
                row.compiled = False
            self._recovery.recoveries += 1
            _log.warning("compiled_failed", requests=[row.id for row in rows], error=repr(error))
            return None
        self.steps += 1
        return logits

    def _marked(self, rows: Sequence[Row]) -> bool:
        """Return whether these rows, which are about to take a step, may take a compiled one."""
        ids = tuple(row.id for row in rows[: MAX_ROWS + 1])
        self._same = self._same + 1 if ids == self._ids else 0
        self._ids = ids
        stays = self._same >= STABLE if len(rows) > 1 else not rows[0].merged
        may = (row.compiled and row.request.compiled and row.plain for row in rows)
        return stays and len(rows) <= MAX_ROWS and all(may)
