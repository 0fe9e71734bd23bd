"""The soak runs, counts what ended, and finds what grows."""

import itertools

import pytest


@pytest.fixture
def soak(load):
    return load("soak")


def run(soak, layout="full"):
    ticks = itertools.count()
    return soak.run(soak.models.tiny(), 40, 160, {"full": layout}, "64KiB", clock=lambda: float(next(ticks)))


@pytest.mark.parametrize("layout", ["full", "paged"])
def test_it_ends_and_says_what_was_held(soak, layout):
    found = run(soak, layout)
    assert found["requests"] > 5
    assert len(found["samples"]) == 9
    assert found["growth"]["active"] <= soak.GROWTH


def test_an_engine_that_keeps_arrays_is_found(soak, monkeypatch):
    """The twin."""
    kept = []
    step = soak.Engine.step

    def keeping(engine):
        kept.append(soak.mx.zeros((200, 200)) + 1)
        soak.mx.eval(kept[-1])
        return step(engine)

    monkeypatch.setattr(soak.Engine, "step", keeping)
    assert run(soak)["growth"]["active"] > soak.GROWTH
