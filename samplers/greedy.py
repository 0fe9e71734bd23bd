"""Greedy: the most probable token. It draws nothing, so keys are not read.

In half precision the score is the logit minus the line's log-sum-exp, rounded to the logits' dtype, and the lowest id
wins ties: also those which the rounding makes. This is what mlx-lm's serial generation compares, so equal logits give
equal tokens. In float32 the logits themselves are compared: a tie that rounding could make there takes two scores less
than 1e-6 of each other apart, and the log-sum-exp of 16 lines x 49,152 takes 15 to 23 ms on a 2-core x86 CPU, a tenth
of SmolLM2's whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from oarlock.core import hookimpl

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Sampler
    from oarlock.core.request import SamplingParams

OARLOCK_API = 1


class GreedyRows:
    """Rows without parameters: nothing to keep."""

    def density(self, logits: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return float32 ``[R, V]``: 0 at the line's token and minus infinity elsewhere."""
        tokens = _argmax(logits)  # (R,)
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32)  # (V,)
        return mx.where(ids == tokens[:, None], mx.array(0.0), mx.array(-mx.inf))  # (R, V)

    def draw(self, density: mx.array, keys: mx.array) -> mx.array:
        """Return the most probable token of each line, uint32 ``[R]``."""
        return mx.argmax(density, axis=-1)

    def sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return the most probable token of each line, uint32 ``[R]``."""
        return _argmax(logits)

    def keep(self, indices: Sequence[int]) -> None:
        """Do nothing: greedy rows are all alike."""


class Greedy:
    """The sampler ``greedy``."""

    name = "greedy"
    is_argmax_invariant = True

    def handles(self, params: SamplingParams) -> bool:
        """Return whether the temperature is 0."""
        return params.greedy

    def open(self, params: Sequence[SamplingParams]) -> GreedyRows:
        """Return rows for ``params``, of which nothing is needed."""
        return GreedyRows()


def _argmax(logits: mx.array) -> mx.array:
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # (R, V)
    return mx.argmax(logits, axis=-1)  # (R,)


@hookimpl
def register_samplers(register: Callable[[Sampler], None]) -> None:
    """Register ``greedy``."""
    register(Greedy())
