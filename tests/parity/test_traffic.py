"""A row's tokens do not depend on how it was scheduled: chunks, joins, leaves, limits, pipeline, sampling, company."""

import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import ModelNotBatchable
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache, FullLayout, FullOptions

NAME = "tiny-full"
TOKENS = 24
LENGTHS = (12, 3, 7, 1, 9, 2, 30, 5)


def run(zoo, arrival, requests, every=0, layout=None, **settings):
    config = {"scheduler": settings, "layouts": {"full": "broken"} if layout else {}}
    with Engine(zoo.model(NAME), config=config, plugins=[layout] if layout else []) as engine:
        results = arrival(engine, requests, every)
        assert engine.stats()["recoveries"] == 0
    return results


@pytest.mark.fault("B-01")
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("pipeline", [True, False], ids=["pipelined", "direct"])
@pytest.mark.parametrize("chunk", [4, 7, 512])
def test_no_schedule_changes_a_token(zoo, arrival, agreement, chunk, pipeline, early):
    """All at once and one after each 1, 3, 7 steps, eight at a time or three; rows of 24, 9 and 1 tokens."""
    prompts = zoo.prompts(NAME, LENGTHS)
    serial = zoo.serial(NAME, prompts, TOKENS)
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    comparison = models.Comparison()
    for every, most in ((0, 8), (0, 3), (1, 8), (3, 3), (7, 8)):
        settings = {"prefill_chunk": chunk, "pipeline": pipeline, "early_first_token": early, "max_batch": most}
        comparison += agreement(run(zoo, arrival, requests, every, **settings), serial)
    print(f"chunk {chunk}: {comparison}")
    comparison.check()


@pytest.mark.parametrize("policy", ["decode_first", "fifo"])
@pytest.mark.parametrize("tail_split", [True, False])
def test_no_policy_changes_a_token(zoo, arrival, agreement, policy, tail_split):
    prompts = zoo.prompts(NAME, LENGTHS)
    requests = [Request(prompt_ids=p, max_tokens=TOKENS) for p in prompts]
    results = run(zoo, arrival, requests, 2, policy=policy, tail_split=tail_split, prefill_chunk=5, max_batch=4)
    agreement(results, zoo.serial(NAME, prompts, TOKENS)).check()


@pytest.mark.fault("B-09")
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
def test_no_prompt_length_is_special(zoo, arrival, agreement, chunk):
    """Prompts of 1 to 20 tokens against every chunk: each position is processed exactly once."""
    prompts = zoo.prompts(NAME, range(1, 21))
    requests = [Request(prompt_ids=p, max_tokens=4) for p in prompts]
    for tail_split in (True, False):
        results = run(zoo, arrival, requests, prefill_chunk=chunk, tail_split=tail_split, max_batch=6)
        agreement(results, zoo.serial(NAME, prompts, 4)).check()


@pytest.mark.fault("B-05")
def test_a_short_row_beside_a_long_one_sees_no_padding(zoo, arrival, agreement):
    """Lengths 1 and 40 with chunk 5: nothing is padded, nothing is NaN."""
    prompts = zoo.prompts(NAME, (1, 40))
    requests = [Request(prompt_ids=p, max_tokens=TOKENS) for p in prompts]
    for order in (requests, requests[::-1]):
        results = run(zoo, arrival, order, prefill_chunk=5)
        agreement(results, zoo.serial(NAME, prompts if order is requests else prompts[::-1], TOKENS)).check()


def test_rows_grow_past_the_reserved_columns(zoo, arrival, agreement):
    """Prompts around 256 tokens, where buffers grow, decoded across the edge."""
    prompts = zoo.prompts(NAME, (250, 255, 256, 3))
    requests = [Request(prompt_ids=p, max_tokens=20) for p in prompts]
    agreement(run(zoo, arrival, requests, 2, prefill_chunk=64), zoo.serial(NAME, prompts, 20)).check()


# --- rows that draw --------------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, logprobs=3)
PARAMS = (
    SAMPLED,
    SamplingParams(temperature=0.8, top_p=0.9, seed=12),
    SamplingParams(),
    SamplingParams(temperature=2.0, top_k=1, logprobs=0),
    SamplingParams(temperature=1.0, seed=5, logprobs=20),
    SamplingParams(temperature=1.3, min_p=0.05, top_k=40, seed=6),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11),
)


@pytest.fixture(scope="module")
def alone(zoo):
    """Each sampled request alone in an engine."""
    prompts = zoo.prompts(NAME, LENGTHS)
    requests = [Request(prompt_ids=p, max_tokens=TOKENS, sampling=s) for p, s in zip(prompts, PARAMS, strict=True)]
    results = []
    for request in requests:
        with Engine(zoo.model(NAME)) as engine:
            results += engine.generate([request])
    return requests, results


