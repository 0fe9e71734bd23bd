"""The method `fill` in engines: rows that know their next tokens beside rows that choose, and whatever ends or fails within a span."""

import itertools
import random

import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import ConstraintFailed, InvalidConfigValue, UnknownConfigKey
from oarlock.core.result import FinishReason
from oarlock.core.sampling import PendingDraw
from oarlock.core.testing import models
from oarlock.methods.plain import PlainDecoding

V, TOKENS, LENGTHS = 97, 24, (12, 3, 30, 1, 9)
PROMPTS = [tuple(prompt) for prompt in models.prompts(LENGTHS, V)]


def quick(values, *some):
    """Mark all but ``some`` of the values as long."""
    return [value if value in some else pytest.param(value, marks=pytest.mark.long) for value in values]


PIPELINE = pytest.mark.parametrize("pipeline", [True, False], ids=["pipelined", "direct"])


def text(*spans, gap=2):
    """Spans of so many fixed tokens, each behind ``gap`` free ones."""
    tokens = (11 + 5 * n % 80 for n in itertools.count())
    return [token for span in spans for token in (*[None] * gap, *itertools.islice(tokens, span))]


class Template:
    """Fixed tokens, and None where any may stand. ``fails``: what raises, once so many tokens were accepted."""

    def __init__(self, text, says=True, fails=()):
        self.text, self.says, self.fails, self.taken, self.heard = text, says, dict(fails), [], 0

    def _try(self, what):
        if self.fails.get(what) == len(self.taken):
            msg = f"no more of {what}"
            raise LookupError(msg)

    @property
    def terminated(self):
        return len(self.taken) >= len(self.text)

    def accept(self, token):
        self._try("accept")
        assert self.text[len(self.taken)] in (None, token)
        self.taken.append(token)
        self.heard += 1

    def ready(self):
        self._try("ready")

    def mask(self):
        only = self.text[len(self.taken)]
        return np.ones(V, dtype=bool) if only is None else np.arange(V) == only

    def forced(self):
        self._try("forced")
        return list(itertools.takewhile(lambda token: token is not None, self.text[len(self.taken) :] * self.says))

    def rollback(self, n):
        self.heard -= n
        del self.taken[-n:]


class Factory:
    """The constraint ``template``, and its plugin; ``opened`` are the matchers by request."""

    name = "template"

    def __init__(self, says=True):
        self.says, self.opened = says, {}

    def open(self, spec, tokenizer, request):
        made = self.opened[request.id] = Template(**{"says": self.says, **spec})
        return made

    @hookimpl
    def register_constraints(self, register):
        register(self)


@pytest.fixture(scope="module")
def tiny():
    return models.build("tiny-full")


@pytest.fixture
def filling():
    """Open engines with the method; what they were is closed with the test."""
    opened = []

    def make(model, method=(), identity="weights", **sections):
        factory = Factory()
        chosen = {"name": "fill", "adaptive": False, **dict(method)}
        scheduler = {"verify": False, **sections.pop("scheduler", {})}
        config = {"state_cache": {"name": "none"}, "method": chosen, "scheduler": scheduler, **sections}
        opened.append(Engine(model, config=config, plugins=[factory], identity=identity))
        opened[-1].factory = factory
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def ask(row, spec=None, **fields):
    constraint = None if spec is None else {"template": spec}
    return Request(
        **{"prompt_ids": PROMPTS[row], "max_tokens": TOKENS, "id": f"r{row}", "constraint": constraint, **fields}
    )


def alone(model, requests):
    """What each says in `plain`, by itself, where nobody knows anything beforehand."""
    config = {"scheduler": {"verify": False, "max_batch": 1}, "state_cache": {"name": "none"}}
    with Engine(model, config=config, plugins=[Factory(says=False)]) as engine:
        results = engine.generate(requests)
    assert not any(result.usage.forced_tokens for result in results)
    return results


def same(got, wanted):
    for one, two in zip(got, wanted, strict=True):
        assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason)
        assert one.usage.generated_tokens == two.usage.generated_tokens


def forwards(engine, monkeypatch):
    """The widths of what a group forwards from now on, row by row."""
    seen, forward = [], engine._driver.group.forward
    monkeypatch.setattr(engine._driver.group, "forward", lambda *given: seen.append(tuple(given[2])) or forward(*given))
    return seen


