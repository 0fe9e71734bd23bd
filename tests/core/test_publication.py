"""What a state cache is given: never a state with a column that the device failed over, and soon enough to be reused."""

import pytest

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.sampling import PendingDraw, SamplerGroup

CONFIG = {"scheduler": {"verify": False}, "state_cache": {"name": "keeping", "publish_min_tokens": 1}}


@pytest.fixture
def late_device(successor, failing_device, monkeypatch):
    """What was drawn before the failing forward can still be read: the error comes with what was dispatched behind."""
    draw, lost = SamplerGroup.draw, []

    def drawing(self, *given):
        made = draw(self, *given)
        lost.extend([made] if successor.device_failed else [])
        return made

    def failed(*what):
        drawn = isinstance(what[0], PendingDraw)
        return (not drawn or any(what[0] is each for each in lost)) and successor.take_error()

    monkeypatch.setattr(SamplerGroup, "draw", drawing)
    failing_device(failed)


@pytest.fixture
def serving(successor, keeping):
    """An engine of `successor` with a state cache that keeps everything."""
    with Engine(successor, config=CONFIG, plugins=[keeping]) as engine:
        yield engine, keeping


FIRST = {"prompt_ids": [1, 2, 3], "max_tokens": 20, "stop_token_ids": [9]}
WHOLE = (1, 2, 3, 4, 5, 6, 7, 8, 9)
"""What the first row's state covers: the stop token was fed before anyone had read it."""


def start(successor, engine, beside):
    successor.calls = 0
    handle = engine.submit(Request(**FIRST))
    other = engine.submit(Request(prompt_ids=[40, 41], max_tokens=30)) if beside else None
    return handle, other


def in_flight_at_the_end(successor, engine, beside):
    """Return the number of the forward that computes the last column of the first row's state."""
    handle, _ = start(successor, engine, beside)
    while not handle.done:
        engine.step()
    return successor.calls


@pytest.mark.parametrize("beside", [True, False], ids=["beside another", "alone"])
@pytest.mark.usefixtures("late_device")
def test_a_state_whose_last_column_failed_is_not_stored(successor, serving, beside):
    engine, store = serving
    last = in_flight_at_the_end(successor, engine, beside)
    while engine.step():
        pass
    assert WHOLE in store.tokens
    # After a rebuild nothing is fed before it was read.
    for failing, stored in ((last, []), (last - 1, [WHOLE[:-1]]), (last + 1, [WHOLE])):
        store.entries.clear()
        successor.fail_late = (failing,)
        handle, other = start(successor, engine, beside)
        assert handle.result().token_ids == WHOLE[3:-1]
        assert other is None or other.result().token_ids == tuple(range(42, 72))
        while engine.step():
            pass
        assert [held for held in (WHOLE, WHOLE[:-1]) if held in store.tokens] == stored, failing - last
    assert engine.stats()["recoveries"] == 2 + beside


@pytest.mark.parametrize("beside", [True, False], ids=["beside another", "alone"])
def test_who_goes_on_at_once_finds_the_state(successor, serving, beside):
    """Nobody has read the step behind the last token by then: it is read first."""
    engine, _ = serving
    handle, other = start(successor, engine, beside)
    while not handle.done:
        engine.step()
    again = engine.submit(Request(prompt_ids=[*WHOLE, 30], max_tokens=3)).result()
    assert again.usage.cached_tokens == len(WHOLE)
    assert again.token_ids == (31, 32, 33)
    assert other is None or other.result().token_ids == tuple(range(42, 72))


@pytest.mark.usefixtures("late_device")
def test_an_error_that_shows_when_a_state_is_waited_for_is_not_the_joiners(successor, serving):
    engine, store = serving
    last = in_flight_at_the_end(successor, engine, True)
    while engine.step():
        pass
    store.entries.clear()
    successor.fail_late = (last,)
    handle, other = start(successor, engine, True)
    while not handle.done:
        engine.step()
    again = engine.submit(Request(prompt_ids=[*WHOLE, 30], max_tokens=3)).result()
    assert again.usage.cached_tokens < len(WHOLE)
    assert again.token_ids == (31, 32, 33)
    assert other.result().token_ids == tuple(range(42, 72))


def test_a_boundary_is_stored_after_its_first_token_was_read(successor, keeping, monkeypatch):
    """A lone row's may wait for the next step: until then nothing says that its chunks were computed."""
    read, held = PendingDraw.read, []

    def reading(self):
        held.append((1, 2) in keeping.tokens)
        return read(self)

    monkeypatch.setattr(PendingDraw, "read", reading)
    config = CONFIG | {"scheduler": {"verify": False, "early_first_token": False}}
    with Engine(successor, config=config, plugins=[keeping]) as engine:
        engine.generate([Request(prompt_ids=[1, 2, 3], max_tokens=4)])
    assert held == [False, True, True, True]
    assert {(1, 2), (1, 2, 3, 4, 5, 6)} == keeping.tokens
