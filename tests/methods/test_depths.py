"""The choice of depths on simulated machines: it finds what pays, loses next to nothing where nothing does, and forgets."""

import random

import pytest

from oarlock.methods.depths import LONGEST_PAUSE, TRIES, Depths, Fixed

MOST = 8


class Machine:
    """Steps that take ``fixed + each * tokens`` seconds, of rows that accept a draft with their own probability."""

    def __init__(self, fixed, each, depths=None, seed=0):
        self.now, self.fixed, self.each = 0.0, fixed, each
        self.rng = random.Random(seed)
        self.depths = depths or Depths(MOST, clock=lambda: self.now)
        self.tokens, self.widths, self.delay = 0, [], 0.0
        self.drafted = {}

    def step(self, rates, limit=MOST):
        """One step of these rows, name to probability."""
        rows = list(rates)
        self.depths.start()
        chosen = self.depths.choose(rows, [limit] * len(rows))
        assert chosen == self.depths.choose(rows, [limit] * len(rows)), "choosing changes nothing"
        assert max(chosen) <= min(limit, MOST)
        width = 1 + max(chosen)
        self.now += self.fixed + self.each * len(rows) * width + self.delay
        accepted = [self._accepted(rates[row], depth) for row, depth in zip(rows, chosen, strict=True)]
        if width > 1:
            self.depths.verified(rows, chosen, accepted)
        else:
            self.depths.passed()
        self.depths.stop(len(rows), width)
        self.tokens += len(rows) + sum(accepted)
        self.widths.append(width)
        for row, depth in zip(rows, chosen, strict=True):
            self.drafted.setdefault(row, []).append(depth)

    def _accepted(self, rate, depth):
        return next((i for i in range(depth) if self.rng.random() >= rate), depth)

    def run(self, rates, steps):
        """Return tokens a second over so many steps."""
        tokens, began = self.tokens, self.now
        for _ in range(steps):
            self.step(rates)
        return (self.tokens - tokens) / (self.now - began)

    def plain(self, rows):
        return rows / (self.fixed + self.each * rows)


def best_fixed(fixed, each, rates):
    """The speed of the best single depth for all rows."""
    speeds = []
    for depth in range(1, MOST + 1):
        machine = Machine(fixed, each, Fixed(depth))
        speeds.append(machine.run(rates, 1500))
    return max(speeds)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rows_that_repeat_themselves_run_nearly_as_fast_as_the_best_depth(rows):
    rates = dict.fromkeys(range(rows), 0.95)
    machine = Machine(1.0, 0.05)
    speed = machine.run(rates, 600)
    assert speed >= 0.9 * best_fixed(1.0, 0.05, rates)
    assert speed > 1.5 * machine.plain(rows)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1])
def test_rows_that_never_repeat_themselves_lose_next_to_nothing(rows, rate):
    """The worst case: there is always a draft, and a window is dear."""
    machine = Machine(1.0, 0.05)
    assert machine.run(dict.fromkeys(range(rows), rate), 2000) >= 0.97 * machine.plain(rows)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
def test_a_window_that_costs_more_than_it_gains_is_not_made(rate):
    """Every token takes a whole step's time: no rate below 1 pays."""
    machine = Machine(0.0, 1.0)
    assert machine.run(dict.fromkeys(range(4), rate), 3000) >= 0.97 * machine.plain(4)


def test_it_never_does_much_worse_than_plain_steps_whatever_the_machine():
    draw = random.Random(5)
    for case in range(20):
        fixed, each, count = draw.random(), draw.random() * 0.5 + 0.01, draw.randint(1, 8)
        rates = {row: draw.random() for row in range(count)}
        machine = Machine(fixed, each, seed=case)
        assert machine.run(rates, 2000) >= 0.95 * machine.plain(count), (fixed, each, rates)


def test_rows_beside_each_other_get_depths_of_their_own():
    machine = Machine(1.0, 0.02)
    machine.run({"again": 0.97, "never": 0.02}, 400)
    last = {row: sum(depths[-200:]) / 200 for row, depths in machine.drafted.items()}
    assert last["again"] > 4
    assert last["never"] < 0.5


