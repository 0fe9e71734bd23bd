"""How much of a prompt fits between two steps, by a clock that forwards move themselves."""

from __future__ import annotations

import itertools
import random

import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.pace import Pace
from oarlock.core.testing import models

BOUND = 0.05


class Device:
    """A clock that only forwards move: each takes ``fixed + each * tokens`` seconds."""

    def __init__(self, fixed, each):
        self.now, self.fixed, self.each = 100.0, fixed, each

    def forward(self, tokens):
        self.now += self.fixed + self.each * tokens

    def most(self, bound):
        return (bound - self.fixed) / self.each


def advance(pace, device, rows=1):
    """Advance as a cohort does; return the seconds that it took."""
    began = device.now
    pace.start()
    while True:
        tokens = rows * max(1, pace.tokens() // rows)
        pace.before()
        device.forward(tokens)
        pace.after(tokens)
        if pace.tokens() < rows:
            return device.now - began


def test_nothing_is_known_at_first_and_one_token_fits():
    pace = Pace(BOUND, lambda: 1.0)
    pace.start()
    assert pace.tokens() == 1


def test_no_advance_takes_longer_than_the_bound_once_two_widths_were_seen():
    """Whatever a forward and a token cost, where one token a row fits at all; and most of the time is used."""
    rng = random.Random(3)
    for _ in range(300):
        device = Device(rng.choice((0.0, 0.001, 0.02)), 10 ** rng.uniform(-4, -2.5))
        rows = rng.randint(1, 3)
        pace = Pace(BOUND, lambda device=device: device.now)
        for tokens in (rng.randint(2, 4000), 1):  # a prompt that nobody waited for: its chunk and its last token
            pace.before()
            device.forward(tokens)
            pace.after(tokens)
        taken = [advance(pace, device, rows) for _ in range(20)]
        assert max(taken) <= BOUND * (1 + 1e-6)
        assert min(taken) > BOUND - device.fixed - 2 * rows * device.each


def test_from_a_single_token_it_grows_without_ever_going_beyond():
    """A part of the work takes at least that part of the time: growing by the ratio is safe with one width seen."""
    for fixed in (0.0, 0.004, 0.02):
        device = Device(fixed, 0.0002)
        pace = Pace(BOUND, lambda device=device: device.now)
        taken = [advance(pace, device) for _ in range(12)]
        assert max(taken) <= BOUND * (1 + 1e-6)
        pace.start()
        assert pace.tokens() > 0.9 * device.most(BOUND) - 1


def test_it_follows_a_device_that_slows_down():
    """Long contexts cost more a token: after some advances the bound holds again."""
    device = Device(0.0, 0.0002)
    pace = Pace(BOUND, lambda: device.now)
    for _ in range(60):
        advance(pace, device)
    device.each *= 5
    taken = [advance(pace, device) for _ in range(12)]
    assert taken[0] > BOUND
    assert max(taken[-3:]) <= 1.05 * BOUND


# --- in an engine ----------------------------------------------------------------------------------------------

PROMPT = [(7 * i) % 90 + 1 for i in range(90)]


class Steps:
    """Notes the device's time at the end of every step that had running rows."""

    def __init__(self, device):
        self.device, self.ends = device, []

    @hookimpl
    def step_finished(self, step):
        if step.decode_ids:
            self.ends.append(self.device.now)


def waits(bound, layout, tail_split, patch):
    """Let prompts join a running row; return the times between its steps, and all tokens."""
    model, device = models.build("tiny-full", head_dim=32), Device(0.002, 0.001)
    steps, forward = Steps(device), type(model).__call__

    def timed(self, ids, *given, **named):
        device.forward(ids.size)
        return forward(self, ids, *given, **named)

    scheduler = {"stall_bound_ms": bound, "prefill_chunk": 64, "tail_split": tail_split}
    config = {"scheduler": scheduler, "layouts": {"full": layout}}
    with Engine(model, config=config, plugins=[steps]) as engine:
        patch.setattr(type(model), "__call__", timed)
        engine._driver.group.pace.clock = lambda: device.now
        first = engine.submit(Request(prompt_ids=PROMPT[:40], max_tokens=60))
        while len(steps.ends) < 2:
            engine.step()
        others = [engine.submit(Request(prompt_ids=PROMPT[at:], max_tokens=4)) for at in (0, 60, 3)]
        tokens = [handle.result().token_ids for handle in (first, *others)]
    return [after - before for before, after in itertools.pairwise(steps.ends)], tokens


@pytest.mark.parametrize("tail_split", [True, False])
@pytest.mark.parametrize("layout", ["full", "paged", {"name": "delayed", "start": 37, "bits": 8, "group_size": 32}])
def test_a_running_row_waits_no_longer_than_the_bound_for_a_joiner(monkeypatch, layout, tail_split):
    """What lies between two of its steps is one advance and the step itself; everybody's tokens stay the same."""
    runs = {}
    for bound in (0, 1e3 * BOUND):
        with monkeypatch.context() as patch:
            runs[bool(bound)] = waits(bound, layout, tail_split, patch)
    step = 0.002 + 4 * 0.001  # at most four rows
    assert max(runs[True][0]) <= BOUND + step + 1e-6
    assert max(runs[False][0]) > BOUND + step  # what the bound prevents
    assert runs[True][1] == runs[False][1]