LONG, SHORT = {"text": text(9, 9)}, {"text": text(4, 4, 4, 4)}
THREE = [ask(0, LONG), ask(1), ask(4, SHORT)]


# --- fewer forwards --------------------------------------------------------------------------------------------------


@PIPELINE
def test_each_row_appends_what_it_knows(tiny, filling, monkeypatch, pipeline):
    """15.20: spans of their own lengths beside a row that takes its one token, in one forward."""
    engine = filling(tiny, scheduler={"pipeline": pipeline})
    seen = forwards(engine, monkeypatch)
    results = engine.generate(THREE)
    same(results, alone(tiny, THREE))
    three = {tuple(sorted(widths)) for widths in seen if len(widths) == 3}
    assert three <= {(1, 1, 1), (1, 1, 5), (1, 1, 10), (1, 5, 10)}
    assert {(1, 1, 10), (1, 5, 10)} & three
    assert [result.usage.forced_tokens for result in results] == [18, 0, 15]  # the limit's own token is drawn


@PIPELINE
def test_a_template_is_out_after_as_many_steps_as_it_has_choices(tiny, filling, pipeline):
    """Whoever stands beside it; without spans it takes a step a token."""
    steps = {}
    for span in (0, 16):
        engine = filling(tiny, {"span": span}, scheduler={"pipeline": pipeline})
        first, other = engine.submit(ask(0, LONG)), engine.submit(ask(1))
        steps[span] = 0
        while not first.done:
            engine.step()
            steps[span] += 1
        same([first.result(), other.result()], alone(tiny, [ask(0, LONG), ask(1)]))
    assert steps[0] >= 22
    assert steps[16] <= 8


@PIPELINE
@pytest.mark.parametrize("adaptive", [True, False])
def test_without_known_tokens_it_is_plain_decoding(tiny, filling, monkeypatch, pipeline, adaptive):
    """The same forwards in the same order, read when they are read there: with free rows, and with masks alone."""
    for spec in (None, {"text": [None] * TOKENS}):
        logs = []
        for method in ({"adaptive": adaptive}, {"name": "plain"}):
            chosen = {"name": "fill", **method} if "name" not in method else method
            config = {"method": chosen, "scheduler": {"verify": False, "pipeline": pipeline}}
            log, step, read = [], PlainDecoding._step, PendingDraw.read
            with monkeypatch.context() as patched, Engine(tiny, config=config, plugins=[Factory()]) as engine:
                patched.setattr(
                    PlainDecoding, "_step", lambda *given, log=log, step=step: log.append("build") or step(*given)
                )
                patched.setattr(PendingDraw, "read", lambda draw, log=log, read=read: log.append("read") or read(draw))
                engine.generate([ask(0, spec), ask(1)])
            logs.append(log)
        assert logs[0] == logs[1]


@PIPELINE
def test_what_the_clock_says_changes_no_token(tiny, filling, pipeline):
    """Spans are chosen by what steps took; several times, since more is known then."""
    engine = filling(tiny, {"adaptive": True}, scheduler={"pipeline": pipeline})
    wanted = alone(tiny, THREE)
    for _ in range(4):
        same(engine.generate(THREE), wanted)


def test_a_span_is_as_long_as_it_says(tiny, filling, monkeypatch):
    engine = filling(tiny, {"span": 3})
    seen = forwards(engine, monkeypatch)
    same(engine.generate(THREE), alone(tiny, THREE))
    assert max(map(max, seen)) == 4


@PIPELINE
def test_chunks_of_joiners_are_taken_along(tiny, filling, monkeypatch, pipeline):
    """15.25: `running_tokens` is no less than what the step forwards, known tokens included."""
    engine = filling(
        tiny,
        scheduler={"pipeline": pipeline, "mixed": True, "verify": True, "prefill_chunk": 4, "mixed_token_budget": 64},
    )
    group, said, seen = engine._driver.group, [], []
    forward, advance = group.forward, group.advance
    monkeypatch.setattr(group, "advance", lambda *work: said.append(group._method.running_tokens) or advance(*work))
    monkeypatch.setattr(
        group,
        "forward",
        lambda caches, ids, widths, work=None: (
            seen.append((said[-1], ids.size, work is not None)) or forward(caches, ids, widths, work)
        ),
    )
    asked = [ask(row, LONG if row % 2 == 0 else None) for row in range(5)]
    handles = []
    for request in asked:
        handles.append(engine.submit(request))
        engine.step()
        engine.step()
    same([handle.result() for handle in handles], alone(tiny, asked))
    assert engine.stats()["mixed_forwards"] > 0
    assert engine.stats()["recoveries"] == 0
    assert all(said >= taken for said, taken, _ in seen)
    assert any(along and taken > 5 for _, taken, along in seen)


