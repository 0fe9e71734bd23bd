"""The order of work, against a stub that records what is asked of it. Rule numbers are SPEC's."""

from __future__ import annotations

import random
from collections import deque

import attrs
import pytest

from oarlock.core.scheduler import Scheduler, Turn
from oarlock.plugins.policies import DecodeFirst, Fifo, PrefillFirst


@attrs.define
class Stub:
    """Rows as numbers: ``queue`` holds (prompt tokens, preparation advances) of those that wait.

    Events: R reserve, L lock, U unlock, A admit, Pn prepare with n advances left, Dk decode k rows. A preparation
    takes more rows where ``shares``, and is as long as its longest row. Where ``mixed``, both go on in one: M between them.
    """

    queue: deque = attrs.field(factory=deque, converter=deque)
    running: list = attrs.field(factory=list)
    shares: bool = False
    mixed: bool = False
    publishes: bool = False
    fits: bool = True
    admits: bool = True
    lives: int = 1_000_000
    closed: bool = False
    held: bool = False
    published: bool = False
    waiting_tasks: list = attrs.field(factory=list)
    cohort: list = attrs.field(factory=list)
    cohorts: list = attrs.field(factory=list)
    left: int = 0
    locked: bool = False
    events: list = attrs.field(factory=list)
    waited: int = 0
    worst: int = 0

    active = property(lambda self: len(self.running))
    preparing = property(lambda self: bool(self.cohort))
    preparing_rows = property(lambda self: len(self.cohort))
    preparing_tokens = property(lambda self: sum(self.cohort))
    accepts = property(lambda self: self.shares)
    queued = property(lambda self: len(self.queue))
    head_tokens = property(lambda self: self.queue[0][0] if self.queue else 0)
    groups = property(lambda self: bool(self.queue) and self.fits)
    mixes = property(lambda self: self.mixed and bool(self.running and self.cohort))
    tasks = property(lambda self: len(self.waiting_tasks))

    def prune(self):
        pass

    def acquire(self):
        if not self.locked:
            self.locked = True
            self.events += ["R", "L"]

    def release(self):
        if self.locked:
            self.locked = False
            self.events.append("U")

    def run_task(self):
        self.events.append("task")
        self.waiting_tasks.pop(0)()

    def admit(self):
        if not self.admits:
            return False
        self.events.append("A")
        tokens, advances = self.queue.popleft()
        self.cohort.append(tokens)
        self.left = max(self.left, advances)
        return True

    def prepare(self):
        self.events.append(f"P{self.left}")
        self.left -= 1
        self.published = self.publishes
        self.waited = self.waited + 1 if self.running else 0
        self.worst = max(self.worst, self.waited)
        if self.left <= 0:
            self.cohorts.append(self.cohort)
            self.running += [self.lives] * len(self.cohort)
            self.cohort = []

    def decode(self):
        self.events.append(f"D{self.active}")
        self.waited = 0
        self.running = [left - 1 for left in self.running if left > 1]

    def mix(self):
        self.decode()
        self.events.append("M")
        self.prepare()


def scheduler(policy=None, *, max_batch=16, tokens=2048, early=True, clock=None):
    ticks = iter(range(10**9))
    return Scheduler(
        policy=policy or Fifo(),
        max_batch=max_batch,
        prefill_batch_tokens=tokens,
        early_first_token=early,
        clock=clock or (lambda: 1.0 + next(ticks)),  # a second between two looks: nothing coalesces
    )


def trace(work, turns=1, **options):
    """Run iterations and return the events, Y for each that ended by yielding."""
    driver = scheduler(**options)
    for _ in range(turns):
        if driver.iterate(work) is Turn.YIELDED:
            work.events.append("Y")
    return " ".join(work.events)


# --- the reference sequences of SPEC 3 --------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_two_short_prompts_are_grouped_before_the_first_decode_step(early):
    """3.1 step 10: no yield and no decode between two admissions that can group."""
    assert trace(Stub(queue=[(1, 1), (1, 1)]), early=early) == "R L A P1 A P1 D2 Y"


def test_a_lone_first_token_is_yielded_early():
    """3.1 step 9, with early yield."""
    assert trace(Stub(queue=[(1, 1)]), turns=2) == "R L A P1 Y D1 Y"


def test_a_lone_first_token_is_not_yielded_early_where_that_is_off():
    assert trace(Stub(queue=[(1, 1)]), early=False) == "R L A P1 D1 Y"


def test_a_long_joiner_interleaves_with_a_running_row():
    """3.6: one preparation advance, then one decode step."""
    work = Stub(running=[100], cohort=[30], left=3, locked=True)
    assert trace(work, turns=3) == "P3 D1 Y P2 D1 Y P1 D2 Y"


def test_a_mixed_iteration_decodes_first_and_yields():
    """3.1 step 8, 3.9: what the preparation published is not asked for."""
    work = Stub(queue=[(9, 3)], running=[9], mixed=True, publishes=True)
    assert trace(work, turns=4) == "R L A D1 M P3 Y D1 M P2 Y D1 M P1 Y D2 Y"


def test_prompts_that_go_first_take_no_step_along():
    """What `PrefillFirst` promises: no step of the running rows before a joiner's prompt is done."""
    work = Stub(queue=[(9, 3)], running=[9], mixed=True)
    assert trace(work, turns=4, policy=PrefillFirst()) == "R L A P3 Y P2 Y P1 D2 Y D2 Y"


def test_a_preparation_that_published_yields_before_more_work():
    """3.1 step 9: output is flushed first, whoever runs."""
    assert trace(Stub(queue=[(1, 1), (1, 1)], publishes=True), turns=3) == "R L A P1 Y A P1 Y D2 Y"


