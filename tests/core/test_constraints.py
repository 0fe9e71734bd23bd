"""Constraints (SPEC 11): rows whose tokens are limited by their own beside rows that are free, in one batch."""

import functools
import random
import re
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.constraints import Matcher
from oarlock.core.engine import Engine
from oarlock.core.errors import ConstraintFailed, InvalidConstraint, InvalidParameter, UnknownName
from oarlock.core.sampling import PendingDraw
from oarlock.core.testing import models

V = 97
TOKENS = 20
LENGTHS = (9, 30, 14, 3, 17)
PIPELINE = pytest.mark.parametrize("pipeline", [True, False], ids=["pipelined", "not pipelined"])


def following(last, width=V):
    """Letters of two kinds by turns: even ids first, then always the other kind, and never of the same fifth."""
    ids = np.arange(width)
    return ids % 2 == 0 if last is None else (ids % 2 != last % 2) & (ids % 5 != last % 5)


def fixed(letters):
    """The letter that follows where four of five leave no choice; None at every fifth."""
    if len(letters) % 5 == 0:
        return None
    ids = np.flatnonzero(following(letters[-1]))
    return int(ids[7 * letters[-1] % len(ids)])


class Letters:
    """Letters of two kinds by turns, ``length`` of them. ``fails``: what raises, once so many letters were accepted.

    ``fixed``: "known" where four of five are fixed, "hidden" where it does not say so beforehand.
    """

    def __init__(self, log, length=10**6, width=V, eos=None, fails=(), empty_at=None, fixed=""):
        self.fixed = fixed
        self.log, self.length, self.width, self.eos, self.fails = log, length, width, eos, dict(fails)
        self.empty_at, self.taken = empty_at, []

    def _try(self, what):
        if self.fails.get(what) == len(self.taken):
            msg = f"no more\nof {what}"
            raise LookupError(msg)

    @property
    def terminated(self):
        self._try("terminated")
        return self.eos is None and len(self.taken) >= self.length

    def accept(self, token):
        self.log.append(("accept", token))
        self._try("accept")
        assert following(self.taken[-1] if self.taken else None)[token], "a letter of the wrong kind"
        self.taken.append(token)

    def ready(self):
        self.log.append(("ready",))
        self._try("ready")

    def mask(self):
        assert not (self.eos is None and len(self.taken) >= self.length), "it has ended and is asked"
        self.log.append(("mask",))
        self._try("mask")
        if self.fails.get("shape") == len(self.taken):
            return np.ones((2, 3), dtype=bool)
        mask = following(self.taken[-1] if self.taken else None)[: self.width]
        if self.fixed and (only := fixed(self.taken)) is not None:
            mask = np.arange(self.width) == only
        if self.eos is not None:
            mask[self.eos] = len(self.taken) >= self.length
            if len(self.taken) >= self.length:
                mask[:] = np.arange(len(mask)) == self.eos
        return mask & (len(self.taken) != self.empty_at)

    def forced(self):
        self._try("forced")
        known = list(self.taken) if self.fixed == "known" else []
        while known and len(known) < self.length and (only := fixed(known)) is not None:
            known.append(only)
        return known[len(self.taken) :]

    def rollback(self, n):
        self.log.append(("rollback", n))
        self._try("rollback")
        del self.taken[-n:]


class Factory:
    """Registers as ``letters``. ``logs``: what each of its constraints was asked, by the request's id."""

    name = "letters"

    def __init__(self):
        self.logs, self.opened = {}, {}

    def open(self, spec, tokenizer, request):
        if not isinstance(spec, dict):
            msg = "2:7: a letter\nis missing"
            raise TypeError(msg)
        opened = Letters(self.logs.setdefault(request.id, []), **spec)
        self.opened[request.id] = opened
        return opened

    @hookimpl
    def register_constraints(self, register):
        register(self)

    def accepted(self, name):
        """The tokens that a row's constraint holds, and those that it was ever given."""
        return tuple(self.opened[name].taken), tuple(what[1] for what in self.logs[name] if what[0] == "accept")


@pytest.fixture
def factory():
    return Factory()


@pytest.fixture(scope="module")
def built():
    return functools.cache(models.build)


@pytest.fixture(scope="module")
def ragged():
    return [tuple(prompt) for prompt in models.prompts(LENGTHS, V, seed=5)]


def once(generate):
    """Do the same for the same model once; the model is kept, so that its id stays its own."""
    done = {}

    @functools.wraps(generate)
    def looked_up(model, *given, **named):
        key = (id(model), given, *named.items())
        if key not in done:
            done[key] = model, generate(model, *given, **named)
        return done[key][1]

    return looked_up


@once
def serial(model, prompt):
    return models.serial(model, prompt, TOKENS)


