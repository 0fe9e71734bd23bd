"""Who is guilty when a forward fails: in place, then halves. Against a bound model that fails when it is told to."""

from __future__ import annotations

import math
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

import attrs
import mlx.core as mx
import pytest

from oarlock.core.errors import CompositionError
from oarlock.core.forward import ForwardFailed, forward
from oarlock.core.recovery import Recovery
from oarlock.layouts.full import FullCache


class Model:
    """Raises while a row of ``guilty`` takes part, or whatever ``fails`` says; a row is its token."""

    def __init__(self, guilty=(), fails=lambda tokens: False):
        self.guilty, self.fails, self.seen = set(guilty), fails, []

    def __call__(self, ids, cache):
        tokens = ids[:, 0].tolist()
        self.seen.append(tokens)
        cache[0].update_and_fetch(ids[:, None, :, None].astype(mx.float32), ids[:, None, :, None].astype(mx.float32))
        if self.guilty & set(tokens) or self.fails(tokens):
            raise OSError(*sorted(self.guilty & set(tokens)))
        return ids


@attrs.define
class Bound:
    """What `forward` needs of a bound model: one that takes ragged rows."""

    model: Model
    verdict: object = SimpleNamespace(ragged=True)
    adapters: object = SimpleNamespace(applied=lambda _: nullcontext())
    tap: object = SimpleNamespace(watching=lambda *_: nullcontext(), settled=lambda *_: None)


@attrs.define
class Row:
    id: str


class Group:
    """Rows numbered from 0, a step that forwards them all, and a rejection that drops them."""

    def __init__(self, model, size):
        self.tokens, self.rejected, self.steps = list(range(size)), {}, 0
        self.cache = FullCache(size)
        self.cache.add(size)
        self.recovery = Recovery(Bound(model))

    def step(self):
        ids = mx.array([[token] for token in self.tokens], dtype=mx.uint32)
        widths = [1] * len(self.tokens)
        forward(self.recovery.bound, [self.cache], ids, widths)
        self.cache.commit(widths)
        self.steps += 1

    def reject(self, guilty):
        places = [i for i in range(len(self.tokens)) if i not in guilty]
        self.rejected |= {self.tokens[place]: error for place, error in guilty.items()}
        self.cache.keep(places)
        self.tokens = [self.tokens[i] for i in places]

    def run(self):
        self.recovery.run(self.step, lambda: [Row(f"r{token}") for token in self.tokens], self.reject)


def test_a_step_that_fails_once_is_repeated_in_place():
    """DESIGN 7.3: nobody pays, nothing is computed again."""
    model = Model(fails=lambda tokens: len(model.seen) == 1)
    group = Group(model, 3)
    group.run()
    assert (group.steps, group.rejected) == (1, {})
    assert (group.recovery.recoveries, group.recovery.retries) == (1, 1)
    assert group.cache.tokens == (1, 1, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
def test_the_guilty_row_is_found_in_few_retries(size):
    """DESIGN 7: at most 2 * log2(B) + 1 retries per guilty row, and the others take their step."""
    for guilty in range(size):
        group = Group(Model({guilty}), size)
        group.run()
        assert list(group.rejected) == [guilty]
        assert group.rejected[guilty].args == (guilty,)
        assert group.recovery.retries <= 2 * math.ceil(math.log2(size)) + 1
        assert group.steps == (size > 1)
        assert sorted(group.tokens) == [i for i in range(size) if i != guilty]
        assert group.cache.tokens == (1,) * (size - 1)


def test_several_guilty_rows_are_found_together():
    """Each gets its own error; the bound holds per guilty row."""
    group = Group(Model({1, 4, 6}), 8)
    group.run()
    assert {token: error.args for token, error in group.rejected.items()} == {1: (1,), 4: (4,), 6: (6,)}
    assert group.recovery.retries <= 3 * 7
    assert group.tokens == [0, 2, 3, 5, 7]


def test_rows_that_fail_only_together_stop_with_an_error():
    """DESIGN 7.4: never a loop."""
    group = Group(Model(fails=lambda tokens: len(tokens) > 2), 3)
    with pytest.raises(CompositionError) as caught:
        group.run()
    assert caught.value.request_ids == ("r0", "r1", "r2")
    assert isinstance(caught.value.cause, OSError)
    assert group.steps == 0


def test_two_forwards_of_one_step_may_each_fail_once():
    """A prefill advance has several: the second failure is not the first one again."""
    model = Model(fails=lambda tokens: len(model.seen) in (1, 3))
    group = Group(model, 2)
    done = []

    def two():
        while len(done) < 2:
            group.step()
            done.append(group.cache.tokens)

    group.recovery.run(two, lambda: [Row(f"r{token}") for token in group.tokens], group.reject)
    assert done == [(1, 1), (2, 2)]
    assert (group.recovery.recoveries, group.rejected) == (2, {})


def test_what_is_no_forwards_error_is_raised():
    """The driver decides about it."""
    group = Group(Model(), 2)

    def broken():
        raise KeyError("other")

    with pytest.raises(KeyError):
        group.recovery.run(broken, lambda: [Row("r0")], group.reject)
    assert group.recovery.retries == 0


def test_a_row_that_is_found_keeps_its_own_traceback():
    """The error still says where it was raised, and it is the original, not ours."""
    group = Group(Model({0}), 2)
    group.run()
    assert not isinstance(group.rejected[0], ForwardFailed)
    assert "__call__" in "".join(traceback.format_tb(group.rejected[0].__traceback__))
