"""Drafts are never tokens: `speculative` keeps its whole contract with them. And what was said once is drafted again."""

from typing import ClassVar

import shared_drafts
from shared_drafts import Memory, SharedOptions

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.methods import MethodContract


class TestSpeculative(MethodContract):
    """With these drafts."""

    method = "speculative"
    options: ClassVar = {"proposer": "shared", "adaptive": False}


IDS = {"prompt_ids": [5, 6, 7, 8, 9], "max_tokens": 24}


def answers(*changes):
    """One request after the other, each with changes of its own."""
    config = {"method": {"name": "speculative", "proposer": "shared", "adaptive": False}}
    with Engine(models.build("tiny-full"), config=config) as engine:
        results = [engine.generate([Request(**IDS, **change)])[0] for change in changes]
    assert len({result.token_ids for result in results}) == 1
    return [result.usage.accepted_tokens for result in results]


def test_an_answer_that_was_given_is_drafted_again():
    first, second = answers({}, {})
    assert first < 16 <= second


def test_another_namespace_learns_nothing():
    mine, theirs, again = answers({"namespace": "a"}, {"namespace": "b"}, {"namespace": "a"})
    assert theirs == mine < again


def test_who_is_not_to_be_remembered_is_not():
    (alone,) = answers({})
    assert answers({"reuse_prefix": False}, {}) == [0, alone]


def test_the_oldest_places_are_forgotten_first():
    memory = Memory(SharedOptions(match=1, entries=3))
    memory.learn("", [1, 2, 3, 4, 5], 0)
    assert memory.draft("", [1], 1) == []
    assert memory.draft("", [2], 9) == [3, 4, 5]
    assert shared_drafts.OARLOCK_API == 1
