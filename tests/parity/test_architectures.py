"""Every architecture that binds generates, in any company, exactly what mlx-lm generates alone; the others are refused."""

import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.errors import UnsupportedLayer
from oarlock.core.testing import models

EQUAL = (
    "Klear", "apertus", "deepseek_v2", "ernie4_5", "exaone", "glm", "glm4", "glm4_moe", "gpt2", "granite", "granitemoe",
    "helium", "hunyuan", "hunyuan_v1_dense", "llama", "llama4_text", "mimo", "minimax", "mixtral", "nanochat",
    "nemotron", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "seed_oss", "smollm3", "stablelm",
    "tiny-full",
)  # fmt: skip
# With layers that keep a state, or several caches. Those that let padding into a state are replayed by count.
RECURRENT = {
    True: (
        "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "mamba2", "qwen3_5_moe",
        "qwen3_next",
    ),
    False: ("bailing_moe_linear", "jamba", "mamba", "nemotron_h", "rwkv7"),
}  # fmt: skip
COMPOSITE = ("deepseek_v32",)
# With sliding windows: tests/parity/test_windows.py has them wrap.
WINDOWS = (
    "cohere2", "exaone_moe", "gemma3n", "gemma4", "gpt_oss", "iquestloopcoder", "laguna", "mimo_v2_flash", "tiny-ring",
)  # fmt: skip
# Positions of one row are taken for all rows, by this line: the bind probe sees it, rows of one length share a forward.
APART = {
    "afm7": "offset=S - L", "gpt_bigcode": "np.arange(cache[0].offset", "llama4": "mx.arange(start, end)",
}  # fmt: skip
TOKENS = 16

WAYS = {
    "at once": ({"prefill_chunk": 4}, 0),
    "staggered, no pipeline": ({"prefill_chunk": 7, "pipeline": False}, 3),
    "two at a time, first tokens late": ({"max_batch": 2, "early_first_token": False}, 1),
}


def requests_of(prompts, sampling=None):
    """One row leaves early."""
    return [
        Request(prompt_ids=prompt, max_tokens=4 if i == 2 else TOKENS, sampling=sampling or SamplingParams(logprobs=0))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.fault("B-01", "C-01", "C-02")
@pytest.mark.parametrize("name", [*EQUAL, *RECURRENT[True], *RECURRENT[False], *COMPOSITE, *APART])
def test_batched_tokens_equal_the_serial_ones(zoo, arrival, agreement, name):
    """Five ragged prompts, in three ways of arriving: tokens and scores are those of each prompt alone."""
    prompts = zoo.prompts(name)
    serial = zoo.serial(name, prompts, TOKENS)
    comparison = models.Comparison()
    for settings, every in WAYS.values():
        with Engine(zoo.model(name), config={"scheduler": settings}) as engine:
            results = arrival(engine, requests_of(prompts), every)
            assert [len(result.token_ids) for result in results] == [16, 16, 4, 16, 16]
            comparison += agreement(results, serial)
            assert engine.stats()["recoveries"] == 0
    print(f"{name}: {comparison}")
    comparison.check()


def test_no_architecture_is_lost(zoo):
    """Each tiny model stands in exactly one list: all of them bind."""
    known = [*EQUAL, *RECURRENT[True], *RECURRENT[False], *COMPOSITE, *WINDOWS, *APART]
    assert sorted(known) == sorted(zoo.names)
    assert {*EQUAL} < {*zoo.full} < {*EQUAL, *APART}


@pytest.mark.parametrize(("honours", "name"), [(honours, name) for honours in RECURRENT for name in RECURRENT[honours]])
def test_the_probe_says_who_keeps_padding_out_of_states(zoo, honours, name):
    """By the states themselves: no model declares it."""
    with Engine(zoo.model(name)) as engine:
        verdict = engine.bound.verdict
    assert (verdict.recurrent, verdict.honours_lengths, verdict.ragged) == (True, honours, True)


@pytest.mark.fault("B-10")
@pytest.mark.parametrize(("name", "line"), APART.items())
def test_a_model_with_one_position_for_all_rows_is_named_with_its_line(zoo, name, line):
    """And `explain` says that only rows of one length share its forwards."""
    with Engine(zoo.model(name)) as engine:
        assert not engine.bound.verdict.ragged
        rows = next(part for part in engine.bound.explain() if part["part"] == "rows")
    assert rows["choice"] == "equal lengths share a forward"
    assert f"{name}.py:" in rows["reason"]
    assert line in rows["reason"]


@pytest.mark.parametrize(("kind", "name"), [("recurrent", "mamba"), ("chunked", "llama4"), ("composite", "falcon_h1")])
def test_a_model_with_layers_that_nothing_holds_is_refused_at_bind(zoo, kind, name):
    """The error names the layer and its kind."""
    with pytest.raises(UnsupportedLayer) as caught:
        Engine(zoo.model(name, False), config={"plugins": {"disable": [kind]}})
    assert (caught.value.layer, caught.value.kind) == ("0", kind)


def test_an_indexer_that_chooses_columns_chooses_its_own_rows(arrival, agreement):
    """Sparse attention past its limit, in rows of which some are shorter than the limit."""
    model = models.build("deepseek_v32", index_topk=4)
    prompts = models.prompts((12, 3, 7, 1, 9), 97)
    serial = [models.serial(model, prompt, TOKENS) for prompt in prompts]
    with Engine(model, config={"scheduler": {"prefill_chunk": 4}}) as engine:
        agreement(arrival(engine, requests_of(prompts), 2), serial).check()


@pytest.mark.fault("B-01", twin=True)
def test_the_probe_is_what_sees_it(zoo, arrival, agreement):
    """Without it, such a model binds and gives wrong tokens: the comparison of this file sees them."""
    prompts = zoo.prompts("afm7")
    with Engine(zoo.model("afm7"), config={"scheduler": {"verify": False}}) as engine:
        results = arrival(engine, requests_of(prompts))
    with pytest.raises(AssertionError):
        agreement(results, zoo.serial("afm7", prompts, TOKENS))
