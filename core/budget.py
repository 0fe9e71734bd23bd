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
        return [_final(row) for row in self.rows]

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
        if self.limit is not None and (needed := self.bound.bytes_at(_final(row))) > self.limit:
            raise NeverFits("bytes of KV cache", needed, self.limit)

    def admits(self, row: Row, running: Holding, preparing: Holding) -> bool:
        """Return whether everyone's last token still fits with this row beside them.

        A row that was preempted once is not taken on credit again: it would have to leave again.
        """
        if self.limit is None or not (running.rows or preparing.rows):
            return True
        known = len(row.known_ids)
        needed = self._of(running, (*running.final, *preparing.final, _final(row)))
        needed += self._of(preparing, (*preparing.known, known))
        needed += self.bound.bytes_at(max(*preparing.known, known)) if preparing.rows else 0  # taken out one by one
        return needed <= self.limit * (1 if row.preempted else self.overcommit)

    def rebuilds(self, rows: Sequence[Row]) -> bool:
        """Return whether rows can be built anew together, two steps included: as a cohort, and moved into a group."""
        if self.limit is None or len(rows) < 2:
            return True
        tokens = [len(row.known_ids) + 2 for row in rows]
        twice = 2 * self._of(Holding(), tokens, exact=False)
        return twice + self.bound.bytes_at(max(tokens)) <= self.limit

    def relieves(self, running: Holding, preparing: Holding) -> bool:
        """Return whether the next step fits, with caches cut to what it needs where they grow too far by themselves."""
        if self.limit is None:
            return True
        both: Sequence[int] = (*running.tokens, *preparing.tokens)
        parts = [(running, both)] if running.rows or len(preparing.rows) > 1 else []  # a lone row's caches are adopted
        parts += [(preparing, preparing.tokens)] if preparing.rows else []
        copied = self.bound.bytes_at(max(preparing.tokens)) if len(preparing.rows) > 1 else 0
        if sum(self._of(*part, exact=False) for part in parts) + copied <= self.limit:
            return True
        if sum(self._of(*part) for part in parts) + copied > self.limit:
            return False
        for holding, tokens in reversed(parts):  # where both share a pool, the last to reserve settles its size
            for cache in holding.caches:
                cache.reserve(tokens)
        return True

    def _of(self, holding: Holding, tokens: Sequence[int], *, exact: bool = True) -> int:
        caches = holding.caches or self.bound.open_caches(slots=1, window=1)
        return sum(cache.projected(tokens, exact=exact) for cache in caches)


def _final(row: Row) -> int:
    return row.prompt_tokens + row.max_tokens


def _memory() -> int:
    """Return the bytes of memory that the device, or else the machine, has."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if key in info:
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