def test_a_row_that_begins_to_repeat_itself_is_found():
    machine = Machine(1.0, 0.05)
    machine.run({"row": 0.0}, 1000)
    assert machine.widths[-LONGEST_PAUSE:].count(1) >= LONGEST_PAUSE - 2
    machine.run({"row": 1.0}, 12 * LONGEST_PAUSE)
    assert sum(machine.widths[-50:]) / 50 > 4


def test_one_delay_does_not_end_it():
    """The first windows of a width may wait for a compiler or a busy machine."""
    machine = Machine(1.0, 0.05)
    machine.run({"row": 0.95}, 1)
    machine.delay = 100.0
    machine.run({"row": 0.95}, TRIES - 1)
    machine.delay = 0.0
    machine.run({"row": 0.95}, 100)
    assert sum(machine.widths[-50:]) / 50 > 4


def test_nothing_is_drafted_before_a_plain_step_was_measured():
    depths = Depths(MOST)
    assert depths.choose(["row"], [MOST]) == [0]
    depths.start()
    depths.stop(1, 1)
    assert depths.choose(["row"], [MOST])[0] > 0


def test_limits_are_kept_and_rows_forgotten():
    machine = Machine(1.0, 0.01)
    for _ in range(50):
        machine.step({"row": 1.0}, limit=2)
    assert max(machine.widths) == 3
    assert machine.depths.choose(["row", "other"], [0, 0]) == [0, 0]
    before = machine.depths.choose(["row"], [MOST])
    machine.depths.drop(["row", "never heard of"])
    assert machine.depths.choose(["row"], [MOST]) < before


def test_a_depth_of_none_is_none():
    machine = Machine(1.0, 0.01, Depths(0))
    machine.run({"row": 1.0}, 20)
    assert set(machine.widths) == {1}
    assert Fixed(3).choose(["a", "b", "c"], [5, 1, 0]) == [3, 1, 0]


# --- tokens that are certain -----------------------------------------------------------------------------------------


def learnt(fixed, each, rows, limits):
    """What is chosen of ``limits`` after as many steps as it takes to know what they cost, and how wide those were."""
    now, widths = [0.0], []
    depths = Depths(16, clock=lambda: now[0])
    for _ in range(100):
        depths.start()
        chosen = depths.certain(limits)
        assert all(n <= limit for n, limit in zip(chosen, limits, strict=True))
        width = 1 + max(chosen)
        now[0] += fixed + each * rows * width
        depths.stop(rows, width)
        widths.append(width)
    return chosen, widths


def test_certain_tokens_are_all_taken_where_a_step_takes_as_long_whatever_its_width():
    assert learnt(1.0, 0.001, 4, [16, 0, 3, 9])[0] == [16, 0, 3, 9]


def test_certain_tokens_of_one_row_are_not_worth_what_the_others_wait_for_them():
    """Where each token costs, eight rows would pay for the sixteen of one; it is tried a few times, and no more."""
    chosen, widths = learnt(0.01, 1.0, 8, [16, *[0] * 7])
    assert chosen == [0] * 8
    assert sum(width > 1 for width in widths) <= TRIES


def test_of_certain_tokens_as_many_are_taken_as_pay():
    """Two of four rows know tokens, so a window of a few is worth its time where a wide one is not."""
    fixed, each = 1.0, 0.2
    chosen, _ = learnt(fixed, each, 4, [16, 16, 0, 0])
    speeds = [(4 + 2 * depth) / (fixed + each * 4 * (1 + depth)) for depth in range(17)]
    depth = max(chosen)
    assert speeds[depth] >= 0.98 * max(speeds)
    assert chosen == [depth, depth, 0, 0]


def test_nothing_is_certain_before_a_plain_step_was_seen_and_rates_are_left_alone():
    depths = Depths(4)
    assert depths.certain([3, 1]) == [0, 0]
    depths.start()
    depths.stop(2, 1)
    before = dict(depths._rates)
    assert depths.certain([3, 1]) == [3, 1]
    assert depths._rates == before
    assert Fixed(2).certain([3, 1]) == [2, 1]
