"""Who waits, in which order, and who may run beside whom. Rule numbers are SPEC's, changed where DESIGN 0 says so."""

from __future__ import annotations

import pytest

from oarlock.core import Request
from oarlock.core.admission import AdmissionQueue, GroupKey, compatible
from oarlock.core.errors import QueueFull
from oarlock.core.row import Row


def row(name, priority=0):
    return Row(
        request=Request(prompt_ids=[1], priority=priority),
        id=name,
        prompt_ids=(1,),
        max_tokens=1,
        stop_ids=frozenset(),
        seed=0,
        key=GroupKey(method="plain"),
    )


def queue_of(*rows, limit=64):
    queue = AdmissionQueue(limit)
    for each in rows:
        queue.push(each)
    return queue


def drained(queue):
    names = []
    while (head := queue.head()) is not None:
        queue.take(head)
        names.append(head.id)
    return names


def test_first_in_first_out():
    """4.1."""
    queue = queue_of(*(row(name) for name in "abcd"))
    assert queue.head().id == "a"
    assert drained(queue) == ["a", "b", "c", "d"]


def test_fifo_within_a_priority_higher_first():
    """DESIGN 0 on 4.1."""
    queue = queue_of(row("a"), row("b", 5), row("c"), row("d", 5), row("e", -1))
    assert [each.id for each in queue] == ["b", "d", "a", "c", "e"]
    assert drained(queue) == ["b", "d", "a", "c", "e"]


def test_a_row_put_back_goes_before_everybody():
    """DESIGN 0: preempted rows return to the head, the last one first, whatever their priority."""
    queue = queue_of(row("a", 9), row("b"))
    queue.push_front(row("old"))
    queue.push_front(row("older"))
    assert drained(queue) == ["older", "old", "a", "b"]


def test_the_limit_counts_waiting_rows_only():
    """2.1, and DESIGN 0: rows put back do not count."""
    queue = queue_of(row("a"), limit=2)
    queue.push_front(row("back"))
    queue.push(row("b"))
    with pytest.raises(QueueFull) as caught:
        queue.push(row("c"))
    assert (caught.value.queued, caught.value.limit) == (2, 2)
    assert len(queue) == 3
    queue.take(queue.head())  # the row put back
    with pytest.raises(QueueFull):
        queue.push(row("c"))
    queue.take(queue.head())
    queue.push(row("c"))
    assert drained(queue) == ["b", "c"]


def test_cancelled_rows_are_found_wherever_they_stand():
    """2.6, trap 40: the whole queue is looked through, not its head."""
    gone = [row("a"), row("b", 3), row("c")]
    queue = queue_of(row("x"), gone[0], row("y", 3), gone[1], row("z"))
    queue.push_front(gone[2])
    assert queue.prune(lambda each: each in gone) == [gone[2], gone[1], gone[0]]
    assert drained(queue) == ["y", "x", "z"]


def test_an_empty_queue_has_no_head():
    queue = AdmissionQueue(1)
    assert queue.head() is None
    assert len(queue) == 0


def test_who_was_passed_over_is_counted_while_he_waits():
    """What a policy chooses by: admissions of others since one of this priority, none while nobody waits."""
    seen = []

    def choose(lanes):
        seen.append([(lane.priority, lane.passed) for lane in lanes])
        return int(len(seen) > 3 and lanes[1].passed > 0)

    queue = AdmissionQueue(64, choose)
    for name in "abc":
        queue.push(row(name, 5))
    queue.take(queue.head())
    queue.push(row("low"))
    queue.push(row("lower", -1))
    queue.push_front(row("back"))
    assert drained(queue) == ["back", "b", "c", "low", "lower"]
    assert seen[0] == [(5, 0), (0, 0), (-1, 0)]  # the row put back passed nobody
    assert seen[-1] == [(0, 2), (-1, 2)]
    for name in "de":
        queue.push(row(name, 5))
    queue.push(row("new"))
    assert drained(queue) == ["d", "new", "e"]  # whom `choose` names, with counts from 0 again
    assert seen[-2:] == [[(5, 0), (0, 0)], [(5, 0), (0, 1)]]


@pytest.mark.parametrize(
    "other",
    [GroupKey(method="speculative", adapter="x"), GroupKey(method="plain"), GroupKey(method="plain", adapter="y"),
     GroupKey(method="plain", adapter="x", decode_state="mrope")],
)  # fmt: skip
def test_rows_run_beside_rows_of_their_own_key(other):
    """4.4: method, adapter and decode state; anything goes where nothing runs and nothing prepares."""
    mine = GroupKey(method="plain", adapter="x")
    assert compatible(mine, mine)
    assert compatible(mine, None)
    assert not compatible(mine, other)
