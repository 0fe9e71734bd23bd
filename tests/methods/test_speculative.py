"""Speculative decoding in engines: ends within a burst, failures, company, what is stored, and what is said at bind."""

import itertools
from types import SimpleNamespace

import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.contracts.method import CheckedMethod
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue, ProposerRefused, UnknownConfigKey, UnknownName
from oarlock.core.result import FinishReason
from oarlock.core.sampling import PendingDraw
from oarlock.core.testing import models
from oarlock.core.testing.oracle import Oracle
from oarlock.methods.plain import PlainDecoding
from oarlock.methods.speculative import Speculative

LENGTHS, TOKENS, DEPTH = (12, 3, 40, 1, 9), 24, 4
PROMPTS = [tuple(prompt) for prompt in models.prompts(LENGTHS, 97)]


@pytest.fixture(scope="module")
def tiny():
    return models.build("tiny-full")


@pytest.fixture(scope="module")
def states():
    return models.build("mamba2")


@pytest.fixture(scope="module")
def serial(tiny):
    return {prompt: models.serial(tiny, prompt, TOKENS + 20).tokens for prompt in PROMPTS}


@pytest.fixture
def speculating():
    """Open engines with this method; what they were is closed with the test."""
    opened = []

    def make(model, plugins=(), method=(), **sections):
        chosen = {"name": "speculative", "depth": DEPTH, "adaptive": False, **dict(method)}
        scheduler = {"verify": False, **sections.pop("scheduler", {})}
        config = {"state_cache": {"name": "none"}, "method": chosen, "scheduler": scheduler, **sections}
        opened.append(Engine(model, config=config, plugins=plugins, identity="weights"))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def knowing(serial, speculating):
    """Likewise with the oracle, which is in ``engine.oracle``."""

    def make(model, *, wrong=0.2, silent=0.0, method=(), answers=serial, **sections):
        oracle = Oracle(answers=answers, wrong=wrong, silent=silent)
        engine = speculating(model, [oracle], {"proposer": "oracle", **dict(method)}, **sections)
        engine.oracle = oracle
        return engine

    return make


def asks(count=5, **changes):
    return [Request(**{"prompt_ids": prompt, "max_tokens": TOKENS, **changes}) for prompt in PROMPTS[:count]]


def tokens(results):
    return [list(result.token_ids) for result in results]


def wanted(serial, limit=TOKENS):
    return [list(serial[prompt][:limit]) for prompt in PROMPTS]


# --- fewer forwards ----------------------------------------------------------------------------------------------


def test_drafts_that_are_right_save_forwards(tiny, serial, knowing):
    """Five tokens a forward: 24 of them take one from the prompt and five windows, the last of three."""
    engine = knowing(tiny, wrong=0.0)
    result = engine.generate(asks(1))[0]
    assert list(result.token_ids) == wanted(serial)[0]
    stats = engine.stats()
    assert stats["verified_forwards"] == 5
    assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (4 * 4 + 2, 4 * 4 + 2)
    assert stats["drafted_by_position"] == stats["accepted_by_position"] == [5, 5, 4, 4]
    assert stats["tokens_per_verify"] == 23 / 5
    assert (result.usage.drafted_tokens, result.usage.accepted_tokens) == (18, 18)


def test_the_proposer_hears_what_became_of_its_drafts(tiny, knowing):
    engine = knowing(tiny)
    engine.generate(asks(2))
    accepted = [count for _, count in engine.oracle.committed]
    assert 0 in accepted
    assert DEPTH in accepted
    assert not engine.oracle.known


