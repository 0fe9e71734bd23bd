"""What each policy promises, by random arrivals at the real scheduler, queue and planner, and that the others do not.

Rows are counts: no model and no array. The inequalities are those of the docstrings in `plugins/policies.py`.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import attrs
import pytest

from oarlock.core.admission import AdmissionQueue
from oarlock.core.planner import plan, shared_width
from oarlock.core.scheduler import Scheduler
from oarlock.plugins.policies import DecodeFirst, FairShare, Fifo, PrefillFirst

STREAMS = 400
CHUNK, BATCH, PROMPT, ANSWER, ROWS = 6, 10, 40, 5, 4
ADVANCE = max(BATCH, CHUNK + 1)
CHUNKS = -(-PROMPT // CHUNK) + 1


@attrs.define(eq=False)
class Row:
    """A request as numbers. ``steps``: decode steps that others made while it waited though it found a place."""

    prompt: int
    answer: int
    priority: int
    found_place: bool
    position: int = 0
    chunk: object = None
    first_at: int | None = None
    steps: int = 0
    request = property(lambda self: SimpleNamespace(priority=self.priority))


class Service:
    """The group's side of the scheduler: real queue and plans, and rows that are nothing but counts."""

    closed = held = mixes = False
    tasks = 0
    accepts = groups = True

    def __init__(self, policy, *, shares, tail_split):
        self.queue = AdmissionQueue(10**6, policy.choose)
        self.accepts, self.tail_split = shares, tail_split
        self.cohort, self.running = [], []
        self.stall = self.worst_stall = self.worst_steps = self.worst_wait = self.turns = 0
        self.published = False

    active = property(lambda self: len(self.running))
    preparing = property(lambda self: bool(self.cohort))
    preparing_rows = property(lambda self: len(self.cohort))
    preparing_tokens = property(lambda self: sum(row.prompt for row in self.cohort))
    queued = property(lambda self: len(self.queue))
    head_tokens = property(lambda self: self.queue.head().prompt)

    def prune(self):
        """The first of each priority waits from now on, if it did not before."""
        for priority in {row.priority for row in self.queue}:
            first = next(row for row in self.queue if row.priority == priority)
            first.first_at = self.turns if first.first_at is None else first.first_at
            self.worst_wait = max(self.worst_wait, self.turns - first.first_at)

    def acquire(self):
        pass

    release = acquire

    def push(self, row):
        row.found_place = self.active + len(self.cohort) + len(self.queue) < ROWS
        self.queue.push(row)

    def admit(self):
        row = self.queue.head()
        self.queue.take(row)
        self.cohort.append(row)
        return True

    def prepare(self):
        """Forward until a chunk yields or a prompt ends, as a cohort does."""
        self.published = False
        watched, ends = bool(self.running), False
        while not ends:
            for row in self.cohort:
                row.chunk = row.chunk or plan(row.prompt, row.position, CHUNK, tail_split=self.tail_split)
            width = shared_width([row.position for row in self.cohort], [row.chunk for row in self.cohort])
            self.stall += width * len(self.cohort) if watched else 0
            for row in self.cohort:
                row.position += width
            for row in [row for row in self.cohort if row.position == row.chunk.end]:
                ends = ends or row.chunk.yields or row.chunk.final
                if row.chunk.final:
                    self.cohort.remove(row)
                    self.published = True
                    self.worst_steps = max(self.worst_steps, row.steps)
                    self.running.append(row)
                row.chunk = None
        self.worst_stall = max(self.worst_stall, self.stall)

    def decode(self):
        self.stall = 0
        for row in self.running:
            row.answer -= 1
        self.running = [row for row in self.running if row.answer > 0]
        for row in (*self.queue, *self.cohort):
            row.steps += row.found_place