# --- what rows ask for -------------------------------------------------------------------------------------------------

ASKED = {
    "seeded": {"temperature": 0.9, "seed": 5},
    "log-probabilities": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {5: 2.0}},
    "n-grams": {"extra": {"no_repeat_ngram": 3}},
}


@PIPELINE
@pytest.mark.parametrize("asked", ASKED)
def test_it_goes_with_whatever_a_request_asks_for(tiny, filling, pipeline, asked):
    """A row whose scores somebody looks at takes one token at a time, beside those that take theirs."""
    sampling = SamplingParams(**ASKED[asked])
    requests = [ask(0, LONG, sampling=sampling), ask(1, sampling=sampling), ask(4, SHORT), ask(3, SHORT, min_tokens=9)]
    results, wanted = filling(tiny, scheduler={"pipeline": pipeline}).generate(requests), alone(tiny, requests)
    same(results, wanted)
    for one, two in zip(results[0].logprobs or (), wanted[0].logprobs or (), strict=True):
        assert one.token == two.token
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
    assert results[0].usage.forced_tokens == (18 if asked in {"seeded", "bias"} else 0)
    assert [result.usage.forced_tokens for result in results[1:]] == [0, 15, 0]


# --- ends within a span ------------------------------------------------------------------------------------------------


@PIPELINE
@pytest.mark.parametrize("limit", quick(range(1, 16), 1, 2, 7, 15))
def test_a_limit_within_a_span_is_kept(tiny, filling, pipeline, limit):
    requests = [ask(0, LONG, max_tokens=limit), ask(1), ask(4, SHORT, max_tokens=limit)]
    results = filling(tiny, scheduler={"pipeline": pipeline}).generate(requests)
    same(results, alone(tiny, requests))
    assert results[0].finish_reason == FinishReason.LENGTH


@PIPELINE
@pytest.mark.parametrize("length", quick(range(1, 15), 1, 5, 14))
def test_a_constraint_may_be_satisfied_by_what_it_knows(tiny, filling, pipeline, length):
    """Its last token is delivered; the others go on."""
    requests = [ask(0, {"text": text(9, 9)[:length]}), ask(1), ask(4, SHORT)]
    results = filling(tiny, scheduler={"pipeline": pipeline}).generate(requests)
    same(results, alone(tiny, requests))
    assert (results[0].finish_reason, len(results[0].token_ids)) == (FinishReason.STOP, length)


@PIPELINE
@pytest.mark.parametrize("place", quick(range(2, 11), 2, 6, 10))
def test_what_ends_a_row_is_drawn(tiny, filling, pipeline, place):
    """15.24: EOS is never injected, wherever in a span it stands; it is counted and not delivered."""
    stop = text(9, 9)[place]
    requests = [ask(0, LONG, stop_token_ids=(stop,)), ask(1), ask(4, SHORT)]
    results = filling(tiny, scheduler={"pipeline": pipeline}).generate(requests)
    same(results, alone(tiny, requests))
    assert (results[0].finish_reason, len(results[0].token_ids)) == (FinishReason.STOP, place)
    assert results[0].usage.forced_tokens == max(0, place - 2)


@PIPELINE
@pytest.mark.parametrize("place", quick(range(1, 13), 1, 6, 12))
@pytest.mark.parametrize("what", ["stops", "raises", "cancels"])
def test_a_consumer_within_a_span_is_heard_at_once(tiny, filling, what, place, pipeline):
    """It gets no token behind the one at which it said so; the other rows mind nothing."""
    told, handles = [], []

    def consumer(event):
        told.append(event.token)
        if len(told) == place:
            if what == "raises":
                raise LookupError("no more of this")
            if what == "cancels":
                handles[0].cancel()
            return what != "stops"
        return True

    wanted = alone(tiny, THREE)
    engine = filling(tiny, scheduler={"pipeline": pipeline})
    handles += [engine.submit(request) for request in (ask(0, LONG, on_token=consumer), *THREE[1:])]
    same([handle.result() for handle in handles[1:]], wanted[1:])
    assert told == list(wanted[0].token_ids[:place])
    if what == "raises":
        with pytest.raises(LookupError):
            handles[0].result()
    else:
        reason = FinishReason.STOP if what == "stops" else FinishReason.CANCELLED
        assert handles[0].result().finish_reason == reason
        assert handles[0].result().usage.generated_tokens == place