@once
def limited(model, prompt, n, **spec):
    """What mlx-lm's own generation gives where the same letters are allowed, and nothing else."""
    said = []

    def only(tokens, scores):
        said[:] = tokens[len(prompt) :].tolist()
        allowed = following(said[-1] if said else None, scores.shape[-1])
        allowed[spec.get("width", V) :] = False
        if "fixed" in spec and (letter := fixed(said)) is not None:
            allowed &= np.arange(scores.shape[-1]) == letter
        return mx.where(mx.array(allowed), scores, -mx.inf)

    return models.serial(model, prompt, min(n, spec.get("length", n)), logits_processors=[only])


def ask(prompt, name, spec=None, **fields):
    constraint = None if spec is None else {"letters": spec}
    return Request(**{"prompt_ids": prompt, "max_tokens": TOKENS, "id": name, "constraint": constraint, **fields})


SPECS = ({}, None, {"length": 7}, None, {"width": 60})
"""Two of five rows are free; one ends by itself, one knows fewer ids than the model has."""


def wanted(model, prompts, specs=SPECS):
    return [
        serial(model, prompt) if spec is None else limited(model, prompt, TOKENS, **spec)
        for prompt, spec in zip(prompts, specs, strict=True)
    ]


def check(results, alone):
    models.compare([r.token_ids for r in results], [s.tokens for s in alone], [s.gaps for s in alone]).check()


SETTINGS = [
    {"pipeline": True},
    {"pipeline": False},
    {"pipeline": True, "mixed": False},
    {"pipeline": True, "prefill_chunk": 4},
    {"pipeline": False, "prefill_chunk": 4, "early_first_token": False},
    {"pipeline": True, "vectorised_sampling": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "mamba2", "qwen3_next"])
def test_constrained_and_free_rows_run_in_one_batch(engines, factory, ragged, built, name, settings):
    """11.6: each gets what it would get alone; those that must not choose freely would have."""
    model = built(name)
    alone = wanted(model, ragged)
    free = wanted(model, ragged, [None] * 5)
    assert all(alone[i].tokens != free[i].tokens[: len(alone[i].tokens)] for i in (0, 2, 4))
    engine = engines(model, plugins=[factory], **settings)
    results = engine.generate([ask(p, f"r{i}", spec) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))])
    check(results, alone)
    assert [str(result.finish_reason) for result in results] == ["length", "length", "stop", "length", "length"]
    assert engine.stats()["recoveries"] == 0
    for i in (0, 2, 4):
        held, given = factory.accepted(f"r{i}")
        assert held == given == results[i].token_ids


@PIPELINE
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("max_batch", [2, 16])
def test_rows_join_and_leave(engines, tiny, factory, ragged, pipeline, every, max_batch):
    """Free rows join constrained ones and the other way round; each leaves when it is done."""
    limits = (TOKENS, 6, TOKENS, TOKENS, 9)
    engine = engines(tiny, plugins=[factory], pipeline=pipeline, max_batch=max_batch)
    handles = []
    for i, (prompt, spec, limit) in enumerate(zip(ragged, SPECS, limits, strict=True)):
        handles.append(engine.submit(ask(prompt, f"r{i}", spec, max_tokens=limit)))
        for _ in range(every):
            engine.step()
    results = [handle.result() for handle in handles]
    for result, alone, limit in zip(results, wanted(tiny, ragged), limits, strict=True):
        assert result.token_ids == alone.tokens[:limit]
    assert engine.stats()["recoveries"] == 0


@PIPELINE
def test_seeded_rows_draw_what_they_draw_alone(engines, tiny, factory, ragged, pipeline):
    """Constrained and free."""
    sampling = [SamplingParams(temperature=1.0, top_p=0.9, top_k=20 * (i % 2), seed=i) for i in range(5)]
    rows = zip(ragged, SPECS, sampling, strict=True)
    asked = [ask(prompt, f"r{i}", spec, sampling=params) for i, (prompt, spec, params) in enumerate(rows)]
    together = [result.token_ids for result in engines(tiny, plugins=[factory], pipeline=pipeline).generate(asked)]
    for request, tokens in zip(asked, together, strict=True):
        alone = engines(tiny, plugins=[Factory()], pipeline=pipeline).generate([request])
        assert alone[0].token_ids == tokens


def logged(engine, monkeypatch, log):
    """Note forwards, and reads of what was drawn, in ``log``."""
    read, forward = PendingDraw.read, engine._driver.group.forward
    monkeypatch.setattr(PendingDraw, "read", lambda draw: log.append(("read",)) or read(draw))
    monkeypatch.setattr(engine._driver.group, "forward", lambda *a, **k: log.append(("forward",)) or forward(*a, **k))


