"""Proposers that hear hidden states: what they are told is what the model's head was given, for each token that stays and no other."""

import attrs
import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.contracts.proposer import ListeningProposer, ListeningRows
from oarlock.core.engine import Engine
from oarlock.core.errors import CompiledRefused, MixedRefused, ProposerRefused
from oarlock.core.testing import models
from oarlock.core.testing.oracle import Oracle

LENGTHS, TOKENS, DEPTH = (12, 3, 40, 1, 9), 24, 4
PROMPTS = [tuple(prompt) for prompt in models.prompts(LENGTHS, 97)]
every_model = pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "mamba2", "mamba"])


def head(model, states):
    """Scores [1, N, V] by the model's own head."""
    if "lm_head" in model:
        return model.lm_head(states)
    return model.backbone.embeddings.as_linear(states)


@attrs.define(eq=False, kw_only=True)
class Listening(Oracle):
    """An oracle that keeps what it hears, and knows at each proposal that it has heard all but the last token."""

    heard: dict = attrs.field(factory=dict)
    calls: list = attrs.field(factory=list)
    gone: set = attrs.field(factory=set)
    raises_at: int = 0

    def listens(self, options):
        return True

    def hear(self, row, start, states):
        self.calls.append((row.id, start, states.shape))
        if len(self.calls) == self.raises_at:
            raise KeyError("lost my states")
        mine = self.heard.setdefault(row.id, {})
        for place in [place for place in mine if place >= start]:
            assert row.preempted or place < start, "a token is heard once"
            del mine[place]
        mine.update(enumerate(states, start))

    def propose(self, rows, depths):
        if not self.raises_at:
            for row in rows:
                known = row.prompt_tokens + len(row.token_ids)
                places = sorted(self.heard[row.id])
                # A step that was built and is not read yet was heard as well.
                assert places == list(range(places[0], places[0] + len(places)))
                assert known - 1 <= places[-1] + 1 <= known
        return super().propose(rows, depths)

    def drop(self, rows):
        rows = list(rows)
        self.gone.update(row.id for row in rows)
        super().drop(rows)


@pytest.fixture
def listening():
    """Open engines whose proposer listens, in ``engine.oracle``; they are closed with the test."""
    opened = []

    def make(model, answers, method=(), oracle=(), **sections):
        vocabulary = model(mx.zeros((1, 1), dtype=mx.uint32)).shape[-1]
        hears = Listening(answers=answers, vocabulary=vocabulary, **dict(oracle))
        chosen = {"name": "speculative", "proposer": "oracle", "depth": DEPTH, "adaptive": False, **dict(method)}
        scheduler = {"verify": False, **sections.pop("scheduler", {})}
        config = {"state_cache": {"name": "none"}, "method": chosen, "scheduler": scheduler, **sections}
        opened.append(Engine(model, config=config, plugins=[hears], identity="weights"))
        opened[-1].oracle = hears
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def asked(**changes):
    limits = (TOKENS, 9, 17, 1, 20)
    pairs = enumerate(zip(PROMPTS, limits, strict=True))
    return [Request(**{"prompt_ids": p, "max_tokens": n, "id": f"r{i}", **changes}) for i, (p, n) in pairs]


def answers(model, requests):
    with Engine(model, config={"scheduler": {"verify": False}, "state_cache": {"name": "none"}}) as engine:
        results = engine.generate([attrs.evolve(request, max_tokens=TOKENS) for request in requests])
    return {request.prompt_ids: result.token_ids for request, result in zip(requests, results, strict=True)}


def check(model, engine, requests, results, first=0):
    """Each state is that of its token in the whole text, and the model's own head says the next token from it."""
    for request, result in zip(requests, results, strict=True):
        text, heard = [*request.prompt_ids, *result.token_ids], engine.oracle.heard[request.id]
        assert set(range(first, len(text) - 1)) <= set(heard) <= set(range(first, len(text)))
        states = mx.stack([heard[place] for place in range(first, len(text) - 1)])
        said = mx.argmax(head(model, states[None])[0], axis=-1).tolist()
        start = len(request.prompt_ids) - 1 - first
        if request.sampling.greedy:
            assert said[start:] == list(result.token_ids)
        whole = model(mx.array([text[:-1]], dtype=mx.uint32))[0][first:]
        assert mx.max(mx.abs(head(model, states[None])[0] - whole)).item() < 1e-2


@pytest.mark.parametrize("pipeline", [True, False])
@every_model
def test_the_models_own_head_says_the_next_token_at_every_position(name, listening, pipeline):
    """Rows that join and leave, drafts that are accepted and rejected, chunks of prompts: five rows, three at a time."""
    model, requests = models.build(name), asked()
    known = answers(model, requests)
    for every, rows in ((0, 1), (0, 5), (2, 5)):
        scheduler = {"pipeline": pipeline, "max_batch": 3, "prefill_chunk": 8}
        engine = listening(model, known, oracle={"silent": 0.3}, scheduler=scheduler)
        handles = []
        for request in requests[:rows]:
            handles.append(engine.submit(request))
            for _ in range(every):
                engine.step()
        results = [handle.result() for handle in handles]
        assert [r.token_ids for r in results] == [known[r.prompt_ids][: r.max_tokens] for r in requests[:rows]]
        check(model, engine, requests[:rows], results)
        stats = engine.stats()
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
        assert stats["recoveries"] == 0


