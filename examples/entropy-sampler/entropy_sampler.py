"""Temperature by entropy: a row is drawn cold where the model is certain and warm where it is not.

The temperature of a step lies between ``temperature`` and ``temperature + extra["warmth"]``, by the entropy of the scores
as a share of the largest that there can be, log V. What depends on a row are its own scores and parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.errors import InvalidParameter
from oarlock.core.request import SamplingParams

OARLOCK_API = 1
KEY = "warmth"


class EntropyRows:
    """The rows of a group. R lines of scores, V tokens."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        """Open rows with these parameters."""
        self._set(params)

    def density(self, logits: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return log-probabilities float32 [R, V]; ``rows`` int32 [R] says whose each line is."""
        cold, warmth = self._cold, self._warmth
        if rows is not None:
            cold, warmth = cold[rows], warmth[rows]
        scores = _normalised(logits.astype(mx.float32))  # (R, V)
        mass = mx.exp(scores)
        entropy = -mx.where(mass > 0, mass * scores, 0.0).sum(axis=-1, keepdims=True)  # (R, 1)
        share = entropy / max(math.log(logits.shape[-1]), 1e-6)
        return _normalised(scores / (cold + warmth * share))

    def draw(self, density: mx.array, keys: mx.array) -> mx.array:
        """Return a token a line, uint32 [R]: the best after noise that ``keys`` uint32 [R, 2] alone decide."""
        noise = mx.vmap(lambda key: mx.random.gumbel(shape=density.shape[-1:], key=key))(keys)  # (R, V)
        return mx.argmax(density + noise, axis=-1)

    def sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return `draw` of `density`."""
        return self.draw(self.density(logits, rows), keys)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self._set([self._params[i] for i in indices])

    def _set(self, params: Sequence[SamplingParams]) -> None:
        self._params = list(params)
        self._cold = mx.array([each.temperature for each in params], dtype=mx.float32)[:, None]  # (B, 1)
        self._warmth = mx.array([each.extra[KEY] for each in params], dtype=mx.float32)[:, None]  # (B, 1)


class Entropy:
    """Registers as ``entropy``; rows ask for it by ``extra={"warmth": 0.5}`` and a temperature above 0."""

    name = "entropy"
    is_argmax_invariant = True
    extra = frozenset({KEY})

    def handles(self, params: SamplingParams) -> bool:
        """Return whether rows are drawn here: those that ask for it, and for no filter, which is not applied here."""
        filters = (params.top_k, params.top_p, params.min_p) != (0, 1.0, 0.0)
        return KEY in params.extra and not params.greedy and not filters

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Refuse a value that cannot be, when a request is submitted."""
        value = params.extra[KEY]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise InvalidParameter(KEY, value, "numbers from 0 to 100")

    def open(self, params: Sequence[SamplingParams]) -> EntropyRows:
        """Return the sampler for these rows, in this order."""
        return EntropyRows(params)


def _normalised(scores: mx.array) -> mx.array:
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


@hookimpl
def register_samplers(register: Callable[[Any], None]) -> None:
    """Register `entropy`."""
    register(Entropy())
