"""SPEC 15.A: what a grouped method may rely on, seen by a method that notes what is asked of it."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest
from harness.model import VOCABULARY, StubModel, next_token

from oarlock.core import FinishReason, Request, hookimpl
from oarlock.core.contracts.method import Drawn
from oarlock.core.engine import Engine
from oarlock.core.errors import CompositionError


@attrs.define
class Options:
    """None."""


@attrs.define(eq=False)
class Tiny:
    """A method of its own: no register and no pipeline; it draws on the host and notes every call.

    ``fails``: what `advance` raises, once.
    """

    name: str = "tiny"
    options: type = Options
    notes: list = attrs.field(factory=list)
    opened: list = attrs.field(factory=list)
    fails: BaseException | None = None

    def open(self, host, options):
        self.notes.append("open")
        self.opened.append(TinyGroup(self, host))
        return self.opened[-1]


class TinyGroup:
    """Its rows' caches, and the host that it is lent."""

    window = 1

    def __init__(self, method, host):
        self.method, self.host, self.held = method, host, []

    @property
    def running_tokens(self):
        return len(self.host.rows)

    def note(self, what):
        self.method.notes.append((what, tuple(row.id for row in self.host.rows)))

    def join(self, row, caches, first=None):
        self.note(f"join {row.id}")
        assert first is None
        if not self.host.rows:
            self.held = list(caches)
            return
        for cache, other in zip(self.held, caches, strict=True):
            cache.join(other, [len(self.host.rows)])

    def advance(self, work=None):
        self.note("advance")
        rows = self.host.rows
        ids = mx.array([[row.current] for row in rows], dtype=mx.uint32)
        scores = self.host.forward(self.held, ids, [1] * len(rows))
        self.host.settle(self.held, ids, [1] * len(rows), [1] * len(rows))
        error, self.method.fails = self.method.fails, None
        if error is not None:
            raise error
        for row, token in zip(list(rows), mx.argmax(scores[:, -1], axis=-1).tolist(), strict=True):
            row.fed.append(row.current)
            row.sampled += 1
            self.host.emit(row, Drawn(token))
        self.note("emitted")
        self.host.retire()
        self.note("retired")

    def flush(self):
        self.note("flush")

    def keep(self, indices, discard):
        self.note(f"keep {list(indices)}")
        if indices:
            for cache in self.held:
                cache.keep(indices)
        else:
            self.held = []

    def abort(self):
        self.note("abort")
        self.held = []

    def caches(self):
        return self.held

    def close(self):
        self.note("close")


@attrs.define(eq=False)
class Plugin:
    method: Tiny

    @hookimpl
    def register_methods(self, register):
        register(self.method)


@pytest.fixture
def method():
    return Tiny()


@pytest.fixture
def engine(method):
    config = {"scheduler": {"verify": False}, "method": {"name": "tiny"}}
    with Engine(StubModel(), config=config, plugins=[Plugin(method)]) as engine:
        yield engine


def ask(start, tokens, **fields):
    return Request(id=f"r{start}", prompt_ids=[start, 5], max_tokens=tokens, **fields)


def alone(start, tokens):
    history = [start, 5]
    for _ in range(tokens):
        history.append(next_token(history))
    return tuple(history[2:])


def test_rows_of_a_foreign_method_get_their_own_tokens(engine):
    """15.1, 15.4: the core lends the cohort and the group; the method only advances."""
    results = engine.generate([ask(i, 3 + 2 * i) for i in range(4)])
    assert [result.token_ids for result in results] == [alone(i, 3 + 2 * i) for i in range(4)]
    assert engine.stats()["kv_bytes"] == 0


def test_rows_are_old_while_keep_runs_and_shrink_afterwards(engine, method):
    """15.6, trap 45; 15.2: the host's retire enters the method once, which filters nothing by itself."""
    engine.generate([ask(1, 2), ask(2, 4), ask(3, 4)])
    at = next(i for i, note in enumerate(method.notes) if note[0].startswith("keep"))
    assert method.notes[at - 1] == ("emitted", ("r1", "r2", "r3"))
    assert method.notes[at] == ("keep [2, 1]", ("r1", "r2", "r3"))  # the last row moves into the hole
    assert method.notes[at + 1] == ("retired", ("r3", "r2"))
    assert method.notes[-3:] == [("emitted", ("r3", "r2")), ("keep []", ("r3", "r2")), ("retired", ())]