def test_a_step_reads_before_it_builds_and_emits_at_the_end(engines, tiny, factory, ragged, monkeypatch):
    """11.2: read, accept, forward, and only then is the mask awaited; the token is delivered last."""
    log = factory.logs["r0"] = []
    engine = engines(tiny, plugins=[factory], pipeline=True)
    logged(engine, monkeypatch, log)
    engine.generate([ask(ragged[0], "r0", {}, on_token=lambda event: log.append(("emit", event.token)))])
    kinds = [what[0] for what in log]
    assert kinds[:5] == ["ready", "mask", "read", "accept", "emit"]  # the first token, from the prefill's scores
    assert kinds[5:8] == ["forward", "ready", "mask"]  # nothing is unread
    step = ["read", "accept", "forward", "ready", "mask", "emit"]
    assert kinds[8:-3] == step * (TOKENS - 2)
    assert kinds[-3:] == ["read", "accept", "emit"]


def test_a_batch_that_is_free_again_reads_late(engines, tiny, factory, ragged, monkeypatch):
    """11.4: from the step after the last constrained row on, each step is built from what nobody has read."""
    log = []
    engine = engines(tiny, plugins=[factory], pipeline=True)
    logged(engine, monkeypatch, log)
    short = engine.submit(ask(ragged[0], "short", {"length": 4}))
    long = engine.submit(ask(ragged[1], "long"))
    short.result()
    assert log[-2:] == [("read",), ("forward",)]
    log.clear()
    assert long.result().token_ids == wanted(tiny, ragged)[1].tokens
    assert log[:4] == [("forward",), ("read",), ("forward",), ("read",)]


def drawn_by(engine, asked, monkeypatch, path):
    """Count the operations behind the tokens that the second step draws."""
    drawn = []
    monkeypatch.setattr(mx, "async_eval", lambda *what: drawn.append(what))
    engine.submit(asked)
    for _ in range(2):
        engine.step()
    mx.export_to_dot(str(path), drawn[-1][0][0])
    monkeypatch.undo()
    return Counter(re.findall(r'label ="(\w+)", shape=rectangle', path.read_text()))


def test_free_batches_build_the_graph_that_they_always_did(engines, tiny, factory, ragged, monkeypatch, tmp_path):
    """11.4: operation by operation, also where a constrained row was before."""
    path = tmp_path / "graph.dot"
    graph = drawn_by(engines(tiny, pipeline=True), ask(ragged[0], "r0"), monkeypatch, path)
    engine = engines(tiny, plugins=[factory], pipeline=True)
    engine.generate([ask(ragged[1], "r1", {"length": 3})])
    assert drawn_by(engine, ask(ragged[0], "r0"), monkeypatch, path) == graph
    assert graph.total() > 50
    constrained = drawn_by(
        engines(tiny, plugins=[Factory()], pipeline=True), ask(ragged[0], "r0", {}), monkeypatch, path
    )
    assert set(constrained - graph) == {"Broadcast", "Select"}


@PIPELINE
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_row_whose_constraint_is_satisfied_stops_there(engines, tiny, factory, ragged, pipeline, length):
    """11.7, 12.2: it is never sampled again, and at the limit of tokens too the reason is that it stopped."""
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    asked = [ask(ragged[0], "r0", {"length": length}), ask(ragged[1], "r1")]
    asked.append(ask(ragged[2], "r2", {"length": length}, max_tokens=length))
    results = engine.generate(asked)
    assert [str(result.finish_reason) for result in results] == ["stop", "length", "stop"]
    assert [len(result.token_ids) for result in results] == [length, TOKENS, length]
    assert results[0].usage.generated_tokens == length
    assert factory.logs["r0"].count(("mask",)) == length
    assert results[1].token_ids == serial(tiny, ragged[1]).tokens


@PIPELINE
def test_an_end_token_comes_only_where_the_constraint_may_end(engines, tiny, factory, letters, ragged, pipeline):
    """It ends the row as ever, counted and not delivered, and the constraint does not hear of it."""
    eos = limited(tiny, ragged[0], 6).tokens[2]
    engine = engines(tiny, letters([eos]), plugins=[factory], pipeline=pipeline)
    first, second = engine.generate([ask(ragged[0], "r0", {"length": 5, "eos": eos}), ask(ragged[1], "r1")])
    assert str(first.finish_reason) == "stop"
    assert (len(first.token_ids), first.usage.generated_tokens) == (5, 6)
    assert eos not in first.token_ids
    assert factory.accepted("r0") == (first.token_ids, first.token_ids)
    free = serial(tiny, ragged[1]).tokens
    assert second.token_ids == free[: free.index(eos) if eos in free else TOKENS]


