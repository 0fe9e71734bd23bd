"""Real weights: SmolLM2-135M in float32 gives, in any company, the tokens that mlx-lm gives each prompt alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model
from oarlock.core.testing import models

TEXT = Path(__file__).parents[2] / "LICENSE"
LENGTHS = (3, 480, 12, 90, 600, 30, 257, 47, 333, 64, 200, 128)
TOKENS = 64
WAYS = {
    "chunk 16": {"prefill_chunk": 16},
    "chunk 512": {"prefill_chunk": 512},
    "no pipeline": {"pipeline": False},
}

pytestmark = pytest.mark.weights


class Weights:
    """The model, prompts cut out of a real text, and what each gives alone, computed once."""

    def __init__(self):
        config = EngineConfig.load({"model": {"dtype": "float32"}})
        loaded = load_model("smollm2", config, build(config))
        self.model, self.positions = loaded.model, loaded.positions
        self._ids = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        self._serial, self._alone = {}, {}

    def prompts(self, lengths):
        return [tuple(self._ids[80 * place : 80 * place + length]) for place, length in enumerate(lengths)]

    def requests(self, lengths, tokens, sampled=False):
        return [
            Request(prompt_ids=prompt, max_tokens=tokens, sampling=sampling(place) if sampled else SamplingParams())
            for place, prompt in enumerate(self.prompts(lengths))
        ]

    def engine(self, *plugins, **settings):
        """Without a tokenizer, so that no row ends before its last token."""
        return Engine(self.model, config={"scheduler": settings}, plugins=plugins)

    def serial(self, prompt, tokens):
        """mlx-lm's own greedy generation."""
        if (prompt, tokens) not in self._serial:
            self._serial[prompt, tokens] = models.serial(self.model, prompt, tokens)
        return self._serial[prompt, tokens]

    def alone(self, request):
        """The same request as the only one of an engine."""
        key = request.prompt_ids, request.max_tokens, request.sampling.seed
        if key not in self._alone:
            with self.engine(max_batch=4) as engine:
                self._alone[key] = engine.generate([request])[0].token_ids
        return self._alone[key]


def sampling(place):
    return SamplingParams(temperature=0.8, top_p=0.9, seed=1000 + place)


@pytest.fixture(scope="session")
def weights():
    return Weights()


class Company:
    """Counts, from the records of the steps, who ran beside whom."""

    def __init__(self):
        self.records = []

    @hookimpl
    def step_finished(self, step):
        self.records.append(step)

    @property
    def occupancy(self):
        """Mean rows of the steps that decoded."""
        rows = [step.decode_rows for step in self.records if step.decode_rows]
        return sum(rows) / len(rows)

    @property
    def moves(self):
        """Joins into a running group, and leaves from one that goes on."""
        running = joins = leaves = 0
        for step in self.records:
            joins += step.joined if running else max(0, step.joined - 1)
            running += step.joined - step.left
            leaves += step.left if running else max(0, step.left - 1)
        assert running == 0
        return joins, leaves


def arrive_at_random(engine, requests, seed):
    """Submit with 0 to 7 steps between, drawn from ``seed``; run to the end."""
    draw, handles = random.Random(seed), []
    for request in requests:
        handles.append(engine.submit(request))
        for _ in range(draw.randrange(8)):
            engine.step()
    return [handle.result().token_ids for handle in handles]


def run(weights, requests, seed, **settings):
    company = Company()
    with weights.engine(company, **settings) as engine:
        rows = arrive_at_random(engine, requests, seed)
        assert engine.stats()["recoveries"] == 0
    return rows, company


def compare_greedy(weights, requests, rows):
    serial = [weights.serial(request.prompt_ids, request.max_tokens) for request in requests]
    comparison = models.compare(rows, [row.tokens for row in serial], [row.gaps for row in serial])
    print(f"SmolLM2, {len(rows)} prompts of {requests[0].max_tokens} tokens: {comparison}")
    comparison.check()


# --- the short form ----------------------------------------------------------------------------------------------

SHORT = (3, 90, 12, 47)


@pytest.mark.parametrize("way", ["chunk 16", "no pipeline"])
def test_four_prompts_equal_the_serial_ones(weights, way):
    """16 tokens each, three at a time."""
    requests = weights.requests(SHORT, 16)
    rows, company = run(weights, requests, 1, max_batch=3, **WAYS[way])
    compare_greedy(weights, requests, rows)
    assert company.occupancy > 1.5


def test_four_sampled_prompts_equal_themselves_alone(weights):
    """Temperature 0.8, top_p 0.9, one seed each."""
    requests = weights.requests(SHORT, 16, sampled=True)
    rows, _ = run(weights, requests, 2, max_batch=3, prefill_chunk=16)
    assert rows == [weights.alone(request) for request in requests]


@pytest.mark.parametrize(("lengths", "tokens"), [(SHORT, 16), pytest.param(LENGTHS[:6], 32, marks=pytest.mark.long)])
@pytest.mark.parametrize("chunk", [7, 512])
def test_mixed_steps_say_the_same(weights, lengths, tokens, chunk):
    """8.8: with chunks taken along by decode steps and without, and as mlx-lm says alone."""
    requests, said = weights.requests(lengths, tokens), []
    for mixed in (True, False):
        with weights.engine(prefill_chunk=chunk, mixed=mixed) as engine:
            said.append(arrive_at_random(engine, requests, 4))
            stats = engine.stats()
        assert (stats["mixed_forwards"] > 2) == mixed
        assert not stats["recoveries"]
    assert said[0] == said[1]
    compare_greedy(weights, requests, said[0])


# --- the full form -------------------------------------------------------------------------------------------------


def check_company(company):
    """Rows did stand beside others, and came and went while others decoded."""
    joins, leaves = company.moves
    print(f"mean occupancy {company.occupancy:.2f}, {joins} joins and {leaves} leaves in mid-decode")
    assert company.occupancy >= 3
    assert joins >= 8
    assert leaves >= 8


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("way", WAYS)
def test_twelve_prompts_equal_the_serial_ones(weights, way):
    """3 to 600 tokens, 64 tokens each, four at a time, submitted at random moments: every token id."""
    requests = weights.requests(LENGTHS, TOKENS)
    rows, company = run(weights, requests, 3, max_batch=4, **WAYS[way])
    compare_greedy(weights, requests, rows)
    check_company(company)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("way", WAYS)
def test_twelve_sampled_prompts_equal_themselves_alone(weights, way):
    """The same prompts with temperature 0.8, top_p 0.9 and seeds, whatever the batch."""
    requests = weights.requests(LENGTHS, TOKENS, sampled=True)
    rows, company = run(weights, requests, 4, max_batch=4, **WAYS[way])
    assert rows == [weights.alone(request) for request in requests]
    check_company(company)
