"""The queue before the batch: order, limits, and who may run beside whom. Pure; admits nothing by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import attrs

from oarlock.core import errors
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

    Rows put back by preemption go to the head and do not count toward ``limit``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lanes: dict[int, deque[Row]] = {}
        self._returned: deque[Row] = deque()

    def push(self, row: Row) -> None:
        """Queue a row, or raise `errors.QueueFull`."""
        queued = sum(len(lane) for lane in self._lanes.values())
        if queued >= self.limit:
            raise errors.QueueFull(queued, self.limit)
        self._lanes.setdefault(row.request.priority, deque()).append(row)

    def push_front(self, row: Row) -> None:
        """Put a preempted row back at the head."""
        self._returned.appendleft(row)

    def head(self) -> Row | None:
        """Return the next row to admit, or None."""
        return next(iter(self), None)

    def pop(self) -> Row:
        """Remove and return the head. Raises IndexError when empty."""
        if self._returned:
            return self._returned.popleft()
        for priority in sorted(self._lanes, reverse=True):
            if self._lanes[priority]:
                return self._lanes[priority].popleft()
        msg = "pop from an empty queue"
        raise IndexError(msg)

    def prune(self, over: Callable[[Row], bool]) -> list[Row]:
        """Remove and return every row, wherever it stands, for which ``over`` is true."""
        removed = [row for row in self if over(row)]
        if removed:
            gone = set(map(id, removed))
            self._returned = deque(row for row in self._returned if id(row) not in gone)
            for priority, lane in self._lanes.items():
                self._lanes[priority] = deque(row for row in lane if id(row) not in gone)
        return removed

    def __len__(self) -> int:
        """Count all waiting rows."""
        return len(self._returned) + sum(len(lane) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Row]:
        """Iterate in order of admission."""
        yield from self._returned
        for priority in sorted(self._lanes, reverse=True):
            yield from self._lanes[priority]


def compatible(candidate: GroupKey, current: GroupKey | None) -> bool:
    """Return whether a row may join now; ``current`` is None where nothing runs and nothing prepares."""
    return current is None or candidate == current