def test_log_probabilities_are_the_models_own(engines, tiny, factory, ragged):
    """Before any mask: those of the tokens that were allowed do not sum to one."""
    asked = ask(ragged[0], "r0", {}, max_tokens=1, sampling=SamplingParams(logprobs=3))
    (result,) = engines(tiny, plugins=[factory]).generate([asked])
    scores = tiny(mx.array([ragged[0]]))[0, -1]
    own = scores - mx.logsumexp(scores)
    assert result.logprobs[0].logprob == pytest.approx(own[result.token_ids[0]].item(), abs=1e-4)
    assert result.logprobs[0].top[0] == pytest.approx((mx.argmax(own).item(), mx.max(own).item()), abs=1e-4)
    assert any(token % 2 for token, _ in result.logprobs[0].top)


# --- what fails ----------------------------------------------------------------------------------------------------


@PIPELINE
@pytest.mark.parametrize("at", [0, 1, 6])
@pytest.mark.parametrize("what", ["accept", "ready", "mask", "terminated", "shape"])
def test_a_constraint_that_raises_costs_its_row(engines, tiny, factory, ragged, pipeline, what, at):
    """Wherever it does: its row has no token after that, the others have all of theirs."""
    at = max(1, at) if what == "terminated" else at
    told = []
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    asked = [ask(p, f"r{i}", spec) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))]
    asked[0] = ask(ragged[0], "r0", {"fails": {what: at}}, on_token=lambda event: told.append(event.token))
    first, *others = engine.generate(asked, return_errors=True)
    assert isinstance(first, ConstraintFailed)
    assert (first.request_id, first.constraint) == ("r0", "letters")
    assert "\n" not in str(first)
    alone = wanted(tiny, ragged)
    check(others, alone[1:])
    assert told == list(alone[0].tokens[: at - (what == "terminated")])
    assert engine.stats()["recoveries"] == 0


@PIPELINE
@pytest.mark.parametrize("at", [3, 6])
def test_a_constraint_that_raises_when_it_is_asked_what_must_follow_ends_its_row(
    engines, tiny, factory, ragged, pipeline, at
):
    """It is asked where every row of the batch is constrained, and nothing is unread then but that row's last token."""
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    asked = [ask(ragged[0], "r0", {"fails": {"forced": at}}), ask(ragged[1], "r1", {})]
    for requests in (asked[:1], asked):
        first, *others = engine.generate(requests, return_errors=True)
        assert isinstance(first, ConstraintFailed)
        assert first.tokens == at
        assert all(len(result.token_ids) == TOKENS for result in others)
        assert engine.stats()["active_rows"] == engine.stats()["recoveries"] == 0


@PIPELINE
@pytest.mark.parametrize("at", [0, 4])
def test_a_constraint_that_allows_nothing_costs_its_row(engines, tiny, factory, ragged, pipeline, at):
    """It is told so, and never runs free."""
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    asked = [ask(ragged[0], "r0", {"empty_at": at}), ask(ragged[1], "r1"), ask(ragged[2], "r2", {"width": 0})]
    first, second, third = engine.generate(asked, return_errors=True)
    for failed, tokens in ((first, at), (third, 0)):
        assert isinstance(failed, ConstraintFailed)
        assert "no token" in failed.reason
        assert failed.tokens == tokens
    check([second], [serial(tiny, ragged[1])])


REFUSED = {
    "a spec that does not compile": ({"letters": 7}, InvalidConstraint, "2:7: a letter is missing"),
    "a spec that is satisfied at once": ({"letters": {"length": 0}}, InvalidConstraint, "satisfied"),
    "a name that nobody registered": ({"leters": {}}, UnknownName, "did you mean 'letters'"),
    "two names": ({"letters": {}, "regex": "a"}, InvalidParameter, "one key"),
    "no name": ({}, InvalidParameter, "one key"),
    "a key that is no name": ({7: {}}, InvalidParameter, "one key"),
    "no mapping": ("letters", InvalidParameter, "one key"),
    "an import path": ({"os.path:join": {}}, UnknownName, "unknown constraint"),
}