# --- failures ------------------------------------------------------------------------------------------------------------


@PIPELINE
@pytest.mark.parametrize("at", quick(range(13), 0, 3, 7, 12))
@pytest.mark.parametrize("what", ["accept", "forced", "ready"])
def test_a_constraint_that_raises_costs_its_row(tiny, filling, pipeline, what, at):
    """At any place of a span, with its own error; the rows beside it say what they say."""
    engine = filling(tiny, scheduler={"pipeline": pipeline})
    requests = [ask(0, {**LONG, "fails": [(what, at)]}), *THREE[1:]]
    first, *others = engine.generate(requests, return_errors=True)
    same(others, alone(tiny, THREE[1:]))
    if isinstance(first, ConstraintFailed):
        assert (first.reason, first.tokens) == (f"no more of {what}", at)
    else:  # it was not asked just there
        assert what != "accept"
        same([first], alone(tiny, THREE[:1]))


class Failing:
    """A model whose forwards of known tokens raise at these counts, or whenever a token is among them."""

    def __init__(self, model, at=(), poison=None):
        self._model, self.at, self.poison, self.calls, self.failed = model, set(at), poison, 0, 0

    def __call__(self, ids, cache, **named):
        span = ids.shape[1] > 1 and any(cache[0].tokens)
        self.calls += span
        if span and (self.calls in self.at or (self.poison is not None and self.poison in str(ids.tolist()))):
            self.failed += 1
            raise RuntimeError("the forward failed")
        return self._model(ids, cache=cache, **named)

    def __getattr__(self, name):
        return getattr(self._model, name)


def with_failures(engine, **how):
    failing = Failing(engine.bound.model, **how)
    object.__setattr__(engine.bound, "model", failing)
    return failing


@PIPELINE
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("rows", quick([1, 2, 3], 2))
@pytest.mark.parametrize("at", [[1], [1, 3], [2, 4]])
@pytest.mark.parametrize("spans", [(9, 9, 1), (9, 1)])
def test_a_span_that_fails_is_appended_again(tiny, filling, pipeline, adaptive, rows, at, spans):
    """In place, constraints hear nothing twice; also where one is satisfied by the span."""
    requests = [ask(0, {"text": text(*spans)}), *THREE[1:]][:rows]
    engine = filling(tiny, {"adaptive": adaptive}, scheduler={"pipeline": pipeline, "prefill_chunk": 64})
    failing = with_failures(engine, at=at)
    results = engine.generate(requests)
    same(results, alone(tiny, requests))
    assert failing.failed == engine.stats()["recoveries"]
    assert failing.failed > 0 or rows == 1  # alone a row needs no forward for a span that ends it
    for row in range(0, rows, 2):
        made = engine.factory.opened[requests[row].id]
        assert (tuple(made.taken), made.heard) == (results[row].token_ids, len(results[row].token_ids))


@PIPELINE
def test_a_row_whose_span_cannot_be_forwarded_fails_alone(tiny, filling, pipeline):
    """Isolated by halves; the others append theirs again, and not more."""
    poison = text(9, 9)[5]
    engine = filling(tiny, scheduler={"pipeline": pipeline, "prefill_chunk": 64})
    with_failures(engine, poison=f" {poison},")
    requests = [ask(0, LONG), ask(1), ask(4, {"text": [None, None, 90, 91, None, 92, 93]})]
    first, *others = engine.generate(requests, return_errors=True)
    assert "the forward failed" in str(first)
    same(others, alone(tiny, requests[1:]))


@PIPELINE
def test_a_device_that_fails_costs_no_token(tiny, filling, monkeypatch, pipeline):
    """At a read: everything is computed again from what was delivered."""
    wanted, read, counts = alone(tiny, THREE), PendingDraw.read, itertools.count(1)

    def fails(draw):
        if next(counts) in (4, 11):
            raise RuntimeError("the device failed")
        return read(draw)

    engine = filling(tiny, scheduler={"pipeline": pipeline})
    monkeypatch.setattr(PendingDraw, "read", fails)
    same(engine.generate(THREE), wanted)
    assert engine.stats()["recoveries"] == 2


