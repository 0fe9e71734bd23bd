"""The filters top_k, top_p and min_p, exact and without a sort; they know nothing of keys, draws or rows.

A line is given by its **relative probabilities** (`exponential` of score minus highest score): float32 in [0, 1],
the best token has 1. Tokens are in **order** when the more probable comes first and, among equals, the lower id. top_k and
top_p keep a beginning of that order, min_p everything above a bound. Each is a `Cut`, and cuts intersect.

Masses are sums of integers (`masses`), so they depend neither on the order of adding nor on how a device splits a sum:
a line's outcome is the same bits whatever lines stand beside it and whichever way led to it.

How top_p finds its bound. Halve: partition the candidates by count and add up the better half; if its mass reaches
the target the bound is inside, else that half is kept and the bound is in the other one. The shapes are static and
halve each time, so all levels together cost two partitions; the last `BLOCK` are sorted. Of 16 lines x 49,152 on a
2-core x86 CPU: halving 15 ms, a full sort 62, bisecting the bits with one masked sum a pass 43, eight bounds a pass
125. A prefix of the best 1,024 takes 7 and is wrong for flat lines. Metal was not measured: there a partition is a sort,
so halving costs two sorts in about 80 small kernels, bisecting 90 passes over all lines.
"""

from __future__ import annotations

import attrs
import mlx.core as mx

MASS_BITS = 40
"""A mass counts in units of 2**-40 of the best token's probability."""

BLOCK = 1024
"""From this many candidates on, sorting them is cheaper than halving on; `_running` allows at most 2**11."""

ONE = 0x3F800000
"""The bits of 1.0 in float32. Floats that are not negative compare as their bits do."""

SPARED = 2.0**-20
"""A share of the mass that rounding of a target stays far below."""

LOG2_E = 1.4426950408889634
ROUNDER = 12582912.0
"""1.5 * 2**23: adding it to a float32 leaves the nearest integer in the low bits."""

EXP2 = (
    1.0,
    0.6931471805599453,
    0.2402265069591007,
    0.0555041086648216,
    0.0096181291076285,
    0.0013333558146428,
    0.0001540353039338,
)
"""Taylor coefficients of 2**f; the remainder is below 1.3e-7 of the value for abs(f) <= 1/2."""


@attrs.frozen
class Cut:
    """Which tokens of each line stay: those above ``bound`` and the first ``ties`` by id of those equal to it.

    ``bound`` int32 ``[R, 1]``: bits of a relative probability, -1 keeps all. ``ties`` int32 ``[R, 1]``.
    """

    bound: mx.array
    ties: mx.array

    def intersect(self, other: Cut) -> Cut:
        """Return the cut that keeps what both keep."""
        tighter = mx.where(self.bound > other.bound, self.ties, other.ties)
        ties = mx.where(self.bound == other.bound, mx.minimum(self.ties, other.ties), tighter)
        return Cut(mx.maximum(self.bound, other.bound), ties)

    def mask(self, bits: mx.array) -> mx.array:
        """Return bool ``[R, V]``: which tokens stay."""
        equal = bits == self.bound  # (R, V)
        return (bits > self.bound) | (equal & (mx.cumsum(equal, axis=-1) <= self.ties))  # (R, V)


