"""The models that are measured: SmolLM2 with its real weights, and one so small that only the host is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from oarlock.core import manager
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.models import load_model
from oarlock.plugins.cli.bench.prompts import prompts as of_text


def smollm2() -> LoadedModel:
    """Load SmolLM2-135M-Instruct in float32."""
    settings = EngineConfig.load({"model": {"dtype": "float32"}})
    return load_model("smollm2", settings, manager.build(settings))


def tiny() -> Any:
    """Return a llama of two layers: a step is hardly more than the host's part of it."""
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=256,
            max_position_embeddings=100_000,
        )
    )
    mx.eval([array for _, array in tree_flatten(model.parameters())])
    return model


def prompts(loaded: LoadedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Return one prompt of each length, each from another place of one text."""
    assert loaded.tokenizer is not None
    return of_text(loaded.tokenizer, 0, lengths)
