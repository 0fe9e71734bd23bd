"""Steps that take chunks along give, row by row, the tokens of steps that do not, and those of mlx-lm alone."""

import pytest

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.layers import read
from oarlock.core.testing import models

LENGTHS, TOKENS = (12, 3, 30, 1, 9), (14, 16, 5, 12, 10)
FIRST = ("tiny-full", "tiny-ring", "qwen3_moe")
MORE = (
    "Klear", "apertus", "cohere2", "deepseek_v2", "exaone_moe", "gemma3n", "gemma4", "glm4_moe", "gpt2", "gpt_oss", "granitemoe",
    "laguna", "llama", "llama4_text", "mimo_v2_flash", "mixtral", "nanochat", "olmoe", "phi3", "qwen3_vl",
)  # fmt: skip
BITS = {"bits": 8, "group_size": 32}
STORAGES = {
    "packed": {"full": {"name": "quantized", **BITS}, "rotating": {"name": "quantized", **BITS}},
    "paged": {"full": {"name": "paged", "block_size": 16}},
    "packed blocks": {"full": {"name": "paged", "block_size": 16, **BITS}},
    "delayed": {"full": {"name": "delayed", "start": 16, **BITS}, "rotating": {"name": "delayed", "start": 16, **BITS}},
}


def staggered(engine, prompts, tokens):
    """Two at once, one after two more steps, and two together while these run; return everybody's tokens."""
    requests = [Request(prompt_ids=prompt, max_tokens=n) for prompt, n in zip(prompts, tokens, strict=True)]
    handles = [engine.submit(request) for request in requests[:2]]
    for _ in range(2):
        engine.step()
    handles.append(engine.submit(requests[2]))
    engine.step()
    handles += [engine.submit(request) for request in requests[3:]]
    return [handle.result().token_ids for handle in handles]


def both(model, prompts, tokens, layouts, **scheduler):
    """Run the same without and with; return what was said."""
    said = {}
    for mixed in (False, True):
        config = {"scheduler": {"mixed": mixed, **scheduler}, "layouts": layouts}
        with Engine(model, config=config) as engine:
            said[mixed] = staggered(engine, prompts, tokens)
            stats = engine.stats()
            assert (stats["mixed_forwards"] > 2) == mixed
            assert not stats["recoveries"]
    return said[False], said[True]


def check(model, vocabulary, layouts=None, **scheduler):
    prompts = models.prompts(LENGTHS, vocabulary)
    serial = [models.serial(model, prompt, n) for prompt, n in zip(prompts, TOKENS, strict=True)]
    for chunk in (7, 512):
        off, on = both(model, prompts, TOKENS, layouts or {}, prefill_chunk=chunk, **scheduler)
        models.compare(on, off, [row.gaps for row in serial]).check()
        if layouts is None:
            models.compare(on, [row.tokens for row in serial], [row.gaps for row in serial]).check()


@pytest.mark.parametrize("name", [*FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_every_architecture_says_the_same(zoo, name):
    """8.8: mixed on equals mixed off, with chunks shorter and longer than a window; rows retire in mid-iteration."""
    check(zoo.model(name), min(97, read(zoo.model(name)).vocabulary))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring"])
def test_every_storage_says_the_same(name, storage):
    """No layout knows of it: each side's own cache attends."""
    size = {"head_dim": 32, "query_pre_attn_scalar": 32} if name == "tiny-ring" else {"num_attention_heads": 2}
    heads = {"num_key_value_heads": 1} if name == "tiny-full" else {}
    layouts = {kind: choice for kind, choice in STORAGES[storage].items() if kind == "full" or name == "tiny-ring"}
    check(models.build(name, **size, **heads), 97, layouts)


def test_a_small_budget_and_no_pipeline(zoo):
    """A10's budget; prompts end in the middle of chunks."""
    check(zoo.model("tiny-full"), 97, mixed_token_budget=9, pipeline=False)