@pytest.mark.parametrize(("constraint", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_at_submit(engines, tiny, factory, ragged, constraint, error, says):
    """In one line, with the library's own message; nothing is queued and the running row does not notice."""
    engine = engines(tiny, plugins=[factory])
    running = engine.submit(ask(ragged[0], "r0", {}))
    engine.step()
    before = engine.stats()
    with pytest.raises(error, match=says) as caught:
        engine.submit(ask(ragged[1], "bad", constraint=constraint))
    assert "\n" not in str(caught.value)
    assert engine.stats() == before
    check([running.result()], [limited(tiny, ragged[0], TOKENS)])


@PIPELINE
@pytest.mark.parametrize("rows", [(0,), (0, 2), (1,)])
def test_cancelled_rows_leave_and_others_go_on(engines, tiny, factory, ragged, pipeline, rows):
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    handles = [engine.submit(ask(p, f"r{i}", spec)) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))]
    for _ in range(6):
        engine.step()
    for row in rows:
        handles[row].cancel()
    results = [handle.result() for handle in handles]
    for i, (result, alone) in enumerate(zip(results, wanted(tiny, ragged), strict=True)):
        assert result.token_ids == alone.tokens[: len(result.token_ids)]
        assert (str(result.finish_reason) == "cancelled") == (i in rows)


@PIPELINE
def test_a_method_that_samples_ahead_costs_the_constrained_rows(engines, tiny, factory, ragged, pipeline, monkeypatch):
    """Their next mask is not known before their last token is: no such row ever runs free."""
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    monkeypatch.setattr(type(engine._driver.group), "constrained", False)
    asked = [ask(p, f"r{i}", spec) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))]
    outcomes = engine.generate(asked, return_errors=True)
    alone = wanted(tiny, ragged)
    for i, (outcome, spec) in enumerate(zip(outcomes, SPECS, strict=True)):
        if pipeline and spec is not None:
            assert isinstance(outcome, ConstraintFailed)
            assert "had been sampled" in outcome.reason
            held, _ = factory.accepted(f"r{i}")
            assert held == alone[i].tokens[: len(held)]
        else:
            check([outcome], [alone[i]])


# --- what must follow ----------------------------------------------------------------------------------------------


def forwards(engine, monkeypatch):
    """The shapes of what a group forwards from now on."""
    shapes, forward = [], engine._driver.group.forward
    monkeypatch.setattr(
        engine._driver.group,
        "forward",
        lambda caches, ids, *rest: shapes.append(ids.shape) or forward(caches, ids, *rest),
    )
    return shapes


@PIPELINE
@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "mamba2", "qwen3_next"])
def test_what_must_follow_is_not_drawn(engines, factory, ragged, built, monkeypatch, name, pipeline):
    """15.20: a lone row takes four of five tokens in the forward of the fifth; they are what drawing them gives."""
    model = built(name)
    engine = engines(model, plugins=[factory], pipeline=pipeline)
    shapes = forwards(engine, monkeypatch)
    alone = limited(model, ragged[1], TOKENS, fixed="known")
    for how, steps in (("known", [5, 5, 5, 4]), ("hidden", [1] * (TOKENS - 1))):
        shapes.clear()
        (result,) = engine.generate([ask(ragged[1], how, {"fixed": how}, reuse_prefix=False)])
        check([result], [alone])
        assert shapes == [(1, width) for width in steps]
        assert result.usage.forced_tokens == (15 if how == "known" else 0)
        assert factory.accepted(how) == (result.token_ids, result.token_ids)


@PIPELINE
@pytest.mark.parametrize("layouts", [{}, {"full": {"name": "paged", "block_size": 16}}], ids=["full", "paged"])
def test_rows_that_all_know_go_together(tiny, factory, ragged, monkeypatch, pipeline, layouts):
    """As far as all of them know, each at a length of its own; a free row, or one that is looked at, keeps them single."""
    config = {"scheduler": {"pipeline": pipeline, "verify": False}, "layouts": layouts}
    asked = [ask(ragged[i], f"r{i}", {"fixed": "known"}) for i in (0, 1, 3)]
    alone = [limited(tiny, ragged[i], TOKENS, fixed="known") for i in (0, 1, 3)]
    for other, together in (
        (None, True),
        (ask(ragged[2], "free"), False),
        (ask(ragged[2], "hidden", {"fixed": "hidden"}), False),
        (ask(ragged[2], "seen", {"fixed": "known"}, sampling=SamplingParams(logprobs=1)), False),
    ):
        with Engine(tiny, config=config, plugins=[Factory()]) as engine:
            shapes = forwards(engine, monkeypatch)
            results = engine.generate([*asked, *([other] if other else [])])
            assert engine.stats()["recoveries"] == 0
        check(results[:3], alone)
        widths = {width for rows, width in shapes if rows == 3 + (other is not None)}
        assert (max(widths) > 1) == together


@PIPELINE
def test_a_state_that_holds_what_must_follow_can_be_begun_with(tiny, factory, ragged, pipeline):
    """8.7: it covers what its key says; the next turn has the tokens that it has without it."""
    config = {"scheduler": {"pipeline": pipeline}, "state_cache": {"name": "memory", "publish_min_tokens": 1}}
    with Engine(tiny, config=config, plugins=[factory], identity="weights") as engine:
        (first,) = engine.generate([ask(ragged[0], "r0", {"fixed": "known"})])
        turn = (*ragged[0], *first.token_ids, 5, 6)
        (second,) = engine.generate([ask(turn, "r1")])
    assert second.usage.cached_tokens >= len(ragged[0]) + TOKENS - 1
    check([second], [serial(tiny, turn)])


