"""Scores, keys and parameters for sampler tests, all from numbered generators."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import SamplingParams


class Make:
    """Random scores, keys and parameters."""

    @staticmethod
    def logits(rng, rows, size, dtype=mx.float32, spread=3.0):
        return mx.array((rng.normal(size=(rows, size)) * spread).astype(np.float32)).astype(dtype)

    @staticmethod
    def keys(rng, rows):
        return mx.array(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))

    @staticmethod
    def density(line, params):
        """Return the probabilities of one row's tokens by the definition: in float64, by a sort."""
        relative = np.exp((line.astype(np.float64) - line.max()) / params.temperature)
        order = np.argsort(-relative, kind="stable")
        size = min(params.top_k or line.size, line.size)
        mass = np.cumsum(relative[order[:size]])
        count = int((mass < params.top_p * mass[-1]).sum()) + 1 if params.top_p < 1 else size
        stays = [i for i in order[:count] if relative[i] >= params.min_p]
        density = np.zeros(line.size)
        density[stays] = relative[stays]
        return density / density.sum()

    @staticmethod
    def params(rng, greedy=True):
        """Return one row's parameters: every filter on or off, extremes included."""
        return SamplingParams(
            temperature=float(rng.choice(([0.0] if greedy else []) + [1e-3, 0.3, 0.7, 1.0, 2.0, 50.0])),
            top_k=int(rng.choice([0, 0, 1, 2, 7, 40, 10**6])),
            top_p=float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0])),
            min_p=float(rng.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0])),
        )


@pytest.fixture
def make():
    return Make