def test_drafts_are_counted_by_their_position(tiny, knowing):
    """SPEC 15.16: by what the proposer heard, since a draft is accepted only behind those before it."""
    engine = knowing(tiny)
    results = engine.generate(asks())
    stats, windows = engine.stats(), [count for _, count in engine.oracle.committed]
    accepted, drafted = stats["accepted_by_position"], stats["drafted_by_position"]
    assert sum(accepted) == sum(result.usage.accepted_tokens for result in results)
    assert sum(drafted) == sum(result.usage.drafted_tokens for result in results)
    assert len(drafted) == DEPTH
    for position, (right, made) in enumerate(zip(accepted, drafted, strict=True)):
        assert sum(count > position for count in windows) <= right < made
    assert accepted == sorted(accepted, reverse=True)
    alone = knowing(tiny)
    alone.generate(asks(1))
    said = alone.stats()
    assert said["tokens_per_verify"] == pytest.approx(1 + said["accepted_tokens"] / said["verified_forwards"])
    assert stats["tokens_per_verify"] > said["tokens_per_verify"]


@pytest.mark.parametrize("pipeline", [True, False])
def test_without_drafts_it_is_plain_decoding(tiny, serial, knowing, pipeline, monkeypatch):
    """The same forwards, and the next step is built before the previous one is read."""
    order, step, read = [], PlainDecoding._step, PendingDraw.read
    monkeypatch.setattr(PlainDecoding, "_step", lambda *given: order.append("build") or step(*given))
    monkeypatch.setattr(PendingDraw, "read", lambda draw: order.append("read") or read(draw))
    engine = knowing(tiny, silent=1.0, scheduler={"pipeline": pipeline})
    assert tokens(engine.generate(asks(1))) == wanted(serial)[:1]
    assert engine.stats()["verified_forwards"] == engine.stats()["tokens_per_verify"] == 0
    assert engine.stats()["accepted_by_position"] == []
    assert order[1:4] == (["build", "build", "read"] if pipeline else ["build", "read", "build"])


def test_depths_go_by_the_row(tiny, serial, speculating):
    """Rows beside each other have drafts of their own number, or none, in one window."""
    seen = []

    class Uneven(Oracle):
        def propose(self, rows, depths):
            drafts = super().propose(rows, depths)
            drafts = [draft[: PROMPTS.index(row.prompt_ids)] for row, draft in zip(rows, drafts, strict=True)]
            seen.append([len(draft) for draft in drafts])
            return drafts

    engine = speculating(tiny, [Uneven(answers=serial)], {"proposer": "oracle"})
    assert tokens(engine.generate(asks())) == wanted(serial)
    assert any({0, 1, 3, 4} <= set(depths) for depths in seen)
    assert engine.stats()["recoveries"] == 0


def test_an_adaptive_depth_changes_no_token(tiny, serial, speculating):
    """Whatever the clock says."""
    texts = [Request(prompt_ids=prompt * 3, max_tokens=60) for prompt in PROMPTS[:3]]
    alone = [models.serial(tiny, prompt * 3, 60).tokens for prompt in PROMPTS[:3]]
    engine = speculating(tiny, method={"proposer": "ngram", "adaptive": True})
    assert [result.token_ids for result in engine.generate(texts)] == alone


# --- ends within a burst -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(1, 14))
def test_a_limit_within_a_burst_is_kept(tiny, serial, knowing, limit):
    engine = knowing(tiny, wrong=0.0)
    for result, full in zip(engine.generate(asks(3, max_tokens=limit)), wanted(serial, limit), strict=False):
        assert (list(result.token_ids), result.finish_reason) == (full, FinishReason.LENGTH)
        assert result.usage.generated_tokens == limit


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_within_a_burst_ends_the_row(tiny, serial, knowing, place):
    """What was drawn behind it is dropped, and counted nowhere."""
    prompt = PROMPTS[0]
    stop = serial[prompt][place]
    first = serial[prompt].index(stop)
    engine = knowing(tiny, wrong=0.0)
    result, other = engine.generate([asks(1, stop_token_ids=(stop,))[0], *asks(2)[1:]])
    assert (result.finish_reason, list(result.token_ids)) == (FinishReason.STOP, list(serial[prompt][:first]))
    assert result.usage.generated_tokens == first + 1
    assert list(other.token_ids) == wanted(serial)[1]