def test_a_task_runs_before_admission_under_the_same_lock():
    """3.1 step 5; 16.1: the lock is taken once."""
    work = Stub(queue=[(1, 1)], running=[100], waiting_tasks=[lambda: None])
    assert trace(work) == "R L task A P1 D2 Y"


def test_cohorts_share_a_token_limit_and_the_batch():
    """3 and 5.14: heads of 5000, 1200, 1200, 16 and 8 tokens, limit 2048, at most 4 rows."""
    work = Stub(queue=[(n, 1) for n in (5000, 1200, 1200, 16, 8)], shares=True, lives=2)
    trace(work, turns=8, max_batch=4)
    assert work.cohorts == [[5000], [1200], [1200, 16], [8]]


# --- the rules between them -------------------------------------------------------------------------------


def test_one_task_an_iteration():
    """16.1, trap 44."""
    work = Stub(running=[100, 100], locked=True, waiting_tasks=[lambda: None] * 3)
    assert trace(work, turns=3) == "task D2 Y task D2 Y task D2 Y"


def test_a_hold_drains():
    """3.3, trap 43: what prepares and runs ends, nothing starts, then the lock is free though rows are queued."""
    work = Stub(queue=[(1, 1)], running=[3], cohort=[9], left=2, locked=True, lives=2, held=True)
    work.waiting_tasks.append(lambda: None)
    assert trace(work, turns=5) == "P2 D1 Y P1 D2 Y D2 Y U"
    assert work.queued == 1
    assert work.tasks == 1


def test_a_task_may_hold():
    """3.1 step 5: the hold is read again after the task."""
    work = Stub(queue=[(1, 1)], running=[9])
    work.waiting_tasks.append(lambda: setattr(work, "held", True))
    assert trace(work) == "R L task D1 Y"


def test_an_idle_engine_gives_the_lock_back_once_and_sleeps():
    """3.1 step 3 and 3.4: not between steps, and only when nothing is left."""
    assert trace(Stub(queue=[(1, 1)], lives=2), turns=6, early=False) == "R L A P1 D1 Y D1 Y U"


def test_closing_in_a_task_starts_nothing():
    """3.1 step 5, 2.9."""
    work = Stub(queue=[(1, 1)])
    work.waiting_tasks.append(lambda: setattr(work, "closed", True))
    assert trace(work) == "R L task"
    assert scheduler().iterate(work) is Turn.CLOSED


def test_closing_while_the_lock_is_awaited_starts_nothing():
    """2.10."""
    work = Stub(queue=[(1, 1)])
    acquire = work.acquire

    class Closing(Stub):
        def acquire(self):
            acquire()
            self.closed = True

    closing = Closing(queue=[(1, 1)], events=work.events)
    assert scheduler().iterate(closing) is Turn.CLOSED
    assert work.events == ["R", "L"]


def test_a_full_batch_admits_nobody():
    """3.1 step 6."""
    assert trace(Stub(queue=[(1, 1)], running=[9, 9], locked=True), max_batch=2) == "D2 Y"


def test_preparing_rows_count_toward_the_batch():
    """3.1 step 7."""
    work = Stub(queue=[(1, 2)] * 4, running=[9], shares=True, locked=True)
    assert trace(work, max_batch=3) == "A A P2 D1 Y"


@pytest.mark.parametrize("policy", [Fifo(), DecodeFirst()])
def test_a_head_that_fits_and_is_refused_does_not_spin(policy):
    """4.5: admission is the state cache's word; asking again in the same iteration would be asked for ever."""
    assert trace(Stub(queue=[(1, 1)], admits=False, locked=True), policy=policy) == "Y"
    assert trace(Stub(queue=[(1, 1)], running=[9], admits=False, locked=True), policy=policy) == "D1 Y"


def test_a_lone_row_goes_on_without_yielding_for_25_ms():
    """3.1 step 12, trap 42: neither for ever nor never."""
    now = iter(0.004 * i for i in range(10**6))
    work = Stub(running=[100], locked=True)
    driver = scheduler(clock=lambda: next(now))
    assert driver.iterate(work) is Turn.YIELDED
    assert 5 <= len(work.events) <= 8
    work.events.clear()
    work.held = True
    driver.iterate(work)
    assert work.events == ["D1"]  # a hold ends it


# --- decode_first: the promise, and that it is one -----------------------------------------------------------


def worst_stall(policy, seed):
    """Return the most preparation advances that running rows stood between two of their decode steps."""
    rng = random.Random(seed)
    work = Stub(lives=12, shares=rng.random() < 0.5, publishes=rng.random() < 0.7)
    driver = scheduler(policy, max_batch=6, tokens=64, early=rng.random() < 0.5)
    for _ in range(60):
        if rng.random() < 0.4:
            work.queue.append((rng.randint(1, 40), rng.randint(1, 4)))
        driver.iterate(work)
    return work.worst


def test_decode_first_never_stalls_a_running_row_for_more_than_one_advance():
    """DESIGN 6: whatever arrives; under `fifo` rows do wait longer, so the inequality says something."""
    assert max(worst_stall(DecodeFirst(), seed) for seed in range(200)) == 1
    assert max(worst_stall(Fifo(), seed) for seed in range(200)) > 3


def test_decode_first_still_groups_while_nobody_runs():
    """Nobody waits yet, so short prompts enter the first step together."""
    assert trace(Stub(queue=[(1, 1), (1, 1)]), policy=DecodeFirst()) == "R L A P1 A P1 D2 Y"