# --- states --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "mamba"])
def test_a_state_that_holds_a_span_can_be_begun_with(filling, name):
    """A row goes on from what one left that had appended, beside others."""
    model = models.build(name)
    engine = filling(model, state_cache={"name": "memory", "publish_min_tokens": 1})
    first = engine.generate(THREE)[0]
    turn = ask(0, prompt_ids=(*PROMPTS[0], *first.token_ids, 5, 6), id="next")
    results = engine.generate([turn, ask(4, SHORT)])
    assert results[0].usage.cached_tokens >= len(PROMPTS[0]) + len(first.token_ids) - 1
    assert [r.token_ids for r in results] == [r.token_ids for r in alone(model, [turn, ask(4, SHORT)])]


def test_rows_that_give_way_go_on_with_their_tokens(tiny, filling):
    """Preempted under a budget of bytes and computed again later, their constraints with them."""
    engine = filling(tiny, scheduler={"kv_budget": 1, "overcommit": 5.0, "prefill_chunk": 16})
    object.__setattr__(engine._driver.relief.budget, "limit", 2 * engine.bound.bytes_at(300))
    asked = [ask(row, LONG if row % 2 == 0 else None) for row in range(5)]
    same(engine.generate(asked), alone(tiny, asked))


# --- whatever happens ------------------------------------------------------------------------------------------------------


def check_history(number, model, filling):
    """Rows come, leave and fail as the number says; each that stays says what it says alone."""
    draw = random.Random(number)
    method = {"adaptive": draw.random() < 0.5, "span": draw.choice((2, 5, 16))}
    scheduler = {
        "pipeline": draw.random() < 0.5,
        "max_batch": draw.choice((2, 3, 5)),
        "prefill_chunk": draw.choice((4, 64)),
        "mixed": draw.random() < 0.5,
        "early_first_token": draw.random() < 0.5,
        "max_recoveries": 50,
    }
    specs = [None, *({"text": text(*draw.choices(range(1, 12), k=4), gap=draw.randint(1, 3))} for _ in range(3))]
    sampling = (SamplingParams(), SamplingParams(temperature=0.9, seed=number), SamplingParams(presence_penalty=0.5))
    asked = [
        ask(
            draw.randrange(5),
            draw.choice(specs),
            id=f"r{i}",
            max_tokens=draw.randint(1, TOKENS),
            sampling=draw.choice(sampling),
        )
        for i in range(draw.randint(2, 7))
    ]
    wanted = alone(model, asked)
    comes, leaves = [draw.randrange(15) for _ in asked], [draw.choice((None, None, draw.randrange(25))) for _ in asked]
    engine = filling(model, method, scheduler=scheduler)
    with_failures(engine, at=draw.sample((2, 5, 9), draw.choice((0, 1, 2))))  # who fails again at once is guilty
    handles = {}
    for step in range(500):
        for i, request in enumerate(asked):
            if comes[i] == step:
                handles[i] = engine.submit(request)
            if leaves[i] == step and i in handles:
                handles[i].cancel()
        if not engine.step() and step > 30:
            break
    for i, alone_ in enumerate(wanted):
        result = handles[i].result()
        if result.finish_reason == FinishReason.CANCELLED:
            assert result.token_ids == alone_.token_ids[: len(result.token_ids)]
        else:
            same([result], [alone_])
    assert engine.stats()["kv_bytes"] == 0
    return sum(handle.result().usage.forced_tokens for handle in handles.values())


@pytest.mark.parametrize("ten", [pytest.param(n, marks=() if n < 2 else pytest.mark.long) for n in range(12)])
def test_histories(tiny, filling, ten):
    assert sum(check_history(number, tiny, filling) for number in range(10 * ten, 10 * ten + 10)) > 50


# --- at bind ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "error", "names"),
    [
        ({"span": -1}, InvalidConfigValue, "span"),
        ({"span": 17}, InvalidConfigValue, "0 to 16"),
        ({"span": 2.0}, InvalidConfigValue, "span"),
        ({"adaptive": 1}, InvalidConfigValue, "adaptive"),
        ({"spam": 4}, UnknownConfigKey, "span"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_bind(tiny, filling, method, error, names):
    with pytest.raises(error, match=names) as caught:
        filling(tiny, method=method)
    assert len(str(caught.value).splitlines()) == 1
