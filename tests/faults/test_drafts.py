"""Kind E: drafts change no token, at no place of a block, in no storage, whatever else a request asks for."""

import itertools

import attrs
import pytest

from oarlock.core import FinishReason, SamplingParams, forward
from oarlock.core.errors import InvalidConfigValue, ProposerRefused, UnknownName
from oarlock.core.sampling import PendingDraw
from oarlock.core.testing.oracle import Oracle
from oarlock.layouts.rotating import RingCache
from oarlock.methods.speculative import Speculative, SpeculativeDecoding

SETTLE = forward.settle


def speculative(depth=4, **options):
    return {"name": "speculative", "proposer": "oracle", "depth": depth, "adaptive": False, **options}


def check_drafts(bench, key, lengths, depth, n=30, wrong=0.3):
    """Rows of a storage, with drafts of which some are wrong, say what each says alone; some were accepted, some not."""
    prompts = [tuple(prompt) for prompt in bench.prompts(lengths, 97)]
    alone = [bench.row_alone(key, prompt, n) for prompt in prompts]
    answers = {prompt: tokens for prompt, (tokens, _) in zip(prompts, alone, strict=True)}
    vocabulary = 1 + max(max(tokens) for tokens, _ in alone)
    oracle = Oracle(answers=answers, wrong=wrong, vocabulary=vocabulary)
    layouts = bench.STORAGES[key].layouts
    engine = bench.engine(bench.stored(key), layouts=layouts, plugins=[oracle], method=speculative(depth))
    said = bench.run(engine, [bench.ask(*prompt, n=n) for prompt in prompts])
    bench.compare(said, *zip(*alone, strict=True)).check()
    stats = engine.stats()
    assert stats["recoveries"] == 0
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


# --- windows ------------------------------------------------------------------------------------------------------

AROUND = (2, 5, 7, 8, 9, 15, 30)
"""Prompts shorter than a window of 8, just as long, and longer."""
wrapping = pytest.mark.parametrize("key", ["rings", "packed rings", "delayed rings"])


@pytest.mark.fault("E-01")
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@wrapping
def test_rejected_drafts_leave_a_window_that_wrapped(bench, key, depth):
    check_drafts(bench, key, AROUND, depth)


@pytest.mark.fault("E-01", twin=True)
def test_twin_rejected_drafts_that_stay_once_it_wrapped_are_noticed(bench, planted, monkeypatch):
    begin, commit = RingCache.begin, RingCache.commit

    def noting(self, widths, starts):
        self.noted = list(widths)
        begin(self, widths, starts)

    def staying(self, kept):
        wrapped = any(kept) and self.tokens and max(self.tokens) > self.ring.window
        commit(self, self.noted if wrapped else kept)

    monkeypatch.setattr(RingCache, "begin", noting)
    monkeypatch.setattr(RingCache, "commit", staying)
    with planted(RuntimeError):
        check_drafts(bench, "rings", AROUND, 3)


# --- states -------------------------------------------------------------------------------------------------------


@pytest.mark.fault("E-02")
@pytest.mark.parametrize("key", ["states", "states that take padding", "states beside blocks", "parts"])
def test_rejected_drafts_leave_no_trace_in_a_state(bench, key):
    """From the first request on: nothing is refused late."""
    check_drafts(bench, key, (12, 3, 7), 3, n=16)


@pytest.mark.fault("E-02", twin=True)
def test_twin_states_that_keep_rejected_drafts_are_noticed(bench, planted, monkeypatch):
    def keeping(bound, caches, ids, widths, kept, rows=()):
        for cache in caches:
            cache.commit(kept if cache.rewinds else widths)

    monkeypatch.setattr(forward, "settle", keeping)
    with planted(RuntimeError):
        check_drafts(bench, "states", (12, 3, 7), 3, n=16)


# --- rows that accept different counts ------------------------------------------------------------------------------


class Uneven(Oracle):
    """Right for three, one and no tokens of a draft, by the row."""

    right = (3, 1, 0)

    def _draft(self, row, depth):
        done = len(row.token_ids)
        right = self.right[list(self.answers).index(row.prompt_ids)]
        answer = self.answers[row.prompt_ids][done : done + depth]
        return [(token + (place >= right)) % self.vocabulary for place, token in enumerate(answer)]


