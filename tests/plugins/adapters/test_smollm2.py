"""Real weights: two adapters with random factors beside the bare SmolLM2, in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.tuner.utils import remove_lora_layers

from oarlock.core import Request
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model
from oarlock.core.testing import models

pytestmark = pytest.mark.weights
TEXT = Path(__file__).parents[3] / "LICENSE"
LENGTHS, TOKENS = (40, 25, 14, 33, 10), 16
NAMES = ("alice", "", "bob", "bob", "alice")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_adapters_and_the_bare_model_give_the_tokens_of_each_alone(lora, watch, tmp_path):
    """SPEC 1.1.9: mlx-lm's own with each adapter, of which most differ from the bare model's."""
    config = EngineConfig.load({"model": {"dtype": "float32"}})
    loaded = load_model("smollm2", config, build(config))
    model, ids = loaded.model, loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    prompts = [ids[150 * place : 150 * place + length] for place, length in enumerate(LENGTHS)]
    folders = {
        "alice": lora.save(tmp_path / "alice", model, num_layers=8, size=1.0),
        "bob": lora.save(
            tmp_path / "bob", remove_lora_layers(model), num_layers=12, rank=8, scale=10.0, keys=lora.attention,
            size=2.0, seed=2,
        ),
    }  # fmt: skip
    remove_lora_layers(model)
    requests = [
        Request(prompt_ids=prompt, max_tokens=TOKENS, adapter=name or None, id=f"r{place}")
        for place, (prompt, name) in enumerate(zip(prompts, NAMES, strict=True))
    ]
    with Engine(model, config=lora.config(folders), plugins=[watch]) as engine:
        outcomes = lora.arrive(engine, requests)
        assert engine.stats()["recoveries"] == 0
    bare = [models.serial(model, prompt, TOKENS) for prompt in prompts]
    wanted = dict(enumerate(bare))
    for name, folder in folders.items():
        lora.adapted(model, folder)
        wanted |= {i: models.serial(model, prompts[i], TOKENS) for i in wanted if NAMES[i] == name}
        remove_lora_layers(model)
    lora.check(outcomes, [wanted[place] for place in range(len(NAMES))])
    assert {"alice", "bob", ""} in watch.together
    for place, name in enumerate(NAMES):
        changed = sum(a != b for a, b in zip(wanted[place].tokens, bare[place].tokens, strict=True))
        assert changed >= TOKENS / 2 if name else not changed
