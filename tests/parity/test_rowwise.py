"""`full` read row by row beside mlx-lm alone: every schedule, in forwards of its own and mixed ones, tokens equal."""

import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.layouts.rowwise import RowwiseKeyValues

TOKENS = 16
LENGTHS = (12, 3, 40, 1, 9, 33)
KEYS = ("tiny-full", "gpt_oss", "gemma3n", "afm7", "qwen3_next", "falcon_h1", "deepseek_v2", "stablelm", "cohere2")
"""Sinks, keys that several layers share, windows and states beside, and layers that cannot attend."""
BY_ROW = {"full": {"name": "full", "reads": "rows"}}


@pytest.fixture
def reads(monkeypatch):
    """Counts attentions row by row."""
    counted, attend = [], RowwiseKeyValues.attend

    def counting(self, queries, *rest):
        counted.append(queries.shape)
        return attend(self, queries, *rest)

    monkeypatch.setattr(RowwiseKeyValues, "attend", counting)
    return counted


@pytest.mark.parametrize("mixed", ["auto", False], ids=["mixed", "apart"])
@pytest.mark.parametrize("key", KEYS)
def test_tokens_equal_the_serial_run(zoo, arrival, agreement, reads, key, mixed):
    """Staggered joins, early leaves, greedy and sampled rows."""
    prompts = zoo.prompts(key, LENGTHS)
    serial = zoo.serial(key, prompts, TOKENS)
    requests = [Request(prompt_ids=p, max_tokens=(TOKENS, 9, 1)[i % 3]) for i, p in enumerate(prompts)]
    comparison = models.Comparison()
    for every, chunk in ((0, 512), (2, 7)):
        config = {"layouts": BY_ROW, "scheduler": {"prefill_chunk": chunk, "mixed": mixed, "max_batch": 4}}
        with Engine(zoo.model(key), config=config) as engine:
            attendable = any(layer.attends for layer in engine.bound.layers)
            comparison += agreement(arrival(engine, requests, every), serial)
            assert engine.stats()["recoveries"] == 0
    comparison.check()
    assert bool(reads) == attendable  # afm7's rows part by length once bind has tried them together


def test_a_sampled_row_draws_what_it_draws_alone(zoo, reads):
    """In company of any lengths, since it sees its own columns and nothing else."""
    prompts = zoo.prompts("tiny-full", LENGTHS)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=i) for i in range(len(prompts))]
    requests = [Request(prompt_ids=p, max_tokens=TOKENS, sampling=s) for p, s in zip(prompts, params, strict=True)]
    with Engine(zoo.model("tiny-full"), config={"layouts": BY_ROW, "state_cache": {"name": "none"}}) as engine:
        together = [result.token_ids for result in engine.generate(requests)]
        assert reads
        alone = [engine.generate([request])[0].token_ids for request in requests]
    assert together == alone
