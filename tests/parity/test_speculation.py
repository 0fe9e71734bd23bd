"""Drafts change no token: every proposer, in every storage, greedy and seeded, alone and in company that comes and goes.

A row's tokens are those of `plain`, alone in an engine. The oracle knows them and is wrong one time in five.
"""

from __future__ import annotations

import functools

import attrs
import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.composition.drafts import Drafts, spoiled
from oarlock.core.testing.composition.templates import Templates
from oarlock.core.testing.oracle import Oracle
from oarlock.samplers.categorical import Categorical, CategoricalRows

HEADS = {"head_dim": 32}
PARTS = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}


def packing(name, **options):
    """Full and rotating layers in 8 bits."""
    choice = {"name": name, "bits": 8, "group_size": 32, **options}
    return {"full": choice, "rotating": choice}


BLOCKS = {"full": {"name": "paged", "block_size": 16}}
STORAGES = {
    "full": ("tiny-full", {}, {}),
    "rings": ("tiny-ring", {}, {}),
    "sinks": ("gpt_oss", {"sliding_window": 8}, {}),
    "packed": ("tiny-full", HEADS, packing("quantized")),
    "packed rings": ("tiny-ring", HEADS, packing("quantized")),
    "delayed": ("tiny-full", HEADS, packing("delayed", start=17)),
    "delayed rings": ("tiny-ring", HEADS, packing("delayed", start=17)),
    "blocks": ("tiny-full", {}, BLOCKS),
    "gathered blocks": ("tiny-full", {}, {"full": {**BLOCKS["full"], "reads": "gather"}}),
    "packed blocks": ("tiny-full", HEADS, {"full": {**BLOCKS["full"], "bits": 8, "group_size": 32}}),
    "states": ("mamba2", {}, {}),
    "states that take padding": ("mamba", {}, {}),
    "states beside blocks": ("qwen3_next", {}, BLOCKS),
    "parts": ("falcon_h1", PARTS, {}),
    "chunks": ("llama4", {}, {}),
}
QUICK = ("full", "rings", "delayed rings", "blocks", "states that take padding", "states beside blocks", "chunks")
storages = pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in QUICK else pytest.mark.long) for key in STORAGES]
)
LENGTHS, LIMITS = (12, 3, 7, 1, 9), (30, 9, 22, 1, 26)
APART = {"packed": 9, "packed blocks": 9, "packed rings": 2, "delayed": 2, "delayed rings": 11}
"""Prompts, by seed, with which the two best scores of a greedy row are further apart than a code's last bit moves them.

Weights that are off by a ten-millionth move scores by up to 0.004 in packed storage, and 0.00002 in any other.
"""
DEPTH = 4
MARK, WORDS = 1e-9, 6
"""Rows with this min_p say so many different tokens."""
GREEDY = (SamplingParams(),) * 5
# In packed storage the last bit of a number decides about a code, and so about a draw near its edge: not with these seeds.
SEEDED = tuple(SamplingParams(temperature=0.8, top_p=0.95, seed=row) for row in range(20, 25))

FEW = {
    f"{name}, few": [attrs.evolve(each, min_p=MARK) for each in some]
    for name, some in (("greedy", GREEDY), ("seeded", SEEDED))
}
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED, **FEW}


@functools.cache
def model(key):
    name, changes, _ = STORAGES[key]
    return models.build(name, **changes)


@functools.cache
def vocabulary(key):
    return model(key)(mx.zeros((1, 1), dtype=mx.uint32)).shape[-1]


def prompts(key):
    return [tuple(prompt) for prompt in models.prompts(LENGTHS, min(97, vocabulary(key)), APART.get(key, 0))]


def requests(key, sampling, rows=5, **changes):
    return [
        Request(prompt_ids=prompt, max_tokens=limit, sampling=params, id=f"row {row}", **changes)
        for row, (prompt, limit, params) in enumerate(zip(prompts(key), LIMITS, sampling, strict=True))
    ][:rows]


def engine(key, method, plugins=(), **scheduler):
    config = {"layouts": STORAGES[key][2], "method": method, "scheduler": scheduler, "state_cache": {"name": "none"}}
    return Engine(model(key), config=config, plugins=plugins)


