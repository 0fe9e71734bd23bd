"""The queue before the batch: order, limits, and who may run beside whom. Pure; admits nothing by itself."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import attrs

from oarlock.core import errors
from oarlock.core.contracts.policy import Lane
from oarlock.core.row import Row


@attrs.frozen
class GroupKey:
    """What all rows of one group share: rows with another key wait until the group is empty.

    ``adapter`` is empty for adapters that are applied per row. ``decode_state`` belongs to prepared inputs that
    also own decode positions.
    """

    method: str
    adapter: str = ""
    decode_state: str = ""


class AdmissionQueue:
    """First in, first out within a priority; the head blocks what stands behind it.

    ``choose`` says which priority is next, the highest by default. Rows put back by preemption go to the head and do
    not count toward ``limit``.
    """

    def __init__(self, limit: int, choose: Callable[[Sequence[Lane]], int] = lambda _: 0) -> None:
        self.limit = limit
        self._choose = choose
        self._lanes: dict[int, deque[Row]] = {}
        self._passed: Counter[int] = Counter()
        self._returned: deque[Row] = deque()
        self._waiting = 0  # kept, so that other threads may ask while a lane is being added

    def push(self, row: Row) -> None:
        """Queue a row, or raise `errors.QueueFull`."""
        queued = self._waiting - len(self._returned)
        if queued >= self.limit:
            raise errors.QueueFull(queued, self.limit)
        self._lanes.setdefault(row.request.priority, deque()).append(row)
        self._waiting += 1

    def push_front(self, row: Row) -> None:
        """Put a preempted row back at the head."""
        self._returned.appendleft(row)
        self._waiting += 1

    def head(self) -> Row | None:
        """Return the next row to admit, or None."""
        if self._returned:
            return self._returned[0]
        waiting = [priority for priority in sorted(self._lanes, reverse=True) if self._lanes[priority]]
        if not waiting:
            return None
        lanes = [Lane(priority=priority, passed=self._passed[priority]) for priority in waiting]
        return self._lanes[waiting[self._choose(lanes) if len(lanes) > 1 else 0]][0]

    def take(self, row: Row) -> None:
        """Remove a row that is admitted; the other priorities that wait were passed over."""
        returned = row in self._returned
        self.prune(lambda other: other is row)
        for priority, lane in () if returned else self._lanes.items():
            passed = bool(lane) and priority != row.request.priority
            self._passed[priority] = self._passed[priority] + 1 if passed else 0

    def prune(self, over: Callable[[Row], bool]) -> list[Row]:
        """Remove and return every row, wherever it stands, for which ``over`` is true."""
        removed = [row for row in self if over(row)]
        if removed:
            gone = set(map(id, removed))
            self._returned = deque(row for row in self._returned if id(row) not in gone)
            for priority, lane in self._lanes.items():
                self._lanes[priority] = deque(row for row in lane if id(row) not in gone)
            self._waiting -= len(removed)
        return removed

    def __len__(self) -> int:
        """Count all waiting rows."""
        return self._waiting

    def __iter__(self) -> Iterator[Row]:
        """Iterate from the highest priority down, over rows put back first."""
        yield from self._returned
        for priority in sorted(self._lanes, reverse=True):
            yield from self._lanes[priority]


def compatible(candidate: GroupKey, current: GroupKey | None) -> bool:
    """Return whether a row may join now; ``current`` is None where nothing runs and nothing prepares."""
    return current is None or candidate == current
