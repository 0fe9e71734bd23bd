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

TEXT = (
    "A rowing boat is moved by oars that turn in oarlocks. The lock holds the oar where the boat is widest, and so the "
    "rower's pull becomes a push on the water. In an eight every rower has one oar, four on each side, and a ninth "
    "person steers and calls the stroke. Rivers were crossed like this long before there were bridges. A good crew is "
    "not eight strong people; it is one long movement. When the blades enter the water at the same moment, the hull "
    "lifts a little and runs. When they do not, each stroke stops what the last one began. Coaches watch the puddles: "
    "evenly spaced, they say that the boat ran well between the strokes. Wind from ahead shortens the run, a following "
    "wind lengthens it, and a cross wind makes the steering heavy. On a lake the water is flat in the morning. By noon "
    "the thermals have made waves, and the smaller boats go home. What remains is the sound of the slides, the knock "
    "of the gates and the water under the hull, which rowers call singing."
)


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
    ids = loaded.tokenizer.encode(TEXT)
    around = ids * (2 + max(lengths) // len(ids))
    return [around[start : start + n] for start, n in zip(_places(len(ids), len(lengths)), lengths, strict=True)]


def _places(size: int, count: int) -> list[int]:
    return [size * i // count for i in range(count)]