@pytest.mark.parametrize("limit", range(1, 13))
def test_the_limit_may_lie_inside_what_must_follow(engines, tiny, factory, ragged, limit):
    """12.2: exactly so many tokens, and the reason is the limit."""
    engine = engines(tiny, plugins=[factory], pipeline=True)
    (result,) = engine.generate([ask(ragged[0], "r0", {"fixed": "known"}, max_tokens=limit)])
    assert result.token_ids == limited(tiny, ragged[0], TOKENS, fixed="known").tokens[:limit]
    assert str(result.finish_reason) == "length"
    assert result.usage.generated_tokens == limit


@PIPELINE
@pytest.mark.parametrize("length", range(1, 13))
def test_a_constraint_may_be_satisfied_by_what_must_follow(engines, tiny, factory, ragged, pipeline, length):
    """Its last letter is delivered, and beside it a row goes on."""
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    specs = [{"fixed": "known", "length": length}, {"fixed": "known"}]
    results = engine.generate([ask(ragged[i], f"r{i}", spec) for i, spec in enumerate(specs)])
    check(results, [limited(tiny, ragged[i], TOKENS, **spec) for i, spec in enumerate(specs)])
    assert [str(result.finish_reason) for result in results] == ["stop", "length"]


@PIPELINE
@pytest.mark.parametrize("at", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("how", ["false", "raises", "cancels"])
def test_a_consumer_may_end_a_row_inside_what_must_follow(engines, tiny, factory, ragged, pipeline, at, how):
    """It is told nothing after that, and the row beside it has all of its tokens."""
    told, handles = [], []

    def consume(event):
        told.append(event.token)
        if len(told) == at + 1:
            if how == "raises":
                raise LookupError("enough")
            if how == "cancels":
                handles[0].cancel()
            return how != "false"
        return None

    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    alone = [limited(tiny, ragged[i], TOKENS, fixed="known") for i in range(2)]
    handles.append(engine.submit(ask(ragged[0], "r0", {"fixed": "known"}, on_token=consume)))
    handles.append(engine.submit(ask(ragged[1], "r1", {"fixed": "known"})))
    check([handles[1].result()], alone[1:])
    assert told == list(alone[0].tokens[: at + 1])
    assert handles[0].done


@PIPELINE
@pytest.mark.parametrize("at", [6, 11])
def test_a_constraint_that_cannot_say_what_must_follow_costs_its_row(engines, tiny, factory, ragged, pipeline, at):
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    specs = [{"fixed": "known", "fails": {"forced": at}}, {"fixed": "known"}]
    first, second = engine.generate([ask(ragged[i], f"r{i}", spec) for i, spec in enumerate(specs)], return_errors=True)
    assert isinstance(first, ConstraintFailed)
    assert first.reason == "no more of forced"
    assert first.tokens == at
    check([second], [limited(tiny, ragged[1], TOKENS, fixed="known")])


# --- rows that lose their state ------------------------------------------------------------------------------------


def check_accepted(factory, results):
    """Each constraint holds its row's tokens; what it was given more than once it had taken back."""
    for i, (result, spec) in enumerate(zip(results, SPECS, strict=True)):
        if spec is not None:
            held, given = factory.accepted(f"r{i}")
            taken_back = sum(what[1] for what in factory.logs[f"r{i}"] if what[0] == "rollback")
            assert held == result.token_ids
            assert len(given) - taken_back == len(held)


@PIPELINE
@pytest.mark.parametrize("call", [2, 4, 5, 9, 14])
def test_a_forward_that_raises_is_repeated(engines, factory, ragged, pipeline, call):
    """What was read and accepted before it is not accepted twice."""
    model = models.build("tiny-full")
    engine = engines(model, plugins=[factory], pipeline=pipeline)
    kind, calls = type(model), []

    class Failing(kind):
        def __call__(self, ids, cache=None):
            calls.append(ids.shape)
            if len(calls) == call:
                raise RuntimeError("once")
            return kind.__call__(self, ids, cache=cache)

    model.__class__ = Failing
    results = engine.generate([ask(p, f"r{i}", spec) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))])
    model.__class__ = kind
    check(results, wanted(model, ragged))
    assert engine.stats()["recoveries"] == 1
    assert all(factory.accepted(f"r{i}") == (results[i].token_ids,) * 2 for i in (0, 2, 4))