def test_seeded_rows_are_heard_as_well(listening):
    model, requests = models.build("tiny-full"), asked(sampling=SamplingParams(temperature=0.9, seed=3))
    known = answers(model, requests)
    engine = listening(model, known)
    check(model, engine, requests, engine.generate(requests))


@pytest.mark.parametrize("verify", [True, False])
def test_steps_are_neither_mixed_nor_compiled_while_somebody_listens(listening, verify):
    model, requests = models.build("tiny-full"), asked()
    engine = listening(model, answers(model, requests), scheduler={"verify": verify, "prefill_chunk": 8})
    check(model, engine, requests, engine.generate(requests))
    stats = engine.stats()
    assert stats["mixed_forwards"] == stats["compiled_steps"] == 0


@pytest.mark.parametrize(("setting", "refusal"), [("mixed", MixedRefused), ("compiled", CompiledRefused)])
def test_who_asks_for_such_steps_is_told(listening, setting, refusal):
    model = models.build("tiny-full")
    with pytest.raises(refusal, match="listens to hidden states"):
        listening(model, answers(model, asked()), scheduler={setting: True})


def test_what_is_restored_is_not_heard(listening):
    """A prefix that was known: the first state is that of the token behind it."""
    model, requests = models.build("tiny-full"), asked()
    known = answers(model, requests)
    engine = listening(model, known, state_cache={"name": "memory", "publish_min_tokens": 4})
    engine.generate(requests[:1])
    again = attrs.evolve(requests[0], id="again")
    results = engine.generate([again])
    cached = results[0].usage.cached_tokens
    assert cached > 0
    check(model, engine, [again], results, first=cached)


def test_rows_that_are_computed_again_are_heard_again(listening):
    """Preempted for want of memory: from the first token on."""
    model, requests = models.build("tiny-full"), asked()
    known = answers(model, requests)
    engine = listening(model, known, scheduler={"kv_budget": 1, "overcommit": 5.0, "prefill_chunk": 16})
    object.__setattr__(engine._driver.relief.budget, "limit", 2 * engine.bound.bytes_at(300))
    check(model, engine, requests, engine.generate(requests))


@pytest.mark.parametrize("at", [1, 4, 11])
def test_a_listener_that_raises_costs_no_row_and_hears_no_more(listening, at):
    model, requests = models.build("tiny-full"), asked()
    known = answers(model, requests)
    engine = listening(model, known, oracle={"raises_at": at})
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == [known[r.prompt_ids][: r.max_tokens] for r in requests]
    assert len(engine.oracle.calls) == at


def test_rows_that_end_before_they_join_are_dropped(listening):
    """A cancelled prompt, and one whose first token is its last."""
    model, requests = models.build("tiny-full"), asked()
    engine = listening(model, answers(model, requests), scheduler={"prefill_chunk": 4})
    long = engine.submit(attrs.evolve(requests[2], id="long"))
    engine.step()
    long.cancel()
    engine.generate(requests)
    engine.generate([attrs.evolve(requests[1], id="last")])
    assert {"long", *(request.id for request in requests)} <= engine.oracle.gone


def test_nobody_pays_who_does_not_ask(listening, monkeypatch):
    """No state is held for a proposer that does not listen, and none once the method is closed."""
    model = models.build("tiny-full")
    requests = asked()
    known = answers(model, requests)
    with Engine(
        model, plugins=[Oracle(answers=known)], config={"method": {"name": "speculative", "proposer": "oracle"}}
    ) as engine:
        engine.generate(requests)
        assert engine.bound.tap.listener is None
        assert not engine.bound.tap.path
    engine = listening(model, known)
    assert isinstance(engine.oracle, ListeningRows)
    assert isinstance(engine.oracle, ListeningProposer)
    assert not isinstance(Oracle(answers={}), ListeningRows)
    engine.generate(requests)
    assert engine.bound.tap.listener is engine.oracle
    engine.close()
    assert engine.bound.tap.listener is None


def test_a_model_that_cannot_be_tapped_is_refused_at_bind(listening):
    """One whose head calls past its body."""
    model = models.build("tiny-full")
    kind, body = type(model), type(model.model)

    class Past(kind):
        def __call__(self, ids, cache=None):
            return self.lm_head(body.__call__(self.model, ids, cache=cache))

    model.__class__ = Past
    with pytest.raises(ProposerRefused, match="hidden states") as caught:
        listening(model, {})
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_whose_rows_go_by_length_is_refused_at_bind(listening):
    with pytest.raises(ProposerRefused, match="different length"):
        listening(models.build("llama4"), {}, scheduler={"verify": True})
