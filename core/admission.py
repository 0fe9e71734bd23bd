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
        return next(iter(self), None)

    def pop(self) -> Row:
        """Remove and return the head. Raises IndexError when empty."""
        lanes = (self._returned, *(self._lanes[priority] for priority in sorted(self._lanes, reverse=True)))
        lane = next((lane for lane in lanes if lane), None)
        if lane is None:
            msg = "pop from an empty queue"
            raise IndexError(msg)
        self._waiting -= 1
        return lane.popleft()

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
        """Iterate in order of admission."""
        yield from self._returned
        for priority in sorted(self._lanes, reverse=True):
            yield from self._lanes[priority]


def compatible(candidate: GroupKey, current: GroupKey | None) -> bool:
    """Return whether a row may join now; ``current`` is None where nothing runs and nothing prepares."""
    return current is None or candidate == current
