"""Adapter directories as mlx-lm's training leaves them, with random factors that change most tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.tuner.utils import linear_to_lora_layers


def save(
    folder: Path,
    model: Any,
    *,
    keys: Sequence[str],
    rank: int = 4,
    scale: float = 2.0,
    seed: int = 1,
    size: float = 1.0,
    num_layers: int | None = None,
    kind: str = "lora",
) -> Path:
    """Write an adapter of ``model``, which is spent; its product is about ``size`` times a usual weight."""
    folder.mkdir()
    count = num_layers or len(model.layers)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.5, "keys": list(keys)}
    config = {"fine_tune_type": kind, "num_layers": count, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    linear_to_lora_layers(model, count, parameters, use_dora=kind == "dora")
    factors: dict[str, mx.array] = {}
    for path, module in model.named_modules():
        if "lora_a" not in module:
            continue
        for name, spread in (("lora_a", len(module.lora_a) ** -0.5), ("lora_b", size / (rank**0.5 * scale))):
            key = mx.random.key(1000 * seed + len(factors))
            factors[f"{path}.{name}"] = mx.random.normal(module[name].shape, key=key) * spread
        if "m" in module:
            factors[f"{path}.m"] = module.m
    mx.save_safetensors(str(folder / "adapters.safetensors"), factors)
    return folder


def linear_layers(model: Any) -> list[str]:
    """Return the names that the linear layers of all blocks have in their block."""
    return sorted(
        {path for layer in model.layers for path, module in layer.named_modules() if type(module) is nn.Linear}
    )