@PIPELINE
@pytest.mark.parametrize("call", range(1, 12, 2))
def test_an_error_of_the_device_costs_nobody(engines, tiny, factory, ragged, pipeline, call, failing_device):
    """Rows are computed again from what was delivered, and their constraints follow."""
    engine, calls = engines(tiny, plugins=[factory], pipeline=pipeline), []
    failing_device(lambda *_: calls.append(0) or len(calls) == call)
    results = engine.generate([ask(p, f"r{i}", spec) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))])
    assert engine.stats()["recoveries"] == 1
    failing_device(lambda *_: False)
    check(results, wanted(tiny, ragged))
    check_accepted(factory, results)


@PIPELINE
def test_preempted_rows_come_back_where_they_were(engines, tiny, factory, ragged, pipeline):
    """For want of memory rows leave and are computed again."""
    engine = engines(tiny, plugins=[factory], pipeline=pipeline)
    largest = engine.bound.bytes_at(max(LENGTHS) + TOKENS)
    engine = engines(tiny, plugins=[factory], pipeline=pipeline, kv_budget=2 * largest, overcommit=3.0)
    results = engine.generate([ask(p, f"r{i}", spec) for i, (p, spec) in enumerate(zip(ragged, SPECS, strict=True))])
    assert engine.stats()["preemptions"] >= 1
    check(results, wanted(tiny, ragged))
    check_accepted(factory, results)


@PIPELINE
@pytest.mark.parametrize("steps", [1, 4, 11])
def test_the_next_process_goes_on_with_the_constraint(tiny, factory, ragged, pipeline, steps, tmp_path):
    """14: the matcher is brought to where the stored tokens end, and each is accepted once."""
    cache = {"name": "memory", "prefix_bytes": 0, "checkpoints": str(tmp_path)}
    config = {"state_cache": cache, "scheduler": {"pipeline": pipeline, "prefill_chunk": 8, "verify": False}}
    rows = enumerate(zip(ragged, SPECS, strict=True))
    asked = [ask(prompt, f"r{i}", spec, checkpoint_interval=3) for i, (prompt, spec) in rows]
    with Engine(tiny, config=config, plugins=[Factory()], identity="weights") as first:
        for request in asked:
            first.submit(request)
        for _ in range(steps):
            first.step()
    with Engine(tiny, config=config, plugins=[factory], identity="weights") as second:
        results = second.generate(asked)
    check(results, wanted(tiny, ragged))
    check_accepted(factory, results)


def test_a_stored_generation_is_another_ones_under_another_constraint(tiny, factory, ragged, tmp_path):
    """The constraint decides the tokens, so it is part of what a checkpoint is found by."""
    cache = {"name": "memory", "prefix_bytes": 0, "checkpoints": str(tmp_path)}
    config = {"state_cache": cache, "scheduler": {"prefill_chunk": 8, "verify": False}}
    with Engine(tiny, config=config, identity="weights") as first:
        first.submit(ask(ragged[0], "r0", checkpoint_interval=3))
        for _ in range(8):
            first.step()
    with Engine(tiny, config=config, plugins=[factory], identity="weights") as second:
        results = second.generate([ask(ragged[0], "r0", {}, checkpoint_interval=3)])
    check(results, [limited(tiny, ragged[0], TOKENS)])


def test_a_rollback_that_raises_costs_its_row(engines, tiny, factory, ragged):
    """It is rejected when it would draw next."""
    engine = engines(tiny, plugins=[factory])
    handle = engine.submit(ask(ragged[0], "r0", {"fails": {"rollback": 1}}))
    matcher = handle._row.matcher
    matcher.follow(0, 2)
    matcher.restart(())
    assert isinstance(matcher.error, ConstraintFailed)
    other = engine.submit(ask(ragged[1], "r1"))
    with pytest.raises(ConstraintFailed, match="no more of rollback"):
        handle.result()
    check([other.result()], [serial(tiny, ragged[1])])


# --- whatever happens ----------------------------------------------------------------------------------------------


class DeviceLost:
    """The device fails at these reads and evaluations, counted from when that was said."""

    def __init__(self):
        self.at(())

    def at(self, numbers):
        self.numbers, self.calls = frozenset(numbers), 0

    def __call__(self, *_):
        self.calls += 1
        return self.calls in self.numbers


@pytest.fixture
def device_lost(failing_device):
    lost = DeviceLost()
    failing_device(lost)
    return lost


