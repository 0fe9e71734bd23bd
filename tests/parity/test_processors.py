"""Real weights: rows of SmolLM2-135M with processors of their own get the tokens of mlx-lm with the same in numpy."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model
from oarlock.core.testing import models

pytestmark = pytest.mark.weights
TEXT = Path(__file__).parents[2] / "LICENSE"
TOKENS = 18
ASKED = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.3, "extra": {"no_repeat_ngram": 4}},
]


def reference(params, prompt_tokens):
    """The definitions, as one of mlx-lm's processors."""

    def process(tokens, logits):
        known, scores = np.array(tokens), np.array(logits)[0]
        listed, n = known.tolist(), params.extra.get("no_repeat_ngram", len(known) + 1)
        for end in range(n, len(listed) + 1):
            if listed[end - n : end - 1] == listed[len(listed) - n + 1 :]:
                scores[listed[end - 1]] = -np.inf
        seen, penalty = np.unique(known), np.float32(params.repetition_penalty)
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        out, counts = np.unique(known[prompt_tokens:], return_counts=True)
        scores[out] -= np.float32(params.presence_penalty)
        scores[out] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        return mx.array(scores[None])

    return process


def test_rows_with_processors_of_their_own_get_mlx_lms_tokens():
    config = EngineConfig.load({"model": {"dtype": "float32"}})
    loaded = load_model("smollm2", config, build(config))
    ids = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    asked, wanted = [], []
    for place, fields in enumerate(ASKED):
        prompt, params = ids[90 * place : 90 * place + 20 + 17 * place], SamplingParams(**fields)
        asked.append(Request(prompt_ids=prompt, max_tokens=TOKENS - 3 * place, sampling=params))
        processors = [reference(params, len(prompt))]
        wanted.append(models.serial(loaded.model, prompt, TOKENS - 3 * place, logits_processors=processors))
    with Engine(loaded.model, config={"scheduler": {"pipeline": True}}) as engine:
        handles = []
        for request in asked:
            handles.append(engine.submit(request))
            engine.step()
        said = [handle.result().token_ids for handle in handles]
        assert engine.stats()["recoveries"] == 0
    models.compare(said, [row.tokens for row in wanted], [row.gaps for row in wanted]).check()