def check_uneven(bench, key):
    """Each row takes what is right of its own draft and one more, and holds no key besides."""
    prompts = [tuple(prompt) for prompt in bench.prompts((20, 3, 9), 97)]
    alone = [bench.row_alone(key, prompt, 24) for prompt in prompts]
    vocabulary = 1 + max(max(tokens) for tokens, _ in alone)
    oracle = Uneven(answers=dict(zip(prompts, [t for t, _ in alone], strict=True)), vocabulary=vocabulary)
    layouts = bench.STORAGES[key].layouts
    engine = bench.engine(bench.stored(key), layouts=layouts, plugins=[oracle], method=speculative(3))
    handles = [engine.submit(bench.ask(*prompt, n=24)) for prompt in prompts]
    group = engine._driver.group
    while not all(handle.done for handle in handles):
        engine.step()
        for cache in group._method.caches() if group.rows else ():
            assert cache.tokens == tuple(row.prompt_tokens + len(row.fed) for row in group.rows)
    said = [handle.result().token_ids for handle in handles]
    bench.compare(said, *zip(*alone, strict=True)).check()
    assert engine.stats()["recoveries"] == 0
    accepted = {name: [count for row, count in oracle.committed if row == name] for name, _ in oracle.committed}
    most = [max(accepted[handle._row.id]) for handle in handles]
    assert most == [3, 1, 0]


@pytest.mark.fault("E-03")
@pytest.mark.parametrize("key", ["full", "rings", "packed", "delayed", "blocks", "gathered blocks", "states", "chunks"])
def test_each_row_advances_by_what_it_accepted(bench, key):
    check_uneven(bench, key)


@pytest.mark.fault("E-03", twin=True)
@pytest.mark.parametrize("key", ["full", "rings", "blocks"])
def test_twin_rows_that_advance_alike_are_noticed(bench, planted, monkeypatch, key):
    def alike(bound, caches, ids, widths, kept, rows=()):
        SETTLE(bound, caches, ids, widths, [min(max(kept), width) for width in widths], rows)

    monkeypatch.setattr(forward, "settle", alike)
    with planted(RuntimeError):
        check_uneven(bench, key)


# --- ends within a block ----------------------------------------------------------------------------------------------

WORDS = {5: "al", 6: "pha be", 10: "ta", 11: " gam", 12: "ma", 13: " del", 14: "ta ep", 7: "<end>", 8: "<eot>"}
SAID = (5, 6, 10, 11, 12, 13, 14, 5, 6, 10, 11, 12)
LIMITS = range(1, 10)
STOPS = ["al", "pha", "beta", "gamma", "mma d", "delta", "ep", "alpha beta gamma delta", "nowhere"]


def check_ends(bench):
    """One of two ids that end it, a stop string, a limit at every place of a block: as without drafts, reason and all."""
    ended = {30 + place: (*SAID[:place], 7 + place % 2, *SAID) for place in range(8)}
    scripts = {3: SAID, **ended}
    answers = {(first,): script for first, script in scripts.items()}
    requests = [bench.ask(first, n=11) for first in ended]
    requests += [bench.ask(3, n=limit) for limit in LIMITS]
    requests += [bench.ask(3, n=11, stop=stop, include_stop=keep) for stop in STOPS for keep in (False, True)]
    outcomes = []
    for method in ({"name": "plain"}, speculative(4)):
        plugins = [Oracle(answers=answers, wrong=0.0)] if method["name"] != "plain" else []
        engine = bench.engine(bench.Scripted(scripts), bench.Words(WORDS, {7, 8}), plugins, method=method)
        results = engine.generate(requests)
        outcomes.append(
            [(r.token_ids, r.text, r.finish_reason, r.usage.generated_tokens, len(r.token_ids)) for r in results]
        )
    assert engine.stats()["accepted_tokens"] > 2 * len(requests)
    assert outcomes[0] == outcomes[1]
    assert [r[2] for r in outcomes[1][: len(ended)]] == [FinishReason.STOP] * len(ended)


@pytest.mark.fault("E-08", "N-01", "N-05", "N-08")
def test_ends_within_a_block_are_those_of_plain_decoding(bench):
    check_ends(bench)


