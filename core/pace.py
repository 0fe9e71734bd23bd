"""How long prefill takes, and how much of it fits between two steps of running rows. It sees counts and a clock only."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

KEPT = 0.75
"""The share of its weight that a measurement keeps at each later one."""


@attrs.define
class Pace:
    """Says how many prompt tokens may be forwarded so that running rows wait no more than ``bound`` seconds.

    A forward of n tokens is taken to last ``fixed + n * each``, fitted to exponential means of those seen. The first of
    them nobody waited for: they are those of the prompt of the row that runs alone. Where there were none, one token
    fits. ``bound`` 0 bounds and measures nothing.
    """

    bound: float
    clock: Callable[[], float] = time.perf_counter
    _began: float = attrs.field(default=0.0, init=False)
    _forward: float = attrs.field(default=0.0, init=False)
    _sums: tuple[float, ...] = attrs.field(default=(0.0,) * 5, init=False)

    def start(self) -> None:
        """Begin an advance of the preparation: from now on running rows wait."""
        self._began = self.clock()

    def before(self) -> None:
        """Begin a forward."""
        self._forward = self.clock()

    def after(self, tokens: int) -> None:
        """End a forward of ``tokens`` over all rows, evaluated and all."""
        seconds = self.clock() - self._forward
        seen = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(KEPT * old + new for old, new in zip(self._sums, seen, strict=True))

    def tokens(self) -> int:
        """Return how many more tokens fit into the advance, over all rows; 0 where none do."""
        weight, tokens, seconds, squares, products = self._sums
        left = self.bound - (self.clock() - self._began)
        if not seconds:
            return 1
        spread = weight * squares - tokens * tokens
        slope = (weight * products - tokens * seconds) / spread if spread > 1e-6 * weight * squares else 0.0
        each = slope if slope > 0 else seconds / tokens  # all of one width so far, or noise
        fit = (left - max(0.0, (seconds - each * tokens) / weight)) / each
        # A straight line from a cost that is not negative: n times as many tokens take at most n times as long, and a
        # part of them at least that part. What a noisy fit says beyond twice the former is not believed.
        ratio = left * tokens / seconds
        return max(0, int(min(fit, ratio) if left * weight < seconds else min(max(fit, ratio), 2 * ratio)))
