"""Real weights in other storages: SmolLM2 gives, in company, what mlx-lm gives each prompt alone in the same storage.

Not in 4 bits: there the last bit of the weights alone moves mlx-lm's own scores by up to 0.8, and its tokens with them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model
from oarlock.core.testing import models, storages

TEXT = Path(__file__).parents[2] / "LICENSE"
GROUP, START = 64, 150
TOKENS = (24, 22, 28, 24)

pytestmark = [pytest.mark.long, pytest.mark.weights, pytest.mark.timeout(2400)]


LAYOUTS = {
    "paged": {"full": {"name": "paged"}},
    "8 bits": {"full": {"name": "quantized", "bits": 8, "group_size": GROUP}},
    "delayed": {"full": {"name": "delayed", "bits": 8, "group_size": GROUP, "start": START}},
}
# What mlx-lm stores likewise, by its own options: chunks end where it turns, since it looks between them only.
TURNING = {"kv_bits": 8, "kv_group_size": GROUP, "quantized_kv_start": START, "prefill_step_size": START}


class Company:
    """Counts the rows of the steps that decoded."""

    def __init__(self):
        self.rows = []

    @hookimpl
    def step_finished(self, step):
        self.rows.append(step.decode_rows)


class Weights:
    """A model in float32, prompts cut out of a real text, and what mlx-lm gives each alone, computed once a storage.

    The last bits of products differ in company, and packed numbers make steps of them: at 8 bits scores move by 0.1.
    So each prompt ends by beginning to repeat itself: what comes next is certain, for whoever sees the right past.
    """

    def __init__(self, source, lengths):
        config = EngineConfig.load({"model": {"dtype": "float32"}})
        loaded = load_model(source, config, build(config))
        self.model = loaded.model
        ids = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        self.prompts = []
        for place, (length, back) in enumerate(lengths):
            text = ids[150 * place : 150 * place + length - back // 2]
            self.prompts.append(tuple(text + text[-back : -back + back // 2]))
            assert len(self.prompts[-1]) == length

    @functools.cache  # noqa: B019 - the weights live as long as the module
    def serial(self, storage):
        """Alone, each time with caches of its own: plain ones, quantized from the first token on, or later."""

        def options():
            if storage == "8 bits":
                return {"prompt_cache": storages.quantized(self.model, 8, GROUP)}
            return TURNING if storage == "delayed" else {}

        return [models.serial(self.model, p, n, **options()) for p, n in zip(self.prompts, TOKENS, strict=True)]

    def check(self, arrival, storage, **settings):
        """Four rows that come and go at different times say what they say alone."""
        requests = [Request(prompt_ids=p, max_tokens=n) for p, n in zip(self.prompts, TOKENS, strict=True)]
        company, config = Company(), {"layouts": LAYOUTS[storage], "scheduler": settings}
        with Engine(self.model, config=config, plugins=[company]) as engine:
            said = [result.token_ids for result in arrival(engine, requests, 3)]
            assert engine.stats()["recoveries"] == 0
            used = {layer.layout.name for layer in engine.bound.layers}
        serial = self.serial(storage)
        comparison = models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial])
        rows = [n for n in company.rows if n]
        print(f"{storage} ({', '.join(sorted(used))}): {comparison}, mean occupancy {sum(rows) / len(rows):.2f}")
        comparison.check()
        assert max(rows) == len(requests)


@pytest.fixture(scope="module")
def smollm2():
    return Weights("smollm2", ((400, 200), (100, 66), (250, 100), (128, 80)))


@pytest.mark.parametrize("storage", LAYOUTS)
def test_smollm2(smollm2, arrival, storage):
    """Its own layout is `full`: tests/parity/test_smollm2.py."""
    smollm2.check(arrival, storage, prefill_chunk=128)
