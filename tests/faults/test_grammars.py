"""Kind O: what a grammar allows is all that its row says, and a grammar that fails ends its row."""

import numpy as np
import pytest

from oarlock.core import Request
from oarlock.core.constraints import Matcher
from oarlock.core.errors import ConstraintFailed

EOS = 63
SCRIPTS = {1: [10, 11, 12, 13], 2: [20, 21, 22, 23], 9: [50, 51, 52, 53], 8: [EOS]}


class Counting:
    """Allows the ids from 30 on, one after the other, and its end from ``least`` of them on; ``fails`` at a count of tokens."""

    def __init__(self, least=4, fails=None, at=None):
        self.least, self.fails, self.at = least, fails, at
        self.taken, self.heard = [], []

    def _fail(self, how):
        if self.fails == how and len(self.taken) == self.at:
            raise LookupError(how)

    terminated = False

    def accept(self, token):
        self.heard.append(token)
        self._fail("accept")
        self.taken.append(token)

    def ready(self):
        self._fail("ready")

    def mask(self):
        mask = np.arange(64) == 30 + len(self.taken)
        mask[EOS] = len(self.taken) >= self.least
        return mask & (self.fails != "empty" or len(self.taken) != self.at)

    def forced(self):
        return ()

    def rollback(self, n):
        del self.taken[-n:]


def counting(*prompt, n=12, **spec):
    return Request(prompt_ids=prompt, max_tokens=n, constraint={"counting": spec})


def said(first, n):
    return tuple((SCRIPTS[first] * n)[:n])


def run(bench, asked, **settings):
    """Its outcomes beside two rows that are free, the recorders, and the engine."""
    grammar = bench.Grammar(Counting)
    engine = bench.engine(bench.Scripted(SCRIPTS), bench.Words({}, eos=[EOS]), plugins=[grammar], **settings)
    outcomes = engine.generate([bench.ask(1, n=12), *asked, bench.ask(2, n=12)], return_errors=True)
    assert [outcomes[0].token_ids, outcomes[-1].token_ids] == [said(1, 12), said(2, 12)]
    return outcomes[1:-1], grammar.opened, engine


# --- O-02 ----------------------------------------------------------------------------------------------------------


def check_a_grammar_that_fails_ends_its_row(bench, how, at, pipeline):
    told = []
    request = Request(
        prompt_ids=[9], max_tokens=40, constraint={"counting": {"fails": how, "at": at, "least": 50}},
        on_token=lambda event: told.append(event.token),
    )  # fmt: skip
    (outcome,), _, engine = run(bench, [request], pipeline=pipeline)
    assert isinstance(outcome, ConstraintFailed)
    assert told == list(range(30, 30 + at))
    assert engine.stats()["active_rows"] == 0


@pytest.mark.fault("O-02")
@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("how", ["accept", "ready", "empty"])
def test_a_grammar_that_fails_ends_its_row(bench, how, at, pipeline):
    check_a_grammar_that_fails_ends_its_row(bench, how, at, pipeline)


@pytest.mark.fault("O-02", twin=True)
@pytest.mark.parametrize("how", ["ready", "empty"])
def test_twin_a_grammar_that_lets_its_row_run_free_is_noticed(bench, planted, monkeypatch, how):
    allowed = Matcher.allowed

    def open_wide(self, sampled, width):
        try:
            return allowed(self, sampled, width)
        except ConstraintFailed:
            self.error = None
            return np.ones(width, dtype=bool)

    monkeypatch.setattr(Matcher, "allowed", open_wide)
    with planted():
        check_a_grammar_that_fails_ends_its_row(bench, how, 3, True)


# --- O-04 ----------------------------------------------------------------------------------------------------------


def check_each_token_is_heard_once(bench, pipeline):
    """Of rows that join one after the other, one of which begins with a stored prefix and one of which is cancelled."""
    grammar, model = bench.Grammar(Counting), bench.Scripted(SCRIPTS)
    store = {"name": "memory", "publish_min_tokens": 2}
    engine = bench.engine(model, plugins=[grammar], state_cache=store, pipeline=pipeline, prefill_chunk=2)
    failing = [6]

    def once(ids, cache):
        failing[0] -= 1
        if not failing[0]:
            raise RuntimeError("once")

    model.before = once
    prompt = [9, 9, 9, 9, 9]
    handles = []
    for asked in (counting(*prompt), bench.ask(1, n=12), counting(*prompt, n=7), counting(*prompt, 9, n=9)):
        handles.append(engine.submit(asked))
        for _ in range(4):
            engine.step()
    handles[0].cancel()
    results = [handle.result() for handle in handles]
    assert results[1].token_ids == said(1, 12)
    for result, heard in zip((results[0], *results[2:]), grammar.opened, strict=True):
        assert result.token_ids == tuple(range(30, 30 + len(result.token_ids)))
        assert heard.heard == list(result.token_ids)
    assert engine.stats()["recoveries"] == 1


@pytest.mark.fault("O-04")
@pytest.mark.parametrize("pipeline", [True, False])
def test_each_token_is_heard_once_and_the_prompt_never(bench, pipeline):
    check_each_token_is_heard_once(bench, pipeline)


@pytest.mark.fault("O-04", twin=True)
def test_twin_a_token_that_is_heard_twice_is_noticed(bench, planted, monkeypatch):
    def again(self, place, token):
        self._accept(token)

    monkeypatch.setattr(Matcher, "follow", again)
    with planted(ConstraintFailed):
        check_each_token_is_heard_once(bench, True)


@pytest.mark.fault("O-04", twin=True)
def test_twin_a_prompt_that_is_heard_is_noticed(bench, planted, monkeypatch):
    restart = Matcher.restart
    monkeypatch.setattr(Matcher, "restart", lambda self, tokens: restart(self, [9, 9, 9, 9, 9, *tokens]))
    with planted(ConstraintFailed):
        check_each_token_is_heard_once(bench, True)


# --- O-05 ----------------------------------------------------------------------------------------------------------


def check_the_end_comes_last(bench, pipeline, least):
    """A model that would end at once, everywhere."""
    (outcome,), _, _ = run(bench, [counting(8, least=least)], pipeline=pipeline)
    assert outcome.token_ids == tuple(range(30, 30 + least))
    assert str(outcome.finish_reason) == "stop"
    assert outcome.usage.generated_tokens == least + 1


@pytest.mark.fault("O-05")
@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("least", [1, 2, 6])
def test_the_end_token_is_not_allowed_before_the_end(bench, pipeline, least):
    check_the_end_comes_last(bench, pipeline, least)


@pytest.mark.fault("O-05", twin=True)
def test_twin_an_end_that_is_always_allowed_is_noticed(bench, planted, monkeypatch):
    allowed = Matcher.allowed
    monkeypatch.setattr(Matcher, "allowed", lambda self, *given: allowed(self, *given) | (np.arange(64) == EOS))
    with planted():
        check_the_end_comes_last(bench, True, 4)
