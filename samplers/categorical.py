"""Categorical: a random token after temperature, top_k, top_p and min_p, in this order, each row with its own.

It draws in vocabulary order by one number a row, from nothing but that row's scores, parameters and key. The filters
are in `truncate.py`; keys are made by the core.

Definitions, for a line of float32 scores x: z = (x - max x) / temperature; the order is by falling exp(z), lower id first among
equals. top_k keeps the first k; top_p the fewest in order whose mass reaches top_p times the mass that top_k left;
min_p those with exp(z) >= min_p. The best token always stays. Rows with temperature 0 get exactly greedy's token.

A draw weighs each token in units of 2**-31 (so the weights sum to about 2**31), takes a whole number r below the sum and
returns the first token whose running sum exceeds r: sums of integers, equal on every device and in every company.
Less probable than 2**-31 is never drawn, which moves at most V * 2**-31 of probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.samplers import truncate
from oarlock.samplers.greedy import GreedyRows

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Sampler
    from oarlock.core.request import SamplingParams

OARLOCK_API = 1

WEIGHT = float(2**31)
"""What the weights of one draw sum to."""

SMALLEST, LARGEST = 1e-37, 1e37
"""Bounds of 1 / temperature, so that 0 * and -inf * it are never not-a-number."""


class CategoricalRows:
    """The parameters of the rows, on the device; filters that no row asks for are skipped."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._params = tuple(params)
        self._greedy = [i for i, row in enumerate(params) if row.greedy]
        drawn = [row for row in params if not row.greedy]
        self._top_k = max((row.top_k for row in drawn), default=0)
        self._has_top_p = any(row.top_p < 1 for row in drawn)
        self._top_p_in_top_k = all(row.top_k > 0 for row in drawn if row.top_p < 1)
        self._has_min_p = any(row.min_p > 0 for row in drawn)
        scales = [1.0 if row.greedy else min(max(1 / row.temperature, SMALLEST), LARGEST) for row in params]
        self._scale = mx.array(scales, dtype=mx.float32)[:, None]  # (B, 1)
        self._k = mx.array([0 if row.greedy else min(row.top_k, 2**31 - 1) for row in params], dtype=mx.int32)[:, None]
        self._p = mx.array([1.0 if row.greedy else row.top_p for row in params], dtype=mx.float32)[:, None]
        self._min_p = mx.array([0.0 if row.greedy else row.min_p for row in params], dtype=mx.float32)[:, None]
        self._is_greedy = mx.array([row.greedy for row in params], dtype=mx.bool_)  # (B,)

    def density(self, logits: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return float32 log-probabilities ``[R, V]``; minus infinity where filtered out, also beside a greedy row's token."""
        scores, mask = self._normalised(logits, rows)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)  # (R, V)
        if self._greedy:
            greedy = self._is_greedy if rows is None else self._is_greedy[rows]  # (R,)
            scores = mx.where(greedy[:, None], GreedyRows().density(logits), scores)  # (R, V)
        return scores

    def draw(self, density: mx.array, keys: mx.array) -> mx.array:
        """Return uint32 tokens ``[R]``."""
        return _pick(_weights(density), keys)

    def sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return uint32 tokens ``[R]``, the same as `draw` of `density`."""
        if len(self._greedy) == len(self._params):
            return GreedyRows().sample(logits, keys)
        scores, mask = self._normalised(logits, rows)
        weights = _weights(scores)  # (R, V)
        tokens = _pick(weights if mask is None else weights * mask, keys)  # (R,)
        if not self._greedy:
            return tokens
        if rows is not None:
            return mx.where(self._is_greedy[rows], GreedyRows().sample(logits, keys), tokens)
        places = mx.array(self._greedy, dtype=mx.uint32)
        tokens[places] = GreedyRows().sample(logits[places], keys)
        return tokens

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self.__init__([self._params[i] for i in indices])  # type: ignore[misc]

    def _normalised(self, logits: mx.array, rows: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Return log-probabilities ``[R, V]`` that hold where the mask is true; no mask: everywhere."""
        scores = logits.astype(mx.float32)
        scale = self._scale if rows is None else self._scale[rows]  # (R, 1)
        scores = (scores - scores.max(axis=-1, keepdims=True)) * scale  # (R, V)
        bits = truncate.exponential(scores)  # (R, V)
        masses = truncate.masses(bits)  # (R, V)
        cut = self._cut(bits, masses, rows)
        mask = None if cut is None else cut.mask(bits)  # (R, V)
        kept = masses if mask is None else masses * mask  # (R, V)
        total = kept.sum(axis=-1, keepdims=True).astype(mx.float32) * 2.0**-truncate.MASS_BITS  # (R, 1)
        return scores - mx.log(total), mask

    def _cut(self, bits: mx.array, masses: mx.array, rows: mx.array | None) -> truncate.Cut | None:
        """Return what the filters leave, or None when no row has one."""
        cuts = []
        size = bits.shape[-1]
        k, p, low = (
            (self._k, self._p, self._min_p) if rows is None else (self._k[rows], self._p[rows], self._min_p[rows])
        )
        k = mx.minimum(k, size)
        best = None
        if self._top_k:
            cut, best = truncate.top_k(bits, k, min(self._top_k, size))
            cuts.append(cut)
        if self._has_top_p:
            cuts.append(self._top_p(bits, masses, best, k, p))
        if self._has_min_p:
            cuts.append(truncate.min_p(low, size))
        if not cuts:
            return None
        result = cuts[0]
        for cut in cuts[1:]:
            result = result.intersect(cut)
        return result

    def _top_p(self, bits: mx.array, masses: mx.array, best: mx.array | None, k: mx.array, p: mx.array) -> truncate.Cut:
        """Apply top_p to what top_k left; among top_k's candidates alone where every row has them."""
        if best is None:
            return truncate.top_p(bits, bits, p, masses.sum(axis=-1, keepdims=True))
        first = mx.arange(best.shape[-1], dtype=mx.int32) < k  # (R, limit)
        total = (truncate.masses(best) * first).sum(axis=-1, keepdims=True)  # (R, 1)
        if self._top_p_in_top_k:
            return truncate.top_p(bits, best, p, total)
        total = mx.where(k > 0, total, masses.sum(axis=-1, keepdims=True))
        return truncate.top_p(bits, bits, p, total)