@pytest.mark.fault("E-08", "N-05", twin=True)
def test_twin_blocks_that_are_delivered_whole_are_noticed(bench, planted, monkeypatch):
    deliver = SpeculativeDecoding._take

    def whole(self, row, window, lines, known=0):
        right = next((i for i, draft in enumerate(window[1:]) if lines[i].token != draft), len(window) - 1)
        row.token_ids += [line.token for line in lines[:right]]
        row.generated += right
        return right + deliver(self, row, window[right:], lines[right:])

    monkeypatch.setattr(SpeculativeDecoding, "_take", whole)
    with planted(RuntimeError):
        check_ends(bench)


# --- together with everything else ------------------------------------------------------------------------------------

ASKED = {
    "seed": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "logprobs": {"logprobs": 4},
    "stop ids": {},
    "limit": {},
}


def check_together(bench):
    """Every pair, and all of them: tokens, log-probabilities and reasons are those of plain decoding."""
    model, prompts = bench.tiny(), bench.prompts((12, 3, 9), 97)
    for chosen in [*itertools.combinations(ASKED, 2), tuple(ASKED)]:
        sampling = SamplingParams(**{key: value for name in chosen for key, value in ASKED[name].items()})
        fields = {"sampling": sampling, "n": 11 if "limit" in chosen else 20}
        fields["stop_token_ids"] = tuple(range(0, 97, 9)) if "stop ids" in chosen else ()
        requests = [bench.ask(*prompt, **fields) for prompt in prompts]
        plain = bench.engine(model).generate(requests)
        free = [attrs.evolve(request, max_tokens=40, stop_token_ids=()) for request in requests]
        known = bench.engine(model).generate(free)
        answers = {request.prompt_ids: result.token_ids for request, result in zip(requests, known, strict=True)}
        engine = bench.engine(model, plugins=[Oracle(answers=answers)], method=speculative(3))
        for got, want in zip(engine.generate(requests), plain, strict=True):
            assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
            assert (got.logprobs is None) == (want.logprobs is None)
            for one, two in zip(got.logprobs or (), want.logprobs or (), strict=True):
                assert one.token == two.token
                assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
                assert len(one.top) == len(two.top) == 4
        assert engine.stats()["drafted_tokens"] > 0


@pytest.mark.fault("E-09")
def test_drafts_go_with_everything_that_a_request_may_ask_for(bench):
    """As far as it may: what processors and grammars bring comes with them."""
    check_together(bench)


@pytest.mark.fault("E-09", twin=True)
def test_twin_records_of_one_token_a_row_are_noticed(bench, planted, monkeypatch):
    read = PendingDraw._read_logprobs
    monkeypatch.setattr(PendingDraw, "_read_logprobs", lambda self, ids: read(self, ids)[:3] + [None] * (len(ids) - 3))
    with planted():
        check_together(bench)


# --- options ------------------------------------------------------------------------------------------------------------


UNUSABLE = [
    ({"proposer": "nobody"}, UnknownName),
    ({"proposer": "oracle"}, ProposerRefused),
    ({"proposer": ""}, InvalidConfigValue),
    ({"depth": -2}, InvalidConfigValue),
]


def check_refused(bench, options, error):
    """When the engine is built, not at the first request."""
    oracle = Oracle(answers={}, refusal="it knows nothing")
    with pytest.raises(error):
        bench.engine(bench.tiny(), plugins=[oracle], method={"name": "speculative", **options})


@pytest.mark.fault("E-10")
@pytest.mark.parametrize(("options", "error"), UNUSABLE)
def test_options_without_a_usable_draft_are_refused_when_the_engine_is_built(bench, options, error):
    check_refused(bench, options, error)


@pytest.mark.fault("E-10", twin=True)
@pytest.mark.parametrize(("options", "error"), UNUSABLE[:2])
def test_twin_a_draft_that_is_looked_for_later_is_noticed(bench, planted, monkeypatch, options, error):
    monkeypatch.setattr(Speculative, "check", lambda *_: None)
    with planted():
        check_refused(bench, options, error)


@pytest.mark.fault("E-10")
def test_a_depth_of_none_is_shown_to_draft_nothing(bench):
    oracle = Oracle(answers={(3, 5): (1,) * 9})
    engine = bench.engine(bench.tiny(), plugins=[oracle], method=speculative(0))
    assert bench.run(engine, [bench.ask(3, 5)]) == bench.alone(bench.tiny(), [bench.ask(3, 5)])
    assert engine.stats()["drafted_tokens"] == engine.stats()["verified_forwards"] == 0
