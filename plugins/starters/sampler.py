"""The sampler `example`: likely tokens stay as they are, unlikely ones fall off with the square of how far they are behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.errors import InvalidParameter
from oarlock.core.request import SamplingParams

OARLOCK_API = 1
KEY = "example"
"""``SamplingParams(temperature=1.0, extra={"example": 0.2})`` asks for it: a number above 0, how fast they fall off."""


class ExampleRows:
    """The rows of a group. R lines of scores, V tokens; a line depends on its own scores, parameters and key alone."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        """Open rows with these parameters."""
        self._set(params)

    def density(self, logits: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return log-probabilities float32 [R, V]; ``rows`` says whose each line is."""
        fall, temperature = self._fall, self._temperature
        if rows is not None:
            fall, temperature = fall[rows], temperature[rows]
        behind = logits.astype(mx.float32)
        behind = behind - behind.max(axis=-1, keepdims=True)  # (R, V), 0 for the best
        scores = (behind - fall * behind * behind) / temperature
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)

    def draw(self, density: mx.array, keys: mx.array) -> mx.array:
        """Return a token a line, uint32 [R]; ``keys`` uint32 [R, 2] hold all chance that there may be."""
        noise = mx.vmap(lambda key: mx.random.gumbel(shape=density.shape[-1:], key=key))(keys)  # (R, V)
        return mx.argmax(density + noise, axis=-1)

    def sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return what `draw` of `density` does; a shorter way may stand here."""
        return self.draw(self.density(logits, rows), keys)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self._set([self._params[i] for i in indices])

    def _set(self, params: Sequence[SamplingParams]) -> None:
        """Put the parameters where the scores are: this happens when rows join or leave, not in a step."""
        self._params = list(params)
        self._fall = mx.array([each.extra[KEY] for each in params], dtype=mx.float32)[:, None]  # (B, 1)
        self._temperature = mx.array([each.temperature for each in params], dtype=mx.float32)[:, None]  # (B, 1)


class Example:
    """Registers as `example`."""

    name = "example"
    is_argmax_invariant = True
    extra = frozenset({KEY})

    def handles(self, params: SamplingParams) -> bool:
        """Return whether rows with these parameters are drawn here."""
        return KEY in params.extra and not params.greedy

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Refuse a value that cannot be, when a request is submitted."""
        value = params.extra[KEY]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InvalidParameter(KEY, value, "numbers above 0 and below 1e6")

    def open(self, params: Sequence[SamplingParams]) -> ExampleRows:
        """Return the sampler for these rows, in this order."""
        return ExampleRows(params)


@hookimpl
def register_samplers(register: Callable[[Any], None]) -> None:
    """Register `example`."""
    register(Example())
