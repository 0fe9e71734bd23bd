"""Kind B, at run time: padding, masks, chunks and row counts leave no trace in a row's tokens."""

from types import SimpleNamespace

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from oarlock.core import Request, SamplingParams, errors, preparing
from oarlock.core.planner import plan
from oarlock.core.testing.models import build, table
from oarlock.layouts.full import FullCache

LENGTHS = (12, 3, 7, 1, 9)


def check_same_as_alone(bench, model, prompts, *, submit=None, n=10, **settings):
    """Tokens of every row are mlx-lm's own for its prompt alone, up to a tie."""
    serial = [bench.serial(model, prompt, n) for prompt in prompts]
    engine = bench.engine(model, **settings)
    answers = bench.run(engine, [bench.ask(*row, n=n) for row in (submit or list)(prompts)])
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    bench.compare(answers, [row.tokens for row in serial], [row.gaps for row in serial])


def padded(prompts):
    """What a tokenizer with padding makes of them."""
    longest = max(map(len, prompts))
    return [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]


def check_padded_arrays_are_refused(make):
    """A 2-D array, a list of lists and a tokenizer's dictionary are not one prompt."""
    block = [[1, 2, 3], [4, 0, 0]]
    dictionary = {"input_ids": block, "attention_mask": [[1, 1, 1], [1, 0, 0]]}
    for given in (block, np.array(block), mx.array(block), dictionary, np.array([[1, 2]])):
        with pytest.raises(errors.InvalidParameter) as caught:
            make(prompt_ids=given)
        assert caught.value.name.startswith("prompt_ids")


@pytest.mark.fault("B-02")
def test_ragged_prompts_are_taken_as_they_are(bench):
    check_same_as_alone(bench, bench.tiny(), bench.prompts(LENGTHS, 97))
    flat = Request(prompt_ids=np.array([1, 2], dtype=np.int32))
    assert flat.prompt_ids == Request(prompt_ids=mx.array([1, 2])).prompt_ids == (1, 2)


@pytest.mark.fault("B-02")
def test_padded_prompts_are_refused(bench):
    check_padded_arrays_are_refused(Request)
    with pytest.raises(errors.UnknownRequestKey):
        Request.from_mapping({"prompt_ids": [1, 2, 0], "attention_mask": [1, 1, 0]})


@pytest.mark.fault("B-02", twin=True)
def test_twin_padding_that_is_attended_is_noticed(bench, planted):
    with planted():
        check_same_as_alone(bench, bench.tiny(), bench.prompts(LENGTHS, 97), submit=padded)
    with planted():
        check_padded_arrays_are_refused(SimpleNamespace)


@pytest.mark.fault("B-05")
@pytest.mark.parametrize("tail_split", [True, False])
def test_a_short_row_beside_a_long_one_stays_finite(bench, tail_split):
    """Whatever stands in the columns that it does not see."""
    prompts = bench.prompts((1, 40, 2), 97)
    check_same_as_alone(bench, bench.tiny(), prompts, prefill_chunk=5, tail_split=tail_split)


@pytest.mark.fault("B-05", twin=True)
def test_twin_columns_that_nobody_sees_and_nobody_cleared_are_noticed(bench, planted, monkeypatch):
    """A weight of zero times something that is no number is no number."""
    join = FullCache.join

    def dirty(self, other, slots):
        join(self, other, slots)
        for row, tokens in enumerate(self.tokens):
            self.keys[row, :, tokens:] = mx.nan
            self.values[row, :, tokens:] = mx.nan

    monkeypatch.setattr(FullCache, "join", dirty)
    with planted():
        check_same_as_alone(bench, bench.tiny(), bench.prompts((1, 40, 2), 97), prefill_chunk=5, verify=False)


def check_each_position_once(bench, lengths, chunks):
    """Every chunk size reads tokens 0 to n - 1 at their own positions, each once."""
    seen = []

    def spy(ids, cache):
        seen.extend(zip(range(cache.offset, cache.offset + ids.shape[1]), ids[0].tolist(), strict=True))

    model = bench.Scripted({1: [5]})
    engine = bench.engine(model)
    model.before = spy
    for length in lengths:
        prompt = [1, *range(10, 9 + length)]
        for chunk in {*chunks, max(1, length - 1), length, length + 1}:
            seen.clear()
            assert bench.run(engine, [bench.ask(*prompt, n=1, prefill_chunk=chunk)]) == [(5,)]
            assert seen == list(enumerate(prompt)), (length, chunk)


