"""What a caller with many requests asks of them at each step, and what becomes of those that are refused."""

import pytest

from oarlock.core.submissions import Submissions


class Watched:
    """A handle that counts how often it was asked whether it is done, and notes that it was cancelled."""

    def __init__(self, name):
        self.outcome, self.over, self.asked, self.cancelled = name, False, 0, False

    def cancel(self):
        self.cancelled = True

    @property
    def done(self):
        self.asked += 1
        return self.over


def test_what_is_done_is_asked_once_more_and_never_again():
    """So a step does not get slower with each request that is over, whoever ends first."""
    given = Submissions(range(1000), Watched)
    given.feed(lambda: True)
    for handle in [*given.handles[1:500], given.handles[0], *given.handles[500:]]:
        assert not given.done
        handle.over = True
    assert given.done
    assert sum(handle.asked for handle in given.handles) <= 2 * 1000 + 500
    assert given.outcomes == list(range(1000))


def test_none_waits_behind_a_full_queue_longer_than_it_is_full():
    given, room = Submissions("abc", Watched), [True, False]
    given.feed(lambda: room.pop(0))
    assert [handle.outcome for handle in given.handles] == ["a"]
    given.handles[0].over = True
    assert not given.done, "two were not submitted"
    given.feed(lambda: True)
    assert [handle.outcome for handle in given.handles] == ["a", "b", "c"]


def test_nothing_to_do_is_done():
    assert Submissions([], Watched).done


def test_a_refusal_is_raised_and_the_others_stay_as_they_are():
    def submit(name):
        if name == "b":
            raise ValueError(name)
        return Watched(name)

    given = Submissions("abc", submit)
    with pytest.raises(ValueError, match="b"):
        given.feed(lambda: True)
    assert [handle.outcome for handle in given.handles] == ["a"]


def test_who_gives_up_submits_no_more_and_ends_what_runs():
    given, room = Submissions("abc", Watched), [True, True, False]
    given.feed(lambda: room.pop(0))
    given.handles[1].over = True
    given.cancel()
    assert [handle.cancelled for handle in given.handles] == [True, False]
    assert not given.done
    given.handles[0].over = True
    assert given.done
    given.feed(lambda: True)
    assert len(given.handles) == 2