@pytest.mark.parametrize("place", range(1, 8))
@pytest.mark.parametrize("what", ["stops", "raises", "cancels"])
def test_a_consumer_within_a_burst_is_heard_at_once(tiny, serial, knowing, what, place):
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

    engine = knowing(tiny, wrong=0.0)
    handles += [engine.submit(request) for request in (asks(1, on_token=consumer)[0], *asks(3)[1:])]
    others = [handle.result() for handle in handles[1:]]
    assert told == wanted(serial)[0][:place]
    assert tokens(others) == wanted(serial)[1:3]
    if what == "raises":
        with pytest.raises(LookupError):
            handles[0].result()
    else:
        reason = FinishReason.STOP if what == "stops" else FinishReason.CANCELLED
        assert handles[0].result().finish_reason == reason
        assert handles[0].result().usage.generated_tokens == place


# --- failures ----------------------------------------------------------------------------------------------------


class Failing:
    """A model whose forwards of a window raise at these counts, or while ``poison`` is among the tokens."""

    def __init__(self, model, at=(), poison=None):
        self._model, self.at, self.poison, self.calls, self.failed = model, set(at), poison, 0, 0

    def __call__(self, ids, cache, **named):
        window = ids.shape[1] > 1 and any(cache[0].tokens)
        self.calls += window
        if window and (self.calls in self.at or (self.poison is not None and self.poison in ids.tolist()[0])):
            self.failed += 1
            raise RuntimeError("the forward failed")
        return self._model(ids, cache=cache, **named)

    def __getattr__(self, name):
        return getattr(self._model, name)


def with_failures(engine, **how):
    failing = Failing(engine.bound.model, **how)
    object.__setattr__(engine.bound, "model", failing)
    return failing


@pytest.mark.parametrize("at", [[1], [2, 4], [3, 6]])
def test_a_window_that_fails_is_verified_again(tiny, serial, knowing, at):
    """In place: nothing is prefilled anew, no token is lost and none comes twice."""
    engine = knowing(tiny, scheduler={"prefill_chunk": 64})
    failing = with_failures(engine, at=at)
    assert tokens(engine.generate(asks(3))) == wanted(serial)[:3]
    assert failing.failed == len(at)
    assert engine.stats()["recoveries"] in (1, 2)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_second_forward_of_states_that_fails_costs_no_token(states, speculating, at):
    """Recurrent layers are given again what was accepted; whichever forward fails, the rows say the same."""
    serial = {prompt: models.serial(states, prompt, TOKENS).tokens for prompt in PROMPTS[:3]}
    engine = speculating(states, [Oracle(answers=serial, vocabulary=128)], {"proposer": "oracle"})
    failing = with_failures(engine, at=[at])
    assert tokens(engine.generate(asks(3))) == [list(serial[prompt]) for prompt in PROMPTS[:3]]
    assert failing.failed == 1


def test_a_device_that_fails_costs_no_token(tiny, serial, knowing, monkeypatch):
    """At the one read of a window: everything is computed again from what was delivered."""
    read, counts = PendingDraw.read, itertools.count(1)

    def fails(draw):
        if next(counts) in (3, 9):
            raise RuntimeError("the device failed")
        return read(draw)

    monkeypatch.setattr(PendingDraw, "read", fails)
    engine = knowing(tiny, silent=0.3)
    assert tokens(engine.generate(asks(3))) == wanted(serial)[:3]
    assert engine.stats()["recoveries"] == 2


def test_a_proposer_that_raises_costs_drafts_and_no_row(tiny, serial, speculating):
    class Broken(Oracle):
        def propose(self, rows, depths):
            raise KeyError("lost my tables")

    engine = speculating(tiny, [Broken(answers=serial)], {"proposer": "oracle"})
    assert tokens(engine.generate(asks(2))) == wanted(serial)[:2]
    assert engine.stats()["verified_forwards"] == 0


