"""What the kit for state caches feeds, counts and compares: prompts, forwarded tokens, states and their bytes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from oarlock.core.contracts.layout import RowState
from oarlock.core.engine import Engine
from oarlock.core.forward import forward, settle

VOCABULARY = 97


class Counting:
    """A model that counts the tokens that it forwards."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokens = model, 0

    def __call__(self, ids: mx.array, **named: Any) -> Any:
        self.tokens += ids.size
        return self.model(ids, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def prompt_like(rng: random.Random, known: Sequence[Sequence[int]]) -> list[int]:
    """Return a prompt that begins as one of ``known`` does, whole or in part, or as none."""
    start = list(rng.choice(known)) if known and rng.random() < 0.8 else []
    kept = start[: rng.randint(1, len(start))] if start else []
    return kept + rng.choices(range(VOCABULARY), k=rng.randint(1, 20))


def states_of(engine: Engine, tokens: Sequence[int]) -> list[RowState]:
    """Return evaluated states of ``tokens``."""
    caches = engine.bound.open_caches(slots=1, window=1)
    for cache in caches:
        cache.add(1)
    ids = mx.array([list(tokens)], dtype=mx.uint32)
    forward(engine.bound, caches, ids, [len(tokens)])
    settle(engine.bound, caches, ids, [len(tokens)], [len(tokens)])
    states = [cache.extract(0) for cache in caches]
    mx.eval([array for state in states for array in state.arrays().values()])
    return states


def digest(states: Sequence[RowState]) -> str:
    """Return a digest of every array's name, shape, dtype and bytes."""
    whole = hashlib.sha256()
    for state in states:
        for name, array in sorted(state.arrays().items()):
            whole.update(f"{name} {array.shape} {array.dtype}".encode())
            whole.update(bytes(memoryview(mx.contiguous(array).view(mx.uint8))))  # type: ignore[arg-type]
    return whole.hexdigest()