@pytest.mark.parametrize(("every", "vectorised"), [(0, True), (1, True), (3, True), (7, True), (1, False)])
def test_sampled_rows_draw_what_they_draw_alone(zoo, arrival, alone, every, vectorised):
    """Temperature, top_p, top_k, min_p and seeds, mixed with greedy rows, in any company."""
    requests, wanted = alone
    for settings in ({}, {"prefill_chunk": 4, "pipeline": False}, {"max_batch": 3, "early_first_token": False}):
        results = run(zoo, arrival, requests, every, vectorised_sampling=vectorised, **settings)
        assert [result.token_ids for result in results] == [result.token_ids for result in wanted]


def test_forced_draws_are_the_greedy_ones(zoo, alone):
    """top_k 1 and min_p 1 leave one token, whatever the temperature."""
    requests, results = alone
    for i in (2, 3, 6):
        assert results[i].token_ids == zoo.serial(NAME, [requests[i].prompt_ids], TOKENS)[0].tokens


def test_seeds_differ(zoo, arrival):
    """The same prompt, 8 seeds: not all alike; one seed twice: alike."""
    prompt = zoo.prompts(NAME)[0]
    requests = [
        Request(prompt_ids=prompt, max_tokens=TOKENS, sampling=SamplingParams(temperature=1.0, seed=seed // 2))
        for seed in range(16)
    ]
    rows = [result.token_ids for result in run(zoo, arrival, requests)]
    assert rows[::2] == rows[1::2]
    assert len(set(rows)) == 8


def test_logprobs_do_not_depend_on_company(zoo, arrival, alone):
    """Of the chosen token and of the best ones: the model's own scores, alone and in a batch."""
    requests, wanted = alone
    for result, other in zip(run(zoo, arrival, requests, 1, prefill_chunk=4), wanted, strict=True):
        assert (result.logprobs is None) == (other.logprobs is None)
        for got, solo in zip(result.logprobs or (), other.logprobs or (), strict=True):
            assert got.token == solo.token
            assert got.logprob == pytest.approx(solo.logprob, abs=1e-4)
            assert len(got.top) == len(solo.top)
            assert [value for _, value in got.top] == pytest.approx([value for _, value in solo.top], abs=1e-4)
            assert got.logprob <= (got.top[0][1] if got.top else 0) + 1e-6


# --- twins: layouts that are wrong, in the same runs ----------------------------------------------------------------


class OneMask(FullCache):
    """Masks as if all rows were as long as the longest."""

    def make_mask(self, N, return_array=False, window_size=None):
        longest = self._starts.longest
        return None if N == 1 else mx.arange(longest, longest + N)[:, None] >= mx.arange(longest + N)


class OnePosition(FullCache):
    """Takes the longest row's position for every row's."""

    @property
    def offset(self):
        return self._starts.longest + self._written


class StaleRegister(FullCache):
    """Never moves a row: what leaves is always taken to be the last one."""

    def keep(self, indices):
        super().keep(range(len(indices)))


def plugin(cache_type):
    class Layout:
        name, kinds, options = "broken", frozenset({"full"}), FullOptions
        refuses, bytes_at = FullLayout().refuses, FullLayout().bytes_at

        def open(self, layer, options, *, slots, window):
            return cache_type(slots)

        def restore(self, state):
            raise NotImplementedError

    class Plugin:
        @hookimpl
        def register_layouts(self, register):
            register(Layout())

    return Plugin()


@pytest.mark.fault("B-01", twin=True)
@pytest.mark.parametrize("broken", [OneMask, OnePosition, StaleRegister])
def test_a_broken_layout_is_found(zoo, arrival, agreement, broken):
    """Bound without the probe, each of these makes the comparison fail."""
    prompts = zoo.prompts(NAME, LENGTHS)
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    results = run(zoo, arrival, requests, 3, plugin(broken), verify=False)
    with pytest.raises(AssertionError):
        agreement(results, zoo.serial(NAME, prompts, TOKENS))


def test_the_probe_finds_a_broken_layout(zoo):
    """Bind compares two ragged rows with each alone."""
    with pytest.raises(ModelNotBatchable):
        Engine(zoo.model(NAME), config={"layouts": {"full": "broken"}}, plugins=[plugin(OneMask)])


def test_one_position_for_all_rows_is_right_for_rows_of_one_length(zoo, arrival, agreement):
    """Bound with the probe, such rows share a forward only where their lengths agree, and the tokens are right."""
    prompts = zoo.prompts(NAME, LENGTHS)
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    results = run(zoo, arrival, requests, 3, plugin(OnePosition))
    agreement(results, zoo.serial(NAME, prompts, TOKENS)).check()
