"""A schedule that fails is made small and written down: what is printed is a test that fails in the same way."""

from __future__ import annotations

import pytest
from harness.plan import Plan
from harness.schedule import Script, play, run
from harness.shrink import shrunk
from harness.world import Setting

from oarlock.core.driver import Driver


def test_what_is_printed_fails_as_the_schedule_does(tools, monkeypatch):
    """One request is enough to see that leases are kept; without the bug the test that is printed passes."""
    monkeypatch.setattr(Driver, "conclude", lambda self, row: self.emitter.conclude(row))
    number = next(number for number in range(20) if _fails(number, tools))
    text = shrunk(number, tools, seconds=20)
    assert text.count("Plan(") == 1
    assert len(text) < 600, text
    made: dict = {"Script": Script, "Setting": Setting, "Plan": Plan, "play": play}
    exec(text, made)  # noqa: S102 - it is what a reader would paste
    with pytest.raises(AssertionError, match=r"still alive|leases are left|gave its lease back"):
        made[f"test_schedule_{number}"](tools)
    monkeypatch.undo()
    made[f"test_schedule_{number}"](tools)


def test_a_schedule_that_holds_is_not_shrunk(tools):
    assert "does not fail" in shrunk(0, tools)


def _fails(number, tools):
    try:
        run(number, tools)
    except AssertionError:
        return True
    return False