# --- with everything else ------------------------------------------------------------------------------------------


def test_chunks_are_taken_along_by_windows(tiny, serial, knowing):
    """Mixed forwards: a joiner's prompt beside the drafts of running rows."""
    engine = knowing(tiny, silent=0.2, scheduler={"mixed": True, "prefill_chunk": 4, "verify": True})
    handles = []
    for request in asks():
        handles.append(engine.submit(request))
        engine.step()
        engine.step()
    assert tokens([handle.result() for handle in handles]) == wanted(serial)
    stats = engine.stats()
    assert stats["mixed_forwards"] > 0
    assert stats["recoveries"] == 0


def test_rows_that_give_way_go_on_with_their_tokens(tiny, serial, knowing):
    """Preempted under a budget of bytes and computed again later."""
    engine = knowing(tiny, scheduler={"kv_budget": 1, "overcommit": 5.0, "prefill_chunk": 16})
    budget = engine._driver.relief.budget
    object.__setattr__(budget, "limit", 2 * engine.bound.bytes_at(300))
    assert tokens(engine.generate(asks())) == wanted(serial)


@pytest.mark.parametrize("layout", ["full", "paged"])
def test_prefixes_of_rows_that_drafted_are_used_again(tiny, serial, knowing, layout):
    """What is stored of a row that ended within a burst is exactly what it says, and a later row goes on from it."""
    cache = {"name": "memory", "publish_min_tokens": 4}
    engine = knowing(tiny, wrong=0.0, layouts={"full": layout}, state_cache=cache)
    prompt = PROMPTS[2]
    for limit in (7, 9, 12):
        (first,) = engine.generate([Request(prompt_ids=prompt, max_tokens=limit)])
        assert list(first.token_ids) == list(serial[prompt][:limit])
        longer = (*prompt, *serial[prompt][:limit])
        engine.oracle.answers = {**serial, longer: serial[prompt][limit:]}
        (second,) = engine.generate([Request(prompt_ids=longer, max_tokens=TOKENS - limit)])
        assert list(second.token_ids) == list(serial[prompt][limit:TOKENS])
        assert second.usage.cached_tokens >= len(prompt) + limit - 2


def test_a_window_that_wrapped_is_stored_as_a_plain_row_stores_it(speculating):
    """Rings have slack for the drafts; a row restored from one without joins and drafts as well."""
    model = models.build("tiny-ring")
    serial = {prompt: models.serial(model, prompt, TOKENS).tokens for prompt in PROMPTS}
    oracle = Oracle(answers=serial, wrong=0.2)
    cache = {"name": "memory", "publish_min_tokens": 4}
    engine = speculating(model, [oracle], {"proposer": "oracle"}, state_cache=cache)
    prompt = PROMPTS[2]
    for _ in range(2):
        results = engine.generate([Request(prompt_ids=prompt, max_tokens=TOKENS)])
        assert tokens(results) == [list(serial[prompt])]
    assert results[0].usage.cached_tokens == len(prompt) - 1
    assert tokens(engine.generate(asks())) == [list(serial[each]) for each in PROMPTS]


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_next_process_goes_on_from_a_checkpoint(tiny, serial, knowing, tmp_path, steps):
    cache = {"name": "memory", "prefix_bytes": 0, "checkpoints": str(tmp_path)}
    sampling = SamplingParams(temperature=1.0, seed=4)
    asked = [
        Request(**{"prompt_ids": prompt, "max_tokens": TOKENS, "id": f"r{i}", "checkpoint_interval": 3, **more})
        for i, (prompt, more) in enumerate(zip(PROMPTS[:2], ({}, {"sampling": sampling}), strict=True))
    ]
    with Engine(tiny, config={"scheduler": {"verify": False}, "state_cache": {"name": "none"}}) as plain:
        alone = tokens(
            plain.generate([Request(prompt_ids=r.prompt_ids, max_tokens=TOKENS, sampling=r.sampling) for r in asked])
        )
    answers = dict(zip(PROMPTS[:2], map(tuple, alone), strict=True))
    first = knowing(tiny, answers=answers, state_cache=cache)
    handles = [first.submit(request) for request in asked]
    for _ in range(steps):
        first.step()
    known = [list(handle._row.token_ids) for handle in handles]
    for each in first._store._store._directories:
        each.flush()
    second = knowing(tiny, answers=answers, state_cache=cache)
    results = second.generate(asked)
    assert tokens(results) == alone
    assert all(said == full[: len(said)] for said, full in zip(known, alone, strict=True))


