"""What there is to do, and how to do one unit of each: the scheduler's hands. It orders nothing itself."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from oarlock.core.admission import AdmissionQueue, GroupKey, compatible
from oarlock.core.budget import Budget
from oarlock.core.cleanup import attempt_all
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.emission import Emitter
from oarlock.core.group import ExecutionGroup
from oarlock.core.mailbox import Mailbox
from oarlock.core.mixed import Work
from oarlock.core.observe import Observers
from oarlock.core.prefill import PrefillCohort
from oarlock.core.rebuild import Rebuild
from oarlock.core.relief import Relief
from oarlock.core.residency import Residency
from oarlock.core.result import FinishReason
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


class Driver(Mailbox):
    """Queue, preparation, running group, lock and residency of one engine.

    Implements `core.scheduler.Work`. ``mutex`` guards what other threads touch: queue, tasks, flags. Everything else
    belongs to the driving thread.
    """

    def __init__(
        self,
        bound: BoundModel,
        store: StateCache,
        observers: Observers,
        clock: Callable[[], float],
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__()
        self.published = False
        """Whether the last preparation advance delivered a token."""
        self.bound = bound
        self.emitter = Emitter(observers, clock)
        self.group = ExecutionGroup(bound, store, self.emitter, self._released)
        self.relief = Relief(Budget.of(bound), self.group, self._put_back)
        self._admitted = 0
        recoveries = Rebuild(self.relief, self.conclude, bound.config.scheduler.max_recoveries)
        self._contained: Callable[..., AbstractContextManager[None]] = recoveries.contained
        self.queue = AdmissionQueue(bound.config.scheduler.max_queued, bound.policy.choose)
        self._store = store
        self._observers = observers
        self._clock = clock
        self._lock = lock
        self._residency = Residency(bound.model)
        self._swap = bound.swap()
        bound.adapters.open()
        self._work = contextlib.ExitStack()
        self._acquired = False
        self._preparation: PrefillCohort | None = None
        self._key: GroupKey | None = None

    def contain_by(self, contained: Callable[..., AbstractContextManager[None]]) -> None:
        """Let ``contained`` stand where errors of the device are contained: see `Rebuild.contained`."""
        self._contained = contained

    @property
    def active(self) -> int:
        """Running rows."""
        return len(self.group.rows)

    @property
    def preparing(self) -> bool:
        """Whether a preparation exists."""
        return self._preparation is not None

    @property
    def preparing_rows(self) -> int:
        """Rows of the preparation."""
        return len(self._preparation.rows) if self._preparation is not None else 0

    @property
    def preparing_ids(self) -> tuple[str, ...]:
        """Ids of the preparation's rows."""
        return tuple(row.id for row in self._preparation.rows) if self._preparation is not None else ()

    @property
    def preparing_tokens(self) -> int:
        """Prompt tokens of the preparation's rows."""
        return self._preparation.token_weight if self._preparation is not None else 0

    @property
    def accepts(self) -> bool:
        """Whether the preparation takes more rows."""
        return self._preparation is not None and self._preparation.accepts

    @property
    def mixes(self) -> bool:
        """Whether the next step may take the preparation's next chunk along."""
        return self._preparation is not None and self.accepts and self.active > 0 and self.group.mixes

    @property
    def queued(self) -> int:
        """Waiting rows."""
        return len(self.queue)

    @property
    def head_tokens(self) -> int:
        """Prompt tokens of the head."""
        with self.mutex:
            head = self.queue.head()
        return head.prompt_tokens if head is not None else 0

    @property
    def groups(self) -> bool:
        """Whether the head can join what runs and prepares now."""
        with self.mutex:
            head = self.queue.head()
        return (
            head is not None
            and self._compatible(head)
            and self.relief.affords(head, self._preparation)
            and self._store.fits(head)
        )

    @property
    def busy(self) -> bool:
        """Whether an iteration would find something to do."""
        return bool(self.active or self.preparing or (not self.held and (self.queued or self.tasks)))

    def prune(self) -> None:
        """Drop cancelled rows from anywhere in the queue."""
        with self.mutex:
            removed = self.queue.prune(lambda row: row.cancelled)
        for row in removed:
            row.reason = FinishReason.CANCELLED
            self.conclude(row)

    def acquire(self) -> None:
        """Reserve residency, then take the lock."""
        if self._acquired:
            return
        self._acquired = True
        self._work.enter_context(self._residency)
        if self._lock is not None:
            self._work.enter_context(self._lock)

    def release(self) -> None:
        """Leave the adapter, give the lock and residency back; all are attempted."""
        if not self._acquired:
            return
        self._acquired = False
        work, self._work = self._work, contextlib.ExitStack()
        attempt_all([partial(self.bound.adapters.switch, ""), work.close])

    def admit(self) -> bool:
        """Admit the head; False where it must wait. An error rejects that row and counts as done."""
        with self.mutex:
            row = self.queue.head()
        if row is None or not self._compatible(row) or not self.relief.affords(row, self._preparation):
            return False
        try:
            if not self._store.admit(row):
                return False
        except Exception as error:  # noqa: BLE001 - it can never be admitted
            self._remove_head(row)
            return self._refuse(row, error)
        self._remove_head(row)
        try:
            self._enter(row)
        except Exception as error:  # noqa: BLE001 - this row only
            return self._refuse(row, error)
        return True

    def prepare(self, work: Work | None = None) -> None:
        """Advance the preparation once, from the step that took ``work`` along, and drop it when it is empty."""
        self.published = False
        if work is None:
            self._relieve()
        preparation = self._preparation
        if preparation is None:
            return
        with self._contained(preparation, self._surrender):
            preparation.advance(work)
            self.published = preparation.published
        if not preparation.rows:
            self._preparation = None

    def decode(self, work: Work | None = None) -> None:
        """Advance the running rows once; the step may take ``work`` along."""
        if work is None:
            self._relieve()
        with self._contained(self.group, self._surrender):
            self.group.advance(work)

    def mix(self) -> None:
        """Advance both: the step takes the preparation's next chunk along, and is emitted before that goes on."""
        self._relieve()
        preparation, work = self._preparation, None
        if preparation is not None:
            with self._contained(preparation, self._surrender):
                work = preparation.offer()
        self.decode(work)
        if self._preparation is not None:
            self.prepare(work)

    def _relieve(self) -> None:
        """Preempt rows while the next step would hold too much."""
        with self._contained(self.group, self._surrender):
            self._preparation = self.relief.relieve(self._preparation)

    def _put_back(self, row: Row) -> None:
        """Let a row that gave its state up wait at the head of the queue."""
        self._store.release(row, False)
        with self.mutex:
            self.queue.push_front(row)
        self._observers.notify("request_preempted", request=row.request)

    def _surrender(self) -> list[list[Row]]:
        """Give up all state: what the device was given and has not answered is lost."""
        preparation, self._preparation = self._preparation, None
        running = self.group.surrender()
        preparing = preparation.surrender() if preparation is not None else []
        return [running, [row for row in preparing if row not in running]]  # a row that just joined is in both

    def conclude(self, row: Row) -> None:
        """Settle a row that is over and give its lease back."""
        if self.emitter.conclude(row):
            self._released(row, row.error is None and row.reason is not FinishReason.CANCELLED)

    def _released(self, row: Row, completed: bool) -> None:
        """Give the lease of a settled row back, and let its checkpoint go where it needs none any more."""
        self._store.release(row, completed)
        if completed and row.request.checkpoint_interval is not None:
            self.group.states.checkpoints.ended(row)

    def fail_all(self, error: BaseException, *, queued: bool) -> None:
        """Reject everything that is owned with ``error``, then release every resource; all are attempted."""
        with self.mutex:
            waiting = self.queue.prune(lambda _: True) if queued else []
            tasks, self._tasks = (list(self._tasks), deque()) if queued else ([], self._tasks)
        for task in tasks:
            task.fail(error)
        preparation, self._preparation = self._preparation, None
        attempts: list[Callable[[], object]] = [partial(self.group.fail, error)]
        if preparation is not None:
            attempts.append(partial(preparation.fail, error))
        for row in waiting:
            row.error = error
            attempts.append(partial(self.conclude, row))
        ends = [self.bound.adapters.close, self._swap.close, self.group.states.close] if self.closed else []
        attempt_all([*attempts, self.group.close_method, self.release, *ends])

    def _compatible(self, row: Row) -> bool:
        if self._preparation is not None and not self._preparation.takes(row):
            return False
        return compatible(row.key, self._key if self.active or self.preparing else None)

    def _remove_head(self, row: Row) -> None:
        with self.mutex:
            self.queue.take(row)

    def _refuse(self, row: Row, error: BaseException) -> bool:
        row.error = error
        self.conclude(row)
        return True

    def _enter(self, row: Row) -> None:
        """Take a row out of the queue's hands: namespace, adapter, method, preparation, in this order."""
        request = row.request
        if not row.preempted:
            row.namespace = request.namespace() if callable(request.namespace) else request.namespace
        self.bound.adapters.switch(row.key.adapter)
        if not row.preempted:
            if request.on_admitted is not None:
                request.on_admitted()
            self._admitted += 1
            row.admitted_at, row.admitted_number = self._clock(), self._admitted
            self._observers.notify("request_admitted", request=request)
        stored = self.group.states.checkpoints.resume(row, self.emitter.replay)
        if row.over:
            self.conclude(row)
            return
        if self.group.states.awaited(row):
            with self._contained(self.group, self._surrender):
                self.group.flush()
        self.group.use_method(row.key.method)
        self._key = row.key
        cohort = self._preparation or PrefillCohort(self.group, self.conclude)
        with self.mutex:
            waiting = list(self.queue)
        cohort.admit(row, waiting, stored)
        self._preparation = cohort