@functools.cache
def alone(key, sampling):
    """Tokens of each row alone, and how far the best two scores were apart at each."""
    scored = [attrs.evolve(params, logprobs=2) for params in SAMPLING[sampling]]
    with engine(key, {"name": "plain"}, [Few()], max_batch=1) as plain:
        results = plain.generate(requests(key, scored))
    gaps = [[each.top[0][1] - each.top[1][1] for each in result.logprobs] for result in results]
    return [result.token_ids for result in results], gaps


def check(key, sampling, results, opened):
    """Tokens, and that nothing was recovered; return how many drafts were accepted, and of how many."""
    tokens, gaps = alone(key, sampling)
    said = [result.token_ids for result in results]
    if sampling == "greedy":
        models.compare(said, tokens[: len(said)], gaps[: len(said)]).check()
    else:
        assert said == tokens[: len(said)]
    stats = opened.stats()
    assert stats["recoveries"] == 0
    assert stats["verified_forwards"] > 0
    assert stats["drafted_tokens"] == sum(result.usage.drafted_tokens for result in results)
    assert stats["accepted_tokens"] == sum(result.usage.accepted_tokens for result in results)
    return stats["accepted_tokens"], stats["drafted_tokens"]


def check_companies(arrival, key, sampling, method, plugin):
    """Up to one, two and five rows at a time, at once or one by one, until each had its turn.

    Each time some drafts are right and some are wrong.
    """
    for rows, every in ((1, 0), (2, 1), (5, 2)):
        with engine(key, method, [plugin], prefill_chunk=5, max_batch=rows) as opened:
            results = arrival(opened, requests(key, SAMPLING[sampling]), every)
            accepted, drafted = check(key, sampling, results, opened)
        assert 0 < accepted < drafted, f"{rows} rows"


def oracle(key, sampling, **options):
    answers = dict(zip(prompts(key), alone(key, sampling)[0], strict=True))
    return Oracle(answers=answers, vocabulary=vocabulary(key), **options)


class Catching(Oracle):
    """Drafts for the one of two rows that is behind, as many as take it to where the other stands."""

    def propose(self, rows, depths):
        reached = [row.prompt_tokens + len(row.token_ids) for row in rows]
        missing = [max(reached) - n if len(rows) == 2 else 0 for n in reached]
        return super().propose(rows, [min(pair) for pair in zip(depths, missing, strict=True)])


def test_rows_that_come_to_be_of_one_length_get_scores_of_their_own():
    """A model with one position for all rows: drafts lead two to one length, of which the second moved to the front."""
    key, tokens = "chunks", {}
    limits = ((1, 9), (2, 40), (4, 40))  # the shortest joins first, and leaves
    asked = [Request(prompt_ids=prompts(key)[row], max_tokens=limit, id=str(row)) for row, limit in limits]
    with engine(key, {"name": "plain"}, max_batch=1) as plain:
        for request, result in zip(asked, plain.generate(asked), strict=True):
            tokens[request.prompt_ids] = result.token_ids
    method = {"name": "speculative", "proposer": "oracle", "depth": DEPTH, "adaptive": False}
    for order in (asked, [asked[0], asked[2], asked[1]]):
        with engine(key, method, [Catching(answers=tokens, wrong=0.2, vocabulary=vocabulary(key))]) as opened:
            results = opened.generate(order)
            assert opened.stats()["accepted_tokens"] > 0
        assert [result.token_ids for result in results] == [tokens[request.prompt_ids] for request in order]


class FewRows(CategoricalRows):
    """Takes one of the first tokens only."""

    def sample(self, logits, keys, rows=None):
        few = mx.arange(logits.shape[-1]) < WORDS
        return super().sample(mx.where(few, logits, -mx.inf), keys, rows)


class Few(Categorical):
    """A sampler, and its plugin, that lets rows with a mark say few different tokens: then the text foretells them."""

    name = "few"
    is_argmax_invariant = False

    def handles(self, params):
        return params.min_p == MARK

    def open(self, params):
        return FewRows(params)

    @hookimpl
    def register_samplers(self, register):
        register(self)


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@storages
def test_the_oracles_drafts_change_no_token(arrival, key, sampling):
    """One, two and five rows, at once and one by one, with positions where some rows or all have no draft."""
    for rows, every, silent, pipeline in ((1, 0, 0.3, True), (2, 1, 0.3, False), (5, 0, 0.0, True), (5, 2, 0.3, True)):
        knows = oracle(key, sampling, silent=silent)
        method = {"name": "speculative", "proposer": "oracle", "depth": DEPTH, "adaptive": False}
        with engine(key, method, [knows], pipeline=pipeline, prefill_chunk=5) as opened:
            results = arrival(opened, requests(key, SAMPLING[sampling], rows), every)
            accepted, drafted = check(key, sampling, results, opened)
        assert 0 < accepted < drafted
        assert not knows.known, "rows that left are forgotten"