def test_logprobs_are_those_of_plain_decoding(tiny, serial, knowing):
    """Of every token, accepted drafts included."""
    sampling = SamplingParams(logprobs=3)
    with Engine(tiny, config={"scheduler": {"verify": False}}) as plain:
        alone = plain.generate(asks(3, sampling=sampling))
    for got, want in zip(knowing(tiny).generate(asks(3, sampling=sampling)), alone, strict=True):
        assert got.token_ids == want.token_ids
        for one, two in zip(got.logprobs, want.logprobs, strict=True):
            assert one.token == two.token
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in two.top], abs=1e-4)


def test_it_holds_no_more_tokens_than_it_says(tiny, knowing):
    """`running_tokens` is what the next forward takes at most (SPEC 15.17): no row drafts beyond its last token."""
    engine, seen = knowing(tiny, wrong=0.0), []
    group = engine._driver.group
    forward = group.forward
    group.forward = lambda caches, ids, *rest: (
        seen.append((group._method.running_tokens, ids.size)) or forward(caches, ids, *rest)
    )
    engine.generate(
        [Request(prompt_ids=prompt, max_tokens=limit) for prompt, limit in zip(PROMPTS, (3, 9, 11), strict=False)]
    )
    assert seen
    assert all(said >= taken for said, taken in seen)
    assert any(said == taken for said, taken in seen)


# --- at bind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "error", "names"),
    [
        ({"proposer": "engram"}, UnknownName, "ngram"),
        ({"proposer": {"min_n": 3}}, InvalidConfigValue, "name"),
        ({"proposer": {"name": "ngram", "min": 3}}, UnknownConfigKey, "min_n"),
        ({"proposer": {"name": "ngram", "min_n": 9}}, InvalidConfigValue, "max_n 8"),
        ({"depth": -1}, InvalidConfigValue, "depth"),
        ({"depth": 2.0}, InvalidConfigValue, "depth"),
        ({"adaptive": 1}, InvalidConfigValue, "adaptive"),
        ({"deep": 4}, UnknownConfigKey, "depth"),
    ],
)
def test_what_cannot_be_done_is_said_at_bind(tiny, speculating, method, error, names):
    """Not when the first request has come."""
    with pytest.raises(error, match=names) as caught:
        speculating(tiny, method={"proposer": "ngram", **method})
    assert len(str(caught.value).splitlines()) == 1


def test_a_proposer_may_refuse_a_model(tiny, speculating):
    with pytest.raises(ProposerRefused, match="another vocabulary") as caught:
        speculating(tiny, [Oracle(answers={}, refusal="it has another vocabulary")], {"proposer": "oracle"})
    assert (caught.value.proposer, caught.value.reason) == ("oracle", "it has another vocabulary")
    assert isinstance(caught.value, ValueError)


def test_a_depth_of_none_is_plain_decoding(tiny, serial, knowing):
    engine = knowing(tiny, method={"depth": 0})
    assert tokens(engine.generate(asks(2))) == wanted(serial)[:2]
    assert (engine.stats()["verified_forwards"], engine.stats()["drafted_tokens"]) == (0, 0)


def test_only_some_methods_are_checked():
    assert isinstance(Speculative(), CheckedMethod)
    assert not isinstance(SimpleNamespace(name="plain"), CheckedMethod)