def exponential(values: mx.array) -> mx.array:
    """Return e**values as bits (int32) of float32 in [0, 1], for values <= 0; not-a-number gives any such number.

    MLX's CPU exponential takes 19 ns a number, a third of a whole sampling step; the same by multiplication and
    addition takes 5. Elsewhere MLX's own is one kernel. Removable when `mlx.core.exp` is vectorised on x86.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return _at_most_one(mx.exp(values))
    power = mx.maximum(values * LOG2_E, -126.0)
    rounded = power + ROUNDER
    rest = power - (rounded - ROUNDER)
    result = rest * EXP2[-1] + EXP2[-2]
    for coefficient in EXP2[-3::-1]:
        result = result * rest + coefficient
    return _at_most_one(result.view(mx.uint32) + mx.left_shift(rounded.view(mx.uint32), mx.array(23, dtype=mx.uint32)))


def _at_most_one(numbers: mx.array) -> mx.array:
    """Return the bits of 32-bit numbers from 0 to 1; anything else becomes 1."""
    return mx.minimum(numbers.view(mx.uint32), mx.array(ONE, dtype=mx.uint32)).view(mx.int32)


def masses(bits: mx.array) -> mx.array:
    """Return int64 masses of relative probabilities given by their bits."""
    return (bits.view(mx.float32) * float(2**MASS_BITS)).astype(mx.int64)


def top_k(bits: mx.array, k: mx.array, limit: int) -> tuple[Cut, mx.array]:
    """Keep the first k tokens in order (Fan et al., 2018); 0 keeps all.

    ``k`` int32 ``[R, 1]``, none above ``limit``, a host number from 1 to V. Returns the cut and, descending, the
    bits of the first ``limit`` tokens ``[R, limit]``.
    """
    size = bits.shape[-1]
    best = bits if limit == size else mx.partition(bits, size - limit, axis=-1)[:, size - limit :]  # (R, limit)
    best = mx.sort(best, axis=-1)[:, ::-1]  # (R, limit)
    bound = mx.take_along_axis(best, mx.maximum(k - 1, 0), axis=-1)  # (R, 1)
    ties = k - (bits > bound).sum(axis=-1, keepdims=True)  # (R, 1)
    return Cut(mx.where(k > 0, bound, -1), mx.where(k > 0, ties, 0)), best


def top_p(bits: mx.array, candidates: mx.array, p: mx.array, total: mx.array) -> Cut:
    """Keep the fewest tokens, in order, whose mass reaches ``p * total`` (Holtzman et al., 2020); 1 keeps all.

    ``p`` float32 ``[R, 1]``; ``total`` int64 ``[R, 1]``, the mass that counts as all of it. ``candidates`` int32
    ``[R, C]``: the best tokens' bits in any order, enough of them to hold ``total``; ``bits`` itself always is.
    """
    target = (total.astype(mx.float32) * p).astype(mx.int64)  # (R, 1)
    target = mx.clip(target, mx.array(1, dtype=mx.int64), total)
    candidates = candidates * (candidates.view(mx.float32) >= _negligible(p, total, bits.shape[-1]))  # (R, C)
    kept = mx.zeros(target.shape, dtype=mx.int32)  # (R, 1)
    lines = mx.arange(bits.shape[0]) * 2  # (R,)
    while (size := candidates.shape[-1]) > BLOCK:
        if size % 2:
            candidates, size = mx.pad(candidates, [(0, 0), (0, 1)]), size + 1
        half = size // 2
        halves = mx.partition(candidates, half, axis=-1)  # (R, size), the better half last
        mass = masses(halves[:, half:]).sum(axis=-1, keepdims=True)  # (R, 1)
        inside = mass >= target  # (R, 1)
        target = mx.where(inside, target, target - mass)
        kept = mx.where(inside, kept, kept + half)
        candidates = halves.reshape(-1, half)[lines + inside[:, 0]]  # (R, half)
    candidates = mx.sort(candidates, axis=-1)[:, ::-1]  # (R, C)
    short = _running(masses(candidates)) < target  # (R, C)
    last = short.sum(axis=-1, keepdims=True)  # (R, 1)
    bound = mx.take_along_axis(candidates, last, axis=-1)  # (R, 1)
    ties = kept + last + 1 - (bits > bound).sum(axis=-1, keepdims=True)  # (R, 1)
    return Cut(mx.where(p < 1, bound, -1), mx.where(p < 1, ties, 0))


def _negligible(p: mx.array, total: mx.array, size: int) -> mx.array:
    """Return a relative probability ``[R, 1]`` below which no token of ``size`` is needed for ``p * total``.

    All those together weigh less than half of what may be missing, or nothing counts as such where that is near rounding.
    Partitioning is several times as fast where most candidates are equal: of a model's scores hardly a tenth are left.
    """
    missing = mx.maximum(1 - p - SPARED, 0)  # (R, 1)
    least = missing * total.astype(mx.float32) * (0.5 * 2.0**-MASS_BITS / size)  # (R, 1)
    return mx.where(p < 1, least, 2.0)  # without top_p none is: what is found for such a line counts for nothing


def _running(values: mx.array) -> mx.array:
    """Return running sums of masses ``[R, C]``, C <= BLOCK, without a 64-bit scan, which MLX has not everywhere."""
    bits = mx.array(MASS_BITS // 2, dtype=mx.int64)
    high = mx.right_shift(values, bits)
    low = values - mx.left_shift(high, bits)
    high, low = (mx.cumsum(part.astype(mx.uint32), axis=-1).astype(mx.int64) for part in (high, low))
    return mx.left_shift(high, bits) + low


def min_p(p: mx.array, size: int) -> Cut:
    """Keep tokens at least ``p`` times as probable as the best one (Nguyen et al., 2024); 0 keeps all.

    ``p`` float32 ``[R, 1]``; ``size`` is V. Every token that equals the bound stays.
    """
    return Cut(p.view(mx.int32), mx.full(p.shape, size, dtype=mx.int32))
