"""Rows in blocks beside mlx-lm alone: every architecture of full attention, every schedule, tokens equal and no recovery."""

import itertools

import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.errors import LayoutRefused
from oarlock.core.testing import models

TOKENS = 20
LENGTHS = (12, 3, 40, 1, 9, 33, 16, 31)
SHAPES = {
    # SmolLM2's proportions: 9 heads on 3 key heads of 64, tied embeddings, rope base 100,000.
    "smollm2": {
        "hidden_size": 576, "num_hidden_layers": 3, "intermediate_size": 384, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 131, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "one key head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "odd head size": {"head_dim": 24},
}  # fmt: skip


def run(model, arrival, requests, options, every=0, **settings):
    with Engine(model, config={"layouts": {"full": {"name": "paged", **options}}, "scheduler": settings}) as engine:
        results = arrival(engine, requests, every)
        assert engine.stats()["recoveries"] == 0
    return results


@pytest.mark.parametrize("reads", ["auto", "gather"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_geometry_changes_a_token(arrival, agreement, shape, reads):
    """Ragged prompts, staggered joins and early leaves; blocks of 16, so that rows cross several edges."""
    model = models.build("tiny-full", **SHAPES[shape])
    prompts = models.prompts(LENGTHS, 97)
    serial = [models.serial(model, prompt, TOKENS) for prompt in prompts]
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    comparison = models.Comparison()
    for every, chunk, most in ((0, 512, 8), (1, 7, 8), (3, 16, 3)):
        options = {"block_size": 16, "reads": reads}
        results = run(model, arrival, requests, options, every, prefill_chunk=chunk, max_batch=most)
        comparison += agreement(results, serial)
    comparison.check()


@pytest.mark.fault("B-01")
@pytest.mark.parametrize("reads", ["auto", "gather"])
@pytest.mark.parametrize("pipeline", [True, False], ids=["pipelined", "direct"])
def test_no_schedule_changes_a_token(zoo, arrival, agreement, pipeline, reads):
    prompts = zoo.prompts("tiny-full", LENGTHS)
    serial = zoo.serial("tiny-full", prompts, TOKENS)
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    comparison = models.Comparison()
    for every, most in itertools.product((0, 1, 5), (8, 3)):
        options = {"block_size": 16 if most == 3 else 64, "reads": reads}
        results = run(zoo.model("tiny-full"), arrival, requests, options, every, max_batch=most, pipeline=pipeline)
        comparison += agreement(results, serial)
    comparison.check()


def test_sampled_rows_draw_what_they_draw_in_full(zoo, arrival):
    """Storage is no reason to draw something else: greedy and sampled rows together, against `full`."""
    prompts = zoo.prompts("tiny-full", LENGTHS)
    requests = [
        Request(prompt_ids=p, max_tokens=TOKENS, sampling=SamplingParams(temperature=i % 3 * 0.5, seed=i))
        for i, p in enumerate(prompts)
    ]
    with Engine(zoo.model("tiny-full")) as engine:
        wanted = [result.token_ids for result in arrival(engine, requests, 1)]
    results = run(zoo.model("tiny-full"), arrival, requests, {"block_size": 16}, 1)
    assert [result.token_ids for result in results] == wanted


def test_long_rows_grow_through_many_blocks(zoo, arrival, agreement):
    """The pool grows and is laid out anew several times under running rows."""
    prompts = zoo.prompts("tiny-full", (250, 3, 90, 17))
    requests = [Request(prompt_ids=p, max_tokens=90) for p in prompts]
    results = run(zoo.model("tiny-full"), arrival, requests, {"block_size": 16}, 4, prefill_chunk=32)
    agreement(results, zoo.serial("tiny-full", prompts, 90)).check()


@pytest.mark.long
def test_every_full_architecture_runs_in_blocks(zoo, arrival, agreement):
    """Those that bind with `full`: equal tokens, with the reads that their attention admits."""
    comparison, ran = models.Comparison(), []
    for name in zoo.full:
        prompts = zoo.prompts(name)
        requests = [Request(prompt_ids=p, max_tokens=10) for p in prompts]
        results = run(zoo.model(name), arrival, requests, {"block_size": 16}, 1, prefill_chunk=7)
        comparison += agreement(results, zoo.serial(name, prompts, 10))
        ran.append(name)
    print(f"{len(ran)} architectures, {comparison}")
    assert len(ran) > 20
    comparison.check()


@pytest.mark.fault("H-08")
def test_kinds_that_blocks_cannot_hold_are_refused_at_build(zoo):
    """A sliding window in blocks would reuse nothing while it looked as if it did."""
    with pytest.raises(LayoutRefused, match="paged") as caught:
        Engine(zoo.model("tiny-ring"), config={"layouts": {"rotating": "paged"}})
    assert "rotating" in str(caught.value)
