"""The kit on our methods."""

import attrs
import pytest

from oarlock.core.testing.methods import MethodContract
from oarlock.methods.plain import Plain, PlainDecoding


class TestPlain(MethodContract):
    method = "plain"


class TestFill(MethodContract):
    """Without constraints, where it has to be `plain`."""

    method = "fill"


class TestSpeculative(MethodContract):
    """With drafts wherever a token stood before, so that most of them are wrong."""

    method = "speculative"
    options = {"proposer": {"name": "ngram", "min_n": 1}, "depth": 3, "adaptive": False}  # noqa: RUF012 - as documented


# --- twins: a method with one fault each ----------------------------------------------------------------------


class DropsTheUnread(PlainDecoding):
    """Loses the register when a row joins."""

    def flush(self):
        self._register = None


class KeepsSorted(PlainDecoding):
    """Filters the register in another order than the caches."""

    def keep(self, indices, discard):
        register, self._register = self._register, None
        super().keep(indices, discard)
        self._register = register


class SettlesTwice(PlainDecoding):
    """A forward that fails has advanced its rows."""

    def _step(self, register, live):
        rows = self._host.rows
        for row in rows:
            row.sampled += 1
        drawn = super()._step(register, live)
        for row in rows:
            row.sampled -= 1
        return drawn


class Holds(PlainDecoding):
    """Never lets go of caches."""

    held: list = []  # noqa: RUF012 - the fault

    def close(self):
        self.held.append(self._caches)

    def abort(self):
        self.close()
        super().abort()


@attrs.frozen
class Planted(Plain):
    name: str = "planted"
    decoding: type = PlainDecoding

    def open(self, host, options):
        return self.decoding(host)


@pytest.mark.parametrize(
    ("decoding", "clause"),
    [
        (DropsTheUnread, "test_rows_join_and_leave_while_others_run"),
        (KeepsSorted, "test_rows_join_and_leave_while_others_run"),
        (SettlesTwice, "test_a_forward_that_fails_is_repeated"),
        (Holds, "test_everything_is_released"),
    ],
)
def test_the_clause_on_a_fault_breaks(decoding, clause):
    class Broken(MethodContract):
        method = Planted(decoding=decoding)

    wanted = (3,) if "join" in clause else ()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it breaks with
        getattr(Broken(), clause)("tiny-full", *wanted)
