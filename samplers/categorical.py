"""Categorical: a random token after temperature, top_k, top_p and min_p, in this order, each row with its own.

It draws in vocabulary order by one number a row, from nothing but that row's scores, parameters and key. The filters
are in `truncate.py`; keys are made by the core.

For a line of float32 scores x: z = (x - max x) / temperature, exp(z) is the relative probability, and tokens are in
order by falling exp(z), lower id first among equals. top_k keeps the first k. top_p keeps the fewest in order whose
mass reaches top_p times the mass that top_k left. min_p keeps exp(z) >= min_p, equals included. The best token always
stays. Rows with temperature 0 get exactly greedy's token. Rarer filters, of `SamplingParams.extra`, follow: see `narrow.py`.

A draw weighs tokens in units of 2**-31 (the weights sum to about 2**31), takes a uniform whole number below the sum and
returns the first token whose running sum exceeds it: sums of integers, equal on every device and in every company.
What is less probable than 2**-31 is never drawn; that moves at most V * 2**-31 of probability.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.samplers import narrow, truncate
from oarlock.samplers.greedy import GreedyRows
from oarlock.samplers.lanes import spread

if TYPE_CHECKING:
    from oarlock.core.contracts.sampler import Sampler
    from oarlock.core.request import SamplingParams

OARLOCK_API = 1

WEIGHT = float(2**31)
"""What the weights of one draw sum to."""

LARGEST_K = 2**31 - 1

SMALLEST, LARGEST = 1e-37, 1e37
"""Bounds of 1 / temperature, so that 0 * and -inf * it are never not-a-number."""


@attrs.frozen(kw_only=True)
class _Device:
    """The parameters of all rows where the scores are: scale is 1 / temperature, k 0, p 1 and least 0 are off."""

    scale: mx.array  # (B, 1) float32
    k: mx.array  # (B, 1) int32
    p: mx.array  # (B, 1) float32
    least: mx.array  # (B, 1) float32
    greedy: mx.array  # (B, 1) bool
    narrow: narrow.Narrow | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> _Device:
        """Copy the parameters of greedy rows as those that filter nothing."""
        drawn = [None if row.greedy else row for row in params]

        def column(values: list[Any], dtype: mx.Dtype) -> mx.array:
            return mx.array(values, dtype=dtype).reshape(-1, 1)

        return cls(
            scale=column([min(max(1 / r.temperature, SMALLEST), LARGEST) if r else 1.0 for r in drawn], mx.float32),
            k=column([min(r.top_k, LARGEST_K) if r else 0 for r in drawn], mx.int32),
            p=column([r.top_p if r else 1.0 for r in drawn], mx.float32),
            least=column([r.min_p if r else 0.0 for r in drawn], mx.float32),
            greedy=column([r is None for r in drawn], mx.bool_),
            narrow=narrow.Narrow.of(drawn),
        )

    def take(self, rows: mx.array | None) -> _Device:
        """Return the parameters of each line."""
        if rows is None:
            return self
        arrays = {name: getattr(self, name)[rows] for name in ("scale", "k", "p", "least", "greedy")}
        return _Device(**arrays, narrow=self.narrow.take(rows) if self.narrow is not None else None)


class CategoricalRows:
    """A group's rows. What no row asks for is known on the host and skipped."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._set(params)

    def density(self, logits: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return float32 log-probabilities ``[R, V]``: minus infinity where filtered out, and beside greedy's token."""
        device = self._device.take(rows)
        scores, mask = self._normalised(logits, device)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)  # (R, V)
        if self._greedy:
            scores = mx.where(device.greedy, GreedyRows().density(logits), scores)  # (R, V)
        return scores

    def draw(self, density: mx.array, keys: mx.array) -> mx.array:
        """Return uint32 tokens ``[R]``."""
        return _pick(_weights(density), keys)

    def sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return uint32 tokens ``[R]``, bit for bit those of `draw` of `density`."""
        if self._greedy and not self._drawn:
            return GreedyRows().sample(logits, keys)
        return spread(logits.shape, lambda part: self._sample(logits[part], keys[part], self._whose(rows, part)))

    def _whose(self, rows: mx.array | None, part: slice) -> mx.array | None:
        """Return the rows of some lines; None where they are all rows in their order."""
        if rows is not None:
            return rows[part]
        whole = part == slice(0, len(self._params))
        return None if whole else mx.arange(part.start, part.stop, dtype=mx.int32)

    def _sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None) -> mx.array:
        device = self._device.take(rows)
        scores, mask = self._normalised(logits, device)
        weights = _weights(scores)  # (R, V)
        tokens = _pick(weights if mask is None else weights * mask, keys)  # (R,)
        if not self._greedy:
            return tokens
        if rows is not None:
            return mx.where(device.greedy[:, 0], GreedyRows().sample(logits, keys), tokens)
        places = mx.array(self._greedy, dtype=mx.uint32)
        tokens[places] = GreedyRows().sample(logits[places], keys)
        return tokens

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        self._set([self._params[i] for i in indices])

    def _set(self, params: Sequence[SamplingParams]) -> None:
        self._params = tuple(params)
        self._device = _Device.of(params)
        self._greedy = [i for i, row in enumerate(params) if row.greedy]
        self._drawn = [row for row in params if not row.greedy]

    def _normalised(self, logits: mx.array, device: _Device) -> tuple[mx.array, mx.array | None]:
        """Return log-probabilities ``[R, V]`` that hold where the mask is true; no mask: everywhere."""
        below = logits.astype(mx.float32)
        below = below - below.max(axis=-1, keepdims=True)  # (R, V)
        scores = below * device.scale  # (R, V)
        bits = truncate.exponential(scores)  # (R, V)
        masses = truncate.masses(bits)  # (R, V)
        cut = self._cut(bits, masses, device)
        mask = None if cut is None else cut.mask(bits)  # (R, V)
        if device.narrow is not None:
            mask = device.narrow.mask(below, scores, masses, mask)
        kept = masses if mask is None else masses * mask  # (R, V)
        total = kept.sum(axis=-1, keepdims=True).astype(mx.float32) * 2.0**-truncate.MASS_BITS  # (R, 1)
        scores = scores - mx.log(total)
        if device.narrow is not None and device.narrow.excludes:
            scores = device.narrow.excluded(scores, kept)
        return scores, mask

    def _cut(self, bits: mx.array, masses: mx.array, device: _Device) -> truncate.Cut | None:
        """Return what the filters leave, or None when no row has one. A top_k of V or more is none."""
        size = bits.shape[-1]
        limit = max((row.top_k for row in self._drawn if row.top_k < size), default=0)
        device = attrs.evolve(device, k=mx.where(device.k < size, device.k, 0))
        cuts, best = [], None
        if limit:
            cut, best = truncate.top_k(bits, device.k, limit)
            cuts.append(cut)
        if any(row.top_p < 1 for row in self._drawn):
            cuts.append(self._top_p(bits, masses, best, device))
        if any(row.min_p > 0 for row in self._drawn):
            cuts.append(truncate.min_p(device.least, size))
        return functools.reduce(truncate.Cut.intersect, cuts) if cuts else None

    def _top_p(self, bits: mx.array, masses: mx.array, best: mx.array | None, device: _Device) -> truncate.Cut:
        """Apply top_p to what top_k left: among top_k's candidates alone where every row with top_p has them."""
        if best is None:
            return truncate.top_p(bits, bits, device.p, masses.sum(axis=-1, keepdims=True))
        first = mx.arange(best.shape[-1], dtype=mx.int32) < device.k  # (R, limit)
        total = (truncate.masses(best) * first).sum(axis=-1, keepdims=True)  # (R, 1)
        if all(0 < row.top_k < bits.shape[-1] for row in self._drawn if row.top_p < 1):
            return truncate.top_p(bits, best, device.p, total)
        total = mx.where(device.k > 0, total, masses.sum(axis=-1, keepdims=True))
        return truncate.top_p(bits, bits, device.p, total)


class Categorical:
    """The sampler ``categorical``."""

    name = "categorical"
    is_argmax_invariant = True
    extra = narrow.KEYS

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Raise for values of the rarer filters that cannot be."""
        narrow.check(params)

    def handles(self, params: SamplingParams) -> bool:
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
