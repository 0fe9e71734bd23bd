"""Random operations on `rotating` beside a plain list of tokens per row: windows, sinks and slack of every size."""

import pytest

from oarlock.layouts.rotating import RotatingCache


def test_any_order_of_operations_holds(random_check, ring_kind):
    random_check(ring_kind)


@pytest.mark.long
def test_any_order_of_operations_holds_for_long(random_check, ring_kind):
    random_check(ring_kind, sequences=2000)


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
def test_a_broken_ring_is_found(random_check, ring_kind, broken):
    """The twins: the same sequences on rings with one fault each."""
    with pytest.raises(AssertionError):
        random_check(lambda *args: ring_kind(*args, cache_type=broken))