def test_a_join_is_flushed_first_and_the_row_is_listed_last(engine, method):
    """7.1, 7.8, 15.2."""
    first = engine.submit(ask(1, 8))
    engine.step()
    engine.step()
    second = engine.submit(ask(2, 2))
    while not second.done:
        engine.step()
    at = method.notes.index(("join r2", ("r1",)))
    assert method.notes[at - 1] == ("flush", ("r1",))
    assert ("advance", ("r1", "r2")) in method.notes[at:]
    assert first.result().token_ids == alone(1, 8)


def test_a_method_is_reused_and_closed_with_the_engine(engine, method):
    """4.10, trap 46: it survives the empty batch, and is closed once."""
    for start in range(3):
        engine.generate([ask(start, 2)])
        engine.step()
    assert method.notes.count("open") == 1
    engine.close()
    engine.close()
    assert [note for note in method.notes if note[0] == "close"] == [("close", ())]


def test_another_key_closes_it_and_the_next_opens_a_new_one(engine, method):
    """4.10: disposed when a row of another method is admitted to the empty group."""
    engine.generate([ask(1, 2), ask(2, 2, method="plain"), ask(3, 2)])
    assert method.notes.count("open") == 2
    closed = method.notes.index(("close", ()))
    assert method.notes[closed + 1] == "open"


def test_an_error_of_advance_that_does_not_come_back_costs_nobody(engine, method):
    """15.9, DESIGN 7.4: everything is computed again, who is preparing too, and the method stays open."""
    handles = [engine.submit(ask(i, 6)) for i in (1, 2)]
    while engine.stats()["active_rows"] < 2:
        engine.step()
    method.fails = KeyError("mine")
    late = engine.submit(Request(prompt_ids=[3, *[5] * 8], max_tokens=1, prefill_chunk=2))  # still preparing
    while not late.done:
        engine.step()
    assert [handle.result().token_ids for handle in handles] == [alone(1, 6), alone(2, 6)]
    assert engine.stats()["recoveries"] == 1
    assert late.result().token_ids == (next_token([3, *[5] * 8]),)
    assert method.notes.count("open") == 1
    assert ("abort", ()) in method.notes


def test_a_forward_that_fails_is_repeated_with_the_same_rows(engine, method):
    """DESIGN 7.3: advance is called again; the caches are as before, so no token is lost or doubled."""
    model, calls = engine.bound.model, []

    def before(cache, ids):
        calls.append(list(ids.shape))
        if len(calls) == 4:
            raise OSError("once")

    model.before = before
    results = engine.generate([ask(1, 5), ask(2, 5)])
    assert [result.token_ids for result in results] == [alone(1, 5), alone(2, 5)]
    assert engine.stats()["recoveries"] == 1
    assert len([note for note in method.notes if note == ("advance", ("r1", "r2"))]) == 5  # four steps, one twice


def test_rows_that_only_fail_together_are_told_so(engine):
    """DESIGN 7.4: nobody is guilty alone; an error that says so, never a loop, and the engine goes on."""
    model = engine.bound.model

    def before(cache, ids):
        if ids.shape[0] == 2 and cache[0].tokens[0] > 2:
            raise OSError("not together")

    model.before = before
    outcomes = engine.generate([ask(1, 5), ask(2, 5)], return_errors=True)
    assert [type(outcome) for outcome in outcomes] == [CompositionError] * 2
    assert outcomes[0].request_ids == ("r1", "r2")
    assert isinstance(outcomes[0].cause, OSError)
    assert engine.generate([ask(3, 2)])[0].token_ids == alone(3, 2)


def test_finish_ends_a_row_without_another_token(engine, method):
    """15.2: host.finish, then retire."""
    handle = engine.submit(ask(1, 9))
    engine.step()
    group = method.opened[0]
    group.host.finish(group.host.rows[0], FinishReason.STOP)
    group.host.retire()
    assert handle.result().finish_reason == "stop"
    assert handle.result().token_ids == alone(1, 1)
    assert group.host.rows == []
    assert all(0 <= token < VOCABULARY for token in handle.result().token_ids)
