"""Random operations on `rotating` beside a plain list of tokens per row: windows, sinks and slack of every size."""

import random

import pytest

from oarlock.layouts.rotating import RotatingCache

SEQUENCES, OPERATIONS = 100, 16


def operate(draw, rows, make):
    """Do one operation to both sides; every one leaves rows that must still be right."""
    count, slack = rows.cache.rows, rows.kind.slack
    chosen = draw.choice(["step"] * 5 + ["block", "join", "join", "add", "keep", "take", "restore", "compact", "abort"])
    if chosen == "join" or not count:
        lengths = [draw.choice([0, 1, 3, 7, 8, 9, 17, 40]) for _ in range(draw.randint(1, 3))]
        other = make(lengths, slack=draw.choice([0, slack, 4]))
        for _ in range(draw.choice([0, 0, 3])):
            other.step([1] * len(lengths))
        rows.join(other)
    elif chosen in {"step", "block"}:
        most = slack + 1 if chosen == "step" else slack + 8
        widths = [draw.randint(0, most) for _ in range(count)] if draw.random() < 0.6 else [most] * count
        widths[draw.randrange(count)] = max(1, *widths)
        rows.step(widths, [draw.randint(0, width) for width in widths] if draw.random() < 0.5 else None)
    elif chosen == "add":
        rows.add(draw.randint(1, 2))
    elif chosen == "keep":
        rows.keep(draw.sample(range(count), draw.randint(0, count)))
    elif chosen == "take":
        part = rows.take(draw.sample(range(count), draw.randint(1, count)))
        if part.cache is not rows.cache:
            part.step([1] * part.cache.rows)
            part.check()
    elif chosen == "restore":
        rows.join(rows.restored(draw.randrange(count)))
    elif chosen == "compact":
        rows.cache.compact()
    elif chosen == "abort":
        rows.forward([rows.tokens(width) for width in [draw.choice([1, 2, 9])] * count])
        rows.cache.commit([0] * count)


def check_random(cache_type, mirror, ring_kind, sequences=SEQUENCES):
    for seed in range(sequences):
        draw = random.Random(seed)
        window = draw.choice([1, 2, 4, 8])
        keep = draw.choice([0, 0, 0, min(2, window - 1)])

        def make(lengths=(), slack=0, window=window, keep=keep):
            kind = ring_kind(window, keep, slack, cache_type)
            made = mirror(kind=kind)
            made.join(mirror(lengths=lengths, kind=ring_kind(window, keep)))
            return made

        rows = make(slack=draw.choice([0, 0, 1, 4]))
        try:
            check_sequence(draw, rows, make)
        except (AssertionError, ValueError, IndexError) as error:
            msg = f"sequence {seed}, window {window}, keep {keep}: {type(error).__name__}: {error}"
            raise AssertionError(msg) from error


def check_sequence(draw, rows, make):
    for _ in range(OPERATIONS):
        if rows.cache.rows > 6:
            rows.keep(range(3))
        operate(draw, rows, make)
        assert rows.cache.tokens == tuple(map(len, rows.lists))
    if rows.cache.rows:
        rows.step([1] * rows.cache.rows)
    rows.check()


def test_any_order_of_operations_holds(mirror, ring_kind):
    check_random(RotatingCache, mirror, ring_kind)


@pytest.mark.long
def test_any_order_of_operations_holds_for_long(mirror, ring_kind):
    check_random(RotatingCache, mirror, ring_kind, 2000)


class KeepsAll(RotatingCache):
    def commit(self, kept):
        super().commit([self._written if n else 0 for n in kept])


class KeepsPhases(RotatingCache):
    """Moves rows, and leaves their phases where they were."""

    def keep(self, indices):
        before = self.ring
        super().keep(indices)
        self.ring = before.pick(range(len(indices)))


class JoinsAtOnePhase(RotatingCache):
    """Believes that joiners begin where its own first row does."""

    def join(self, other, slots):
        super().join(other, slots)
        if self.rows > other.rows:
            self.ring = self.ring.pick([*range(self.rows - other.rows), *[0] * other.rows])


class RelaysNothing(RotatingCache):
    """Takes rows of another slack as they are."""

    def _relaid(self, slack):
        return self


class ShortWindow(RotatingCache):
    """Sees one token too few."""

    def make_mask(self, N, return_array=False, window_size=None):
        return super().make_mask(N, return_array, max(1, self.ring.window - 1))


@pytest.mark.parametrize("broken", [KeepsAll, KeepsPhases, JoinsAtOnePhase, RelaysNothing, ShortWindow])
def test_a_broken_ring_is_found(mirror, ring_kind, broken):
    """The twins: the same sequences on rings with one fault each."""
    with pytest.raises(AssertionError):
        check_random(broken, mirror, ring_kind)