class History:
    """A run made from its number alone: who comes when and is bound by what, who leaves, what fails and how often."""

    def __init__(self, number):
        draw = random.Random(number)
        self.scheduler = {
            "pipeline": draw.random() < 0.6,
            "max_batch": draw.choice((1, 2, 3, 5)),
            "prefill_chunk": draw.choice((4, 8, 512)),
            "mixed": draw.random() < 0.6,
            "early_first_token": draw.random() < 0.5,
            "vectorised_sampling": draw.random() < 0.7,
        }
        bound = (None, None, {}, {"length": draw.randint(1, 12)}, {"width": 60}, {"fixed": "known"}, {"fixed": "known"})
        if draw.random() < 0.4:
            bound = ({"fixed": "known"}, {"fixed": "known", "length": draw.randint(1, 12)})
        self.rows = [
            {
                "at": draw.randrange(20),
                "prompt": draw.randrange(len(LENGTHS)),
                "limit": draw.randint(1, TOKENS),
                "spec": draw.choice(bound),
                "leaves": draw.randrange(3, 30) if draw.random() < 0.15 else None,
            }
            for _ in range(draw.randint(2, 7))
        ]
        self.budget = draw.choice((None, None, 1.3, 2.5))
        first = draw.randrange(1, 40)
        self.lost = draw.choice(((), (), (first,), (first, first + 40)))  # who fails again at once is guilty
        self.raising = set(draw.sample(range(draw.randint(1, 8), 60, 8), draw.choice((0, 0, 1, 3))))


def live(engine, history, prompts, model, device_lost):
    """Go through a history; return the results."""
    forwards, kind = [], type(model)

    class Raising(kind):
        def __call__(self, ids, cache=None):
            forwards.append(ids.shape)
            if len(forwards) in history.raising:
                raise RuntimeError("a forward fails")
            return kind.__call__(self, ids, cache=cache)

    model.__class__ = Raising
    device_lost.at(history.lost)
    try:
        handles = {}
        for step in range(1000):
            for i, row in enumerate(history.rows):
                if row["at"] == step:
                    request = ask(prompts[row["prompt"]], f"r{i}", row["spec"], max_tokens=row["limit"])
                    handles[i] = engine.submit(request)
                if row["leaves"] == step and i in handles:
                    handles[i].cancel()
            if not engine.step() and step > 20:
                break
        return [handles[i].result() for i in range(len(history.rows))]
    finally:
        model.__class__ = kind
        device_lost.at(())


def check_history(number, engines, model, prompts, device_lost):
    """Every row says what it says alone, up to where it left, and its constraint heard each token once."""
    history, factory = History(number), Factory()
    settings = {**history.scheduler, "max_recoveries": 50, "verify": False}
    if history.budget is not None:
        largest = engines(model).bound.bytes_at(max(LENGTHS) + TOKENS)
        settings |= {"kv_budget": int(history.budget * largest), "overcommit": 3.0}
    engine = engines(model, plugins=[factory], **settings)
    results = live(engine, history, prompts, model, device_lost)
    for i, (row, result) in enumerate(zip(history.rows, results, strict=True)):
        prompt = prompts[row["prompt"]]
        alone = serial(model, prompt) if row["spec"] is None else limited(model, prompt, TOKENS, **row["spec"])
        got, left = result.token_ids, str(result.finish_reason) == "cancelled"
        assert got == alone.tokens[: len(got) if left else row["limit"]]
        assert left or str(result.finish_reason) == (
            "stop" if len(got) == (row["spec"] or {}).get("length") else "length"
        )
        if row["spec"] is not None:
            held, given = factory.accepted(f"r{i}")
            taken_back = sum(what[1] for what in factory.logs[f"r{i}"] if what[0] == "rollback")
            assert held[: len(got)] == got
            assert len(held) <= len(got) + left
            assert len(given) - taken_back == len(held)
    assert engine.stats()["kv_bytes"] == 0


@pytest.mark.parametrize("number", range(30))
def test_histories(engines, tiny, ragged, device_lost, number):
    check_history(number, engines, tiny, ragged, device_lost)


@pytest.mark.long
@pytest.mark.parametrize("hundred", range(1, 5))
def test_more_histories(engines, tiny, ragged, device_lost, hundred):
    _all(range(100 * hundred, 100 * hundred + 100), engines, tiny, ragged, device_lost)


def _all(numbers, *given):
    for number in numbers:
        check_history(number, *given)


def test_twin_a_mask_of_the_token_before_is_found(engines, tiny, ragged, device_lost, monkeypatch):
    """What has not followed the last token allows the wrong ones, and some history shows it."""
    allowed, masks = Matcher.allowed, {}

    def stale(self, sampled, width):
        fresh = allowed(self, sampled, width)
        before, masks[self] = masks.get(self, fresh), fresh
        return before

    monkeypatch.setattr(Matcher, "allowed", stale)
    with pytest.raises((AssertionError, ConstraintFailed)):
        _all(range(5), engines, tiny, ragged, device_lost)