def served(policy, seed, *, priorities=(0,), steady=False, turns=120):
    """Serve one random stream. ``steady``: somebody of the highest priority always waits, and one of the lowest came first."""
    rng = random.Random(seed)
    work = Service(policy, shares=rng.random() < 0.5, tail_split=rng.random() < 0.5)
    ticks = iter(range(10**9))
    driver = Scheduler(
        policy=policy,
        max_batch=ROWS,
        prefill_batch_tokens=rng.choice((1, BATCH)),
        early_first_token=rng.random() < 0.5,
        clock=lambda: next(ticks),
    )
    busy, longest = rng.choice((0.05, 0.3, 0.8)), rng.choice((1, CHUNK, PROMPT))

    def arrive(priority):
        work.push(Row(rng.randint(1, longest), rng.randint(1, ANSWER), priority, found_place=False))

    if steady:
        arrive(min(priorities))
    for turn in range(turns):
        work.turns = turn
        if rng.random() < busy:
            arrive(rng.choice(priorities))
        while steady and sum(row.priority == max(priorities) for row in work.queue) <= ROWS:
            arrive(max(priorities))
        driver.iterate(work)
    return work


def worst(policy, what, **stream):
    return max(getattr(served(policy, seed, **stream), what) for seed in range(STREAMS))


STALLS = {"decode_first": ADVANCE, "fair_share": ADVANCE, "fifo": ROWS * ADVANCE, "prefill_first": (ROWS - 1) * PROMPT}


@pytest.mark.parametrize("policy", [DecodeFirst(), FairShare(), Fifo(), PrefillFirst()], ids=lambda each: each.name)
def test_a_running_row_never_stalls_for_more_than_its_policy_says(policy):
    """Random streams come within the bound and not far from it: it is no bound that nothing could reach."""
    found = worst(policy, "worst_stall")
    assert found <= STALLS[policy.name]
    assert found > STALLS[policy.name] / 3


def test_the_other_policies_break_those_bounds():
    """So the inequality of each says something."""
    assert worst(Fifo(), "worst_stall") > STALLS["decode_first"]
    assert worst(PrefillFirst(), "worst_stall") > STALLS["fifo"]


def test_under_prefill_first_who_finds_a_place_waits_for_no_step_of_others():
    """Its first token comes before any running row's next; under every other policy it waits for several."""
    assert worst(PrefillFirst(), "worst_steps") == 0
    assert all(worst(policy, "worst_steps") > 2 for policy in (DecodeFirst(), Fifo(), FairShare()))


def test_under_fair_share_no_priority_starves():
    """A steady stream of the highest: the first of a lower one waits no longer than stated; elsewhere it never runs."""
    stream = {"priorities": (0, 1, 5), "steady": True}
    policy = FairShare()
    bound = (policy.patience + 3 + ROWS) * (CHUNKS + ANSWER)
    turns = bound + 50
    assert worst(policy, "worst_wait", turns=turns, **stream) <= bound
    for other in (DecodeFirst(), Fifo(), PrefillFirst()):
        assert min(served(other, seed, turns=turns, **stream).worst_wait for seed in range(20)) > bound


def test_fair_share_passes_a_priority_over_a_bounded_number_of_times():
    """4.1 within a priority, and ``patience + lanes - 1`` admissions of others between them."""
    policy, rng = FairShare(), random.Random(5)
    queue = AdmissionQueue(10**6, policy.choose)
    made, passed, most = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0), 0
    taken = dict.fromkeys(range(4), -1)
    for _ in range(4000):
        while len(queue) < 3 or rng.random() < 0.3:
            priority = rng.choice((0, 1, 2, 3, 3, 3))
            made[priority] += 1
            queue.push(Row(made[priority], 1, priority, found_place=False))
        row = queue.head()
        waiting = {each.priority for each in queue}
        queue.take(row)
        assert row.prompt > taken[row.priority]  # first come, first served
        taken[row.priority] = row.prompt
        for priority in passed:
            passed[priority] = passed[priority] + 1 if priority in waiting and priority != row.priority else 0
        most = max(most, *passed.values())
    assert policy.patience <= most <= policy.patience + 3
