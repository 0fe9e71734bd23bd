"""The order of work in one iteration. It sees counts and flags only: no row, no array, no model.

NOTE: the invariant that everything here serves: running rows advance once per iteration, at most one preparation
exists, and nothing sleeps while there is work that is not held.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import attrs

from oarlock.core.contracts.policy import Counts, Policy


class Turn(Enum):
    """How an iteration ended."""

    IDLE = auto()
    YIELDED = auto()
    CLOSED = auto()


class Work(Protocol):
    """The group's side: what there is to do, and how to do one unit of each."""

    @property
    def closed(self) -> bool:
        """True once nothing new may start."""
        ...

    @property
    def held(self) -> bool:
        """True while nothing may be admitted."""
        ...

    @property
    def active(self) -> int:
        """Running rows."""
        ...

    @property
    def preparing(self) -> bool:
        """Whether a preparation exists."""
        ...

    @property
    def preparing_rows(self) -> int:
        """Rows of the preparation."""
        ...

    @property
    def preparing_tokens(self) -> int:
        """Prompt tokens of the preparation."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether the preparation takes more rows."""
        ...

    @property
    def mixes(self) -> bool:
        """Whether the running rows' next step may take the preparation's next chunk along."""
        ...

    @property
    def queued(self) -> int:
        """Waiting rows."""
        ...

    @property
    def head_tokens(self) -> int:
        """Prompt tokens of the head."""
        ...

    @property
    def groups(self) -> bool:
        """Whether the head can join what runs and prepares now."""
        ...

    @property
    def tasks(self) -> int:
        """Waiting tasks."""
        ...

    @property
    def published(self) -> bool:
        """Whether the last preparation advance delivered a token."""
        ...

    def prune(self) -> None:
        """Drop cancelled rows from the queue."""
        ...

    def acquire(self) -> None:
        """Reserve residency, then take the lock; both once until `release`."""
        ...

    def release(self) -> None:
        """Give the lock back, then residency. Idempotent."""
        ...

    def run_task(self) -> None:
        """Run one queued task."""
        ...

    def admit(self) -> bool:
        """Admit the head; False where it must wait."""
        ...

    def prepare(self) -> None:
        """Advance the preparation once."""
        ...

    def decode(self) -> None:
        """Advance the running rows once."""
        ...

    def mix(self) -> None:
        """Advance the running rows and the preparation once, in one forward where both need one."""
        ...


@attrs.define
class Scheduler:
    """Runs iterations. The limits are fixed; the only state is the time of the last yield."""

    policy: Policy
    max_batch: int
    prefill_batch_tokens: int
    early_first_token: bool
    clock: Callable[[], float]
    yielded_at: float = 0.0

    def iterate(self, work: Work) -> Turn:
        """Do one iteration, going round again where the policy asks for it."""
        while not work.closed:
            work.prune()
            if not work.active and not work.preparing and (work.held or not (work.queued or work.tasks)):
                work.release()
                return Turn.IDLE
            work.acquire()
            if work.closed:
                break
            if work.tasks and not work.held:
                work.run_task()
                if work.closed:
                    break
                work.prune()
            refused = not self._admit(work)
            before = work.active
            if work.mixes and self._decodes(work):
                work.mix()
                return self._yield()
            if work.preparing:
                work.prepare()
                if self.policy.ends_after_preparation(self._counts(work, before)):
                    return self._yield()
            if not work.preparing and self._room(work) and not refused:  # asking again would be refused again
                counts = self._counts(work, before)
                if counts.groups and self.policy.admits_before_decode(counts):
                    continue
            if work.active:
                work.decode()
            lone = work.active == 1 and not (work.queued or work.preparing or work.held)
            if lone and self.clock() - self.yielded_at < self.policy.coalesce_s:
                continue
            return self._yield()
        return Turn.CLOSED

    def _admit(self, work: Work) -> bool:
        """Start a preparation with the head, then let short prompts join it; False where none could start."""
        if not work.preparing and self._room(work) and not work.admit():
            return False
        while (
            work.preparing
            and work.accepts
            and self._room(work)
            and work.groups
            and work.preparing_tokens + work.head_tokens <= self.prefill_batch_tokens
        ):
            if not work.admit():
                break
        return True

    def _room(self, work: Work) -> bool:
        if work.held or not work.queued:
            return False
        return work.active + (work.preparing_rows if work.preparing else 0) < self.max_batch

    def _decodes(self, work: Work) -> bool:
        """Whether the policy lets running rows go on beside a preparation that has delivered nothing."""
        return not self.policy.ends_after_preparation(attrs.evolve(self._counts(work, work.active), published=False))

    def _counts(self, work: Work, before: int) -> Counts:
        return Counts(
            before=before,
            active=work.active,
            preparing=work.preparing,
            queued=work.queued,
            published=work.published,
            room=self._room(work),
            groups=work.queued > 0 and work.groups,
            early_first_token=self.early_first_token,
        )

    def _yield(self) -> Turn:
        self.yielded_at = self.clock()
        return Turn.YIELDED
