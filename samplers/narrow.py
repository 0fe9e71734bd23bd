"""Filters that few requests ask for: top-n-sigma, locally typical and XTC. They know nothing of keys, draws or rows.

Keys of `SamplingParams.extra`: ``top_n_sigma`` n > 0; ``typical_p`` in (0, 1]; ``xtc_probability`` in (0, 1] with
``xtc_threshold`` in (0, 0.5], 0.1 where none is given. top-n-sigma never drops the best token; the other two may, so a
greedy row that asks for them is refused.

top_n_sigma keeps scores of at least max - n * sigma, sigma being the standard deviation of the line's finite scores,
before temperature (Tang et al., 2024). typical_p keeps, of what the other filters left, the tokens whose information
is closest to the entropy, the fewest whose mass reaches typical_p, equals included (Meister et al., 2022). XTC, last,
with the given probability drops the tokens of at least the threshold's probability but the least probable of them
(p-e-w, 2024). No second random number is drawn for that: the draw is from the mixture of both distributions.

As in `truncate.py` what is added up are whole numbers, so company changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from oarlock.core import errors
from oarlock.core.request import is_number

if TYPE_CHECKING:
    from oarlock.core.request import SamplingParams

SIGMA, TYPICAL, PROBABILITY, THRESHOLD = "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"
KEYS = frozenset({SIGMA, TYPICAL, PROBABILITY, THRESHOLD})
USUAL_THRESHOLD = 0.1

SCORE = 2.0**12
"""Scores below the best one count in units of 2**-12, up to `DEEPEST`, when their deviation is taken."""
DEEPEST = 255.0
BITS = 2.0**40
"""Information counts in units of 2**-40 when entropy is taken."""
INFINITY = 0x7F800000
"""The bits of infinity in float32."""


def check(params: SamplingParams) -> None:
    """Raise `errors.InvalidParameter` for a value that cannot be, and for greedy rows that would not be greedy."""
    bounds = {SIGMA: math.inf, TYPICAL: 1.0, PROBABILITY: 1.0, THRESHOLD: 0.5}
    for key, most in bounds.items():
        if key not in params.extra:
            continue
        value = params.extra[key]
        if not (is_number(value) and 0 < value <= most):
            allowed = "finite numbers > 0" if most == math.inf else f"numbers above 0 and up to {most:g}"
            raise errors.InvalidParameter(key, value, allowed)
        if key != SIGMA and params.greedy:
            raise errors.InvalidParameter("temperature", params.temperature, f"numbers > 0 beside {key}")
    if THRESHOLD in params.extra and PROBABILITY not in params.extra:
        raise errors.InvalidParameter(PROBABILITY, None, f"numbers above 0 and up to 1 beside {THRESHOLD}")


@attrs.frozen(kw_only=True)
class Narrow:
    """What rows ask for, where the scores are: sigma 0, typical 1 and probability 0 are off; the flags say for all."""

    sigma: mx.array  # (B, 1) float32
    typical: mx.array  # (B, 1) float32
    probability: mx.array  # (B, 1) float32
    threshold: mx.array  # (B, 1) float32
    sigmas: bool
    typicals: bool
    excludes: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams | None]) -> Narrow | None:
        """Return the parameters of rows, None for a row that has none; None where no row asks for any."""
        asked = [row.extra if row is not None else {} for row in params]
        if not any(KEYS & row.keys() for row in asked):
            return None

        def column(key: str, off: float) -> mx.array:
            return mx.array([row.get(key, off) for row in asked], dtype=mx.float32)[:, None]

        return cls(
            sigma=column(SIGMA, 0),
            typical=column(TYPICAL, 1),
            probability=column(PROBABILITY, 0),
            threshold=column(THRESHOLD, USUAL_THRESHOLD),
            sigmas=any(SIGMA in row for row in asked),
            typicals=any(TYPICAL in row for row in asked),
            excludes=any(PROBABILITY in row for row in asked),
        )

    def take(self, rows: mx.array) -> Narrow:
        """Return the parameters of each line."""
        arrays = {name: getattr(self, name)[rows] for name in ("sigma", "typical", "probability", "threshold")}
        return attrs.evolve(self, **arrays)

    def mask(self, below: mx.array, scores: mx.array, masses: mx.array, mask: mx.array | None) -> mx.array:
        """Return bool ``[R, V]``: which tokens of ``mask`` (None: of all) stay after top-n-sigma and typical.

        ``below`` are scores less the best one, ``scores`` those over the temperature, ``masses`` theirs, all ``[R, V]``.
        """
        stay = mx.ones(below.shape, dtype=mx.bool_) if mask is None else mask
        if self.sigmas:
            stay = stay & ((below >= -self.sigma * _deviation(below)) | (self.sigma <= 0))
        if self.typicals:
            stay = stay & (_typical(scores, masses * stay, self.typical) | (self.typical >= 1))
        return stay

    def excluded(self, scores: mx.array, masses: mx.array) -> mx.array:
        """Return log-probabilities ``[R, V]`` after XTC; ``masses`` are 0 where a token was filtered out."""
        total = masses.sum(axis=-1, keepdims=True).astype(mx.float32)  # (R, 1)
        shares = masses.astype(mx.float32) / total  # (R, V)
        above = shares >= self.threshold  # (R, V)
        least = mx.where(above, shares, mx.inf).min(axis=-1, keepdims=True)  # (R, 1)
        gone = above & (shares > least)  # (R, V)
        rest = (masses * ~gone).sum(axis=-1, keepdims=True).astype(mx.float32)  # (R, 1)
        stays = mx.log(1 - self.probability + self.probability * total / rest)  # (R, 1)
        moved = scores + mx.where(gone, mx.log(1 - self.probability), stays)
        return mx.where((self.probability > 0) & gone.any(axis=-1, keepdims=True), moved, scores)


def _deviation(below: mx.array) -> mx.array:
    """Return the standard deviation of each line's finite numbers, all <= 0, float32 ``[R, 1]``."""
    finite = below > -mx.inf  # (R, V)
    count = mx.maximum(finite.sum(axis=-1, keepdims=True), 1).astype(mx.int64)  # (R, 1)
    units = mx.where(finite, mx.maximum(below, -DEEPEST) * SCORE, 0.0).astype(mx.int64)  # (R, V)
    apart = mx.where(finite, units - units.sum(axis=-1, keepdims=True) // count, 0)  # (R, V)
    variance = (apart * apart).sum(axis=-1, keepdims=True).astype(mx.float32) / count.astype(mx.float32)
    return mx.sqrt(variance) / SCORE


def _typical(scores: mx.array, masses: mx.array, p: mx.array) -> mx.array:
    """Return bool ``[R, V]``: the tokens with the information closest to the entropy, their mass at least ``p``.

    The bound is found by halving the range of a float's bits: exact, in 31 sums over all lines.
    """
    whole = masses.sum(axis=-1, keepdims=True)  # (R, 1) int64
    total = whole.astype(mx.float32)
    real = masses > 0  # (R, V)
    information = mx.log(total) - 40 * math.log(2.0) - scores  # (R, V): of a mass in units of 2**-40
    weighed = mx.where(real, masses.astype(mx.float32) / total * information, 0.0)
    entropy = (weighed * BITS).astype(mx.int64).sum(axis=-1, keepdims=True).astype(mx.float32) / BITS  # (R, 1)
    apart = mx.where(real, mx.abs(information - entropy), mx.inf).view(mx.int32)  # (R, V)
    target = mx.clip((total * p).astype(mx.int64), mx.array(1, dtype=mx.int64), whole)  # (R, 1)
    low = mx.zeros(whole.shape, dtype=mx.int32)
    high = mx.full(whole.shape, INFINITY, dtype=mx.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        reached = (masses * (apart <= middle)).sum(axis=-1, keepdims=True) >= target
        low, high = mx.where(reached, low, middle + 1), mx.where(reached, middle, high)
    return apart <= high