def check_the_same_scores(bench, lengths, chunks):
    engine = bench.engine(bench.tiny())
    for prompt in bench.prompts(lengths, 97):
        requests = [
            Request(prompt_ids=prompt, max_tokens=1, prefill_chunk=c, sampling=SamplingParams(logprobs=5))
            for c in chunks
        ]
        records = [result.logprobs[0] for result in engine.generate(requests)]
        assert len({record.token for record in records}) == 1
        assert max(record.logprob for record in records) - min(record.logprob for record in records) < 1e-3


@pytest.mark.fault("B-09")
def test_every_chunk_size_reads_every_position_once(bench):
    check_each_position_once(bench, range(1, 21), (1, 2, 3, 5, 7))
    check_the_same_scores(bench, (1, 2, 7, 20), (1, 2, 3, 5, 7, 19, 20, 21))


@pytest.mark.fault("B-09", twin=True)
def test_twin_a_prompt_that_ends_one_token_early_is_noticed(bench, planted, monkeypatch):
    """What is left was compared with the whole prompt."""

    def wrong(length, position, chunk, **rest):
        made = plan(length, position, chunk, **rest)
        return attrs.evolve(made, final=made.final or made.end >= length - 1)

    monkeypatch.setattr(preparing, "plan", wrong)
    with planted():
        check_each_position_once(bench, range(3, 8), (1, 2, 3))


def per_layer_inputs():
    """gemma4: each layer has inputs of its own; here with full attention only."""
    settings = table()["gemma4"]["text_config"]
    layers = settings["num_hidden_layers"]
    return build("gemma4", text_config={**settings, "layer_types": ["full_attention"] * layers})


@pytest.mark.fault("B-11")
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_inputs_per_layer_follow_their_rows(bench, rows):
    check_same_as_alone(bench, per_layer_inputs(), bench.prompts(LENGTHS[:rows], 500), max_batch=4, prefill_chunk=4)


@pytest.mark.fault("B-11")
def test_inputs_per_layer_survive_leaves_down_to_one_row(bench):
    model = per_layer_inputs()
    prompts = bench.prompts(LENGTHS, 500)
    requests = [bench.ask(*prompt, n=3 + 2 * place) for place, prompt in enumerate(prompts)]
    serial = [bench.serial(model, row.prompt_ids, row.max_tokens) for row in requests]
    answers = bench.run(bench.engine(model), requests)
    bench.compare(answers, [row.tokens for row in serial], [row.gaps for row in serial])


@pytest.mark.fault("B-11", twin=True)
def test_twin_one_rows_inputs_for_all_are_noticed(bench, planted):
    model = per_layer_inputs()
    bench.plant_one_rows_inputs(model)
    with planted():
        check_same_as_alone(bench, model, bench.prompts(LENGTHS, 500), verify=False)


def check_the_rule(bench, serial, answers, gaps, tolerance):
    """Where a row leaves its own serial tokens, the two best scores were nearer than ``tolerance``."""
    for wanted, got, gap in zip(serial, answers, gaps, strict=True):
        step = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b), None)
        assert step is None or min(gap[: step + 1]) <= tolerance, (step, gap[step])


@pytest.mark.fault("B-12")
@pytest.mark.fault("B-12", twin=True)
def test_rounding_moves_near_ties_only(bench, planted):
    """24 prompts in bfloat16, where kernels round by the number of rows: 0.25 is two steps of a score near 16."""
    model = build("tiny-full")
    model.update(tree_map(lambda a: a.astype(mx.bfloat16), model.parameters()))
    prompts = bench.prompts([3 + i % 9 for i in range(24)], 97)
    serial = [bench.serial(model, prompt, 8) for prompt in prompts]
    answers = bench.run(bench.engine(model, max_batch=16), [bench.ask(*prompt, n=8) for prompt in prompts])
    check_the_rule(bench, [row.tokens for row in serial], answers, [row.gaps for row in serial], 0.25)
    with planted():  # tokens of another row are no rounding
        check_the_rule(
            bench, [row.tokens for row in serial], answers[1:] + answers[:1], [row.gaps for row in serial], 0.25
        )
