"""What other threads ask of the driving one: tasks, flags, and waking it up. It does none of the work."""

from __future__ import annotations

import threading
from collections import deque

from oarlock.core.errors import EngineClosed
from oarlock.core.handle import Task


class Mailbox:
    """``mutex`` guards everything here; whoever drives reads it between steps."""

    def __init__(self) -> None:
        self.mutex = threading.Condition()
        self.signals = 0
        """Counts what other threads asked for; who sleeps compares it, so no wake-up is lost."""
        self.closed = False
        self.held = False
        self._tasks: deque[Task] = deque()

    @property
    def tasks(self) -> int:
        """Waiting tasks."""
        return len(self._tasks)

    @property
    def busy(self) -> bool:
        """Whether an iteration would find something to do."""
        return bool(self._tasks)

    def signal(self) -> None:
        """Wake whoever sleeps. Legal from any thread."""
        with self.mutex:
            self.signals += 1
            self.mutex.notify_all()

    def sleep(self, seen: int, timeout: float | None = None) -> None:
        """Wait for a signal after ``seen``, unless there is work; at most ``timeout`` seconds."""
        with self.mutex:
            if self.signals == seen and not self.busy and not self.closed:
                self.mutex.wait(timeout)

    def add_task(self, task: Task) -> None:
        """Queue a task for the next boundary. Raises `errors.EngineClosed`."""
        with self.mutex:
            if self.closed:
                raise EngineClosed
            self._tasks.append(task)
            self.signal()

    def run_task(self) -> None:
        """Run one task; its error is its caller's."""
        with self.mutex:
            task = self._tasks.popleft()
        task.run()