@pytest.mark.parametrize("sampling", FEW)
@storages
def test_drafts_from_the_text_change_no_token(arrival, key, sampling):
    """The proposer `ngram`, from single tokens on, in texts of few words: it is often right and often wrong."""
    method = {"name": "speculative", "proposer": {"name": "ngram", "min_n": 1}, "depth": DEPTH, "adaptive": False}
    check_companies(arrival, key, sampling, method, Few())


def erring(key):
    """A storage's own model, a little off."""
    name, changes, _ = STORAGES[key]
    return spoiled(models.build(name, **changes))


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@storages
def test_a_models_drafts_change_no_token(arrival, key, sampling):
    """The proposer `draft_model`, of the same kind as the model: its own caches turn, pack and keep states as well."""
    proposer = {"name": "draft_model", "model": key}
    method = {"name": "speculative", "proposer": proposer, "depth": DEPTH, "adaptive": False}
    check_companies(arrival, key, sampling, method, Drafts({key: functools.partial(erring, key)}))


def templates(key, sampling, rows=5, **changes):
    """Two of five rows are free, and of the others one is looked at between its tokens."""
    asked = requests(key, sampling, rows, **changes)
    bound = [attrs.evolve(asked[row], constraint={"template": row}) for row in range(rows) if row % 2 == 0]
    if rows == 5:
        bound[2] = attrs.evolve(bound[2], sampling=attrs.evolve(bound[2].sampling, presence_penalty=0.5))
    return [bound[row // 2] if row % 2 == 0 else asked[row] for row in range(rows)]


@functools.cache
def templates_alone(key, sampling):
    """Tokens of each row alone, every one of them drawn."""
    with engine(key, {"name": "plain"}, [Templates(vocabulary(key), says=False)], max_batch=1) as plain:
        results = plain.generate(templates(key, SAMPLING[sampling]))
    assert not any(result.usage.forced_tokens for result in results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@storages
def test_known_tokens_change_no_token(arrival, key, sampling):
    """The method `fill`: rows append what they know, each as much as it is, beside rows that take their one."""
    tokens = templates_alone(key, sampling)
    for rows, every, pipeline in ((1, 0, True), (2, 1, False), (5, 0, True), (5, 2, True), (5, 3, False)):
        method = {"name": "fill", "adaptive": False}
        with engine(key, method, [Templates(vocabulary(key))], pipeline=pipeline, prefill_chunk=5) as opened:
            results = arrival(opened, templates(key, SAMPLING[sampling], rows), every)
            assert opened.stats()["recoveries"] == 0
        assert [result.token_ids for result in results] == tokens[:rows]
        # Of 30, six are free and the last is the limit's; a span stops where a storage does, and one more is drawn.
        assert 19 <= results[0].usage.forced_tokens <= 23
        assert all(result.usage.forced_tokens == 0 for result in results[1::2])


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@storages
def test_known_tokens_beside_drafts_change_no_token(arrival, key, sampling):
    """The method `speculative`: rows that know tokens have them in the place of drafts, and in no count of drafts."""
    tokens = templates_alone(key, sampling)
    answers = dict(zip(prompts(key), tokens, strict=True))
    accepted = drafted = 0
    for rows, every, pipeline in ((2, 0, True), (5, 2, False)):
        oracle = Oracle(answers=answers, vocabulary=vocabulary(key))
        method = {"name": "speculative", "proposer": "oracle", "depth": DEPTH, "adaptive": False}
        with engine(key, method, [oracle, Templates(vocabulary(key))], pipeline=pipeline, prefill_chunk=5) as opened:
            results = arrival(opened, templates(key, SAMPLING[sampling], rows), every)
            stats = opened.stats()
        assert [result.token_ids for result in results] == tokens[:rows]
        assert results[0].usage.forced_tokens > 0
        assert stats["recoveries"] == 0
        assert stats["drafted_tokens"] == sum(result.usage.drafted_tokens for result in results)
        assert stats["accepted_tokens"] == sum(result.usage.accepted_tokens for result in results)
        accepted, drafted = accepted + stats["accepted_tokens"], drafted + stats["drafted_tokens"]
    assert 0 < accepted < drafted