class Categorical:
    """The sampler ``categorical``."""

    name = "categorical"
    is_argmax_invariant = True

    def handles(self, params: SamplingParams) -> bool:  # noqa: ARG002 - the contract's
        """Return True: greedy rows too."""
        return True

    def open(self, params: Sequence[SamplingParams]) -> CategoricalRows:
        """Return the rows of ``params``, in this order."""
        return CategoricalRows(params)


def _weights(density: mx.array) -> mx.array:
    """Return uint32 ``[R, V]``: probabilities in units of 2**-31."""
    return (truncate.exponential(density).view(mx.float32) * WEIGHT).astype(mx.uint32)


def _pick(weights: mx.array, keys: mx.array) -> mx.array:
    """Return, per line, the first token whose running sum exceeds a uniform whole number below the sum."""
    running = mx.cumsum(weights, axis=-1)  # (R, V)
    total = running[:, -1].astype(mx.uint64)  # (R,)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(2,), key=key))(keys)  # (R, 2)
    high, low = ((uniform * 65536.0).astype(mx.uint64)[:, i] for i in range(2))  # 16 bits each
    sixteen = mx.array(16, dtype=mx.uint64)
    chosen = mx.right_shift(high * total + mx.right_shift(low * total, sixteen), sixteen)  # (R,)
    tokens = (running <= chosen.astype(mx.uint32)[:, None]).sum(axis=-1)  # (R,)
    return mx.minimum(tokens, weights.shape[-1] - 1).astype(mx.uint32)


@hookimpl
def register_samplers(register: Callable[[Sampler], None]) -> None:
    """Register ``categorical``."""
    register(Categorical())
