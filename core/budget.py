"""The budget of bytes for running and preparing rows: who fits, and whose state must go. It moves no row itself.

NOTE: pressure is predicted from the layouts' own numbers, never caught: a failed allocation ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from oarlock.core.errors import NeverFits

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel
    from oarlock.core.contracts.layout import BatchCache
    from oarlock.core.row import Row


@attrs.frozen
class Holding:
    """Caches with their rows, and what each row holds after the next step. Without caches it is a group to come."""

    caches: Sequence[BatchCache] = ()
    rows: Sequence[Row] = ()
    tokens: Sequence[int] = ()

    @property
    def final(self) -> list[int]:
        """What each row holds at its end."""
        return [final(row) for row in self.rows]

    @property
    def known(self) -> list[int]:
        """What each row holds when it is prepared."""
        return [len(row.known_ids) for row in self.rows]


@attrs.frozen
class Budget:
    """``limit`` bytes, or None; admissions may promise ``overcommit`` times as much.

    Raises nothing and counts nothing while there is no limit.
    """

    bound: BoundModel
    limit: int | None
    overcommit: float

    @classmethod
    def of(cls, bound: BoundModel) -> Budget:
        """Return the configured budget; a share is one of the device's memory."""
        settings = bound.config.scheduler
        share = settings.kv_budget
        return cls(bound, int(share * _memory()) if isinstance(share, float) else share, settings.overcommit)

    def check(self, row: Row) -> None:
        """Raise `errors.NeverFits` for a row that does not fit alone."""
        if self.limit is not None and (needed := self._alone(row, final(row))) > self.limit:
            raise NeverFits("bytes of KV cache", needed, self.limit)

    def admits(self, row: Row, running: Holding, preparing: Holding, beside: int = 0) -> bool:
        """Return whether everyone's last token still fits with this row beside them, and ``beside`` bytes.

        A row that was preempted once is not taken on credit again: it would have to leave again.
        """
        if self.limit is None or not (running.rows or preparing.rows):
            return True
        known = len(row.known_ids)
        needed = beside + self._of(running, (*running.final, *preparing.final, final(row)), row)
        needed += self._of(preparing, (*preparing.known, known), row)
        needed += self._alone(row, max(*preparing.known, known)) if preparing.rows else 0  # taken out one by one
        return needed <= self.limit * (1 if row.preempted else self.overcommit)

    def rebuilds(self, rows: Sequence[Row]) -> bool:
        """Return whether rows can be built anew together, two steps included: as a cohort, and moved into a group."""
        if self.limit is None or len(rows) < 2:
            return True
        tokens = [len(row.known_ids) + 2 for row in rows]
        twice = 2 * self._of(Holding(), tokens, rows[0], exact=False)
        return twice + self._alone(rows[0], max(tokens)) <= self.limit

    def relieves(self, running: Holding, preparing: Holding) -> bool:
        """Return whether the next step fits, with caches cut to what it needs where they grow too far by themselves."""
        if self.limit is None:
            return True
        parts = self._parts(running, preparing)
        if self._sum(parts, preparing, exact=False) <= self.limit:
            return True
        if self._sum(parts, preparing) > self.limit:
            return False
        for holding, tokens in reversed(parts):  # where both share a pool, the last to reserve settles its size
            for cache in holding.caches:
                cache.reserve(tokens)
        return True

    def left(self, running: Holding, preparing: Holding) -> int:
        """Return the bytes that the next step leaves, once `relieves` said that it fits."""
        return max(0, (self.limit or 0) - self._sum(self._parts(running, preparing), preparing, exact=False))

    def _parts(self, running: Holding, preparing: Holding) -> list[tuple[Holding, Sequence[int]]]:
        """Return what is held after the next step, and the tokens of its rows. A lone row's caches are adopted."""
        both: Sequence[int] = (*running.tokens, *preparing.tokens)
        parts = [(running, both)] if running.rows or len(preparing.rows) > 1 else []
        return [*parts, (preparing, preparing.tokens)] if preparing.rows else parts

    def _sum(self, parts: Sequence[tuple[Holding, Sequence[int]]], preparing: Holding, *, exact: bool = True) -> int:
        rows = preparing.rows
        copied = self._alone(rows[0], max(preparing.tokens)) if len(rows) > 1 else 0
        return copied + sum(self._of(*part, (*rows, *part[0].rows)[0], exact=exact) for part in parts)

    def _alone(self, row: Row, tokens: int) -> int:
        """Return the bytes of a row's own caches on the way to ``tokens``: where its storage changes they may be more before."""
        return self._of(Holding(), [tokens], row)

    def _of(self, holding: Holding, tokens: Sequence[int], row: Row, *, exact: bool = True) -> int:
        """Return the bytes of caches at ``tokens``; of those that ``row`` would have where there are none."""
        caches = holding.caches or self.bound.open_caches(slots=1, window=self.bound.window(row.key.method))
        return sum(cache.projected(tokens, exact=exact) for cache in caches)


def final(row: Row) -> int:
    """Return the tokens that a row holds at its end."""
    return row.prompt_tokens + row.max_tokens


def _memory() -> int:
    """Return the bytes of memory that the device, or else the machine, has."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if key in info:
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
