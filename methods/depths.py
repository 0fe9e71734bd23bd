"""How many drafts each row gets in a step, none included: from what was accepted and what steps took. It drafts nothing.

Rows beside each other differ widely, and a window that is too wide for what is accepted is slower than plain steps. So a
row's depth goes by the share of its drafts that it took, the window by what one of that width took, and both against a
plain step of as many rows. None of it changes a token: only how many are tried at once.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import attrs

PRIOR = 0.6
"""The share of drafts that a row is taken to accept before any was verified."""
GAIN = 0.15
"""How far one draft moves that share."""
LEAST = 0.2
"""A draft that is less likely to be reached and accepted is not made."""
TRIES = 3
"""So often is a width tried before what it took is believed; until then it is taken to cost what narrower ones do."""
STALE = 1024
"""After so many steps without it a width is tried once more: the machine may have been busy, contexts grow."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Steps between two trials of rows that get no drafts; twice as many after each in vain."""


@attrs.define
class _Cost:
    """Seconds of one kind of step: the least of the first few, then a mean that no single delay can spoil."""

    seconds: float
    seen: int = 1
    at: int = 0

    def add(self, seconds: float) -> None:
        if self.seen < TRIES:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += 0.2 * (min(seconds, 2 * self.seconds) - self.seconds)
        self.seen += 1


@attrs.define(eq=False)
class Depths:
    """Chooses up to ``most`` drafts a row; rows are told apart by hash. `choose` changes nothing, so it can be repeated.

    Call `start` before a step, and `stop` after it where its time is that of a step of its kind.
    """

    most: int
    clock: Callable[[], float] = time.perf_counter
    _rates: dict[Hashable, float] = attrs.field(factory=dict, init=False)
    _plain: dict[int, _Cost] = attrs.field(factory=dict, init=False)
    """By rows."""
    _verify: dict[int, _Cost] = attrs.field(factory=dict, init=False)
    """By tokens of the whole window."""
    _began: float = attrs.field(default=0.0, init=False)
    _steps: int = attrs.field(default=0, init=False)
    _waits: int = attrs.field(default=0, init=False)
    _pause: int = attrs.field(default=FIRST_PAUSE, init=False)

    def choose(self, rows: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        """Return how many drafts each row is to have, at most its limit. Without a plain step to compare with: none."""
        if not self._plain:
            return [0] * len(rows)
        depths = self._worth([self._rates.get(row, PRIOR) for row in rows], limits)
        if self._waits or not any(self._worth([1.0] * len(rows), limits)):  # not even if all were accepted
            return depths
        return [max(depth, min(1, limit, self.most)) for depth, limit in zip(depths, limits, strict=True)]

    def certain(self, limits: Sequence[int]) -> list[int]:
        """Return how many tokens each row is to have of those, up to its limit, that it will take for certain."""
        return self._worth([1.0] * len(limits), limits) if self._plain else [0] * len(limits)

    def start(self) -> None:
        """Begin a step."""
        self._began = self.clock()

    def stop(self, rows: int, width: int) -> None:
        """End a step of so many rows: a plain one, or one whose widest row verified ``width - 1`` drafts."""
        seconds = self.clock() - self._began
        self._steps += 1
        costs, key = (self._plain, rows) if width == 1 else (self._verify, rows * width)
        if key in costs:
            costs[key].add(seconds)
        else:
            costs[key] = _Cost(seconds)
        costs[key].at = self._steps

    def passed(self) -> None:
        """Note a step without drafts."""
        self._waits = max(0, self._waits - 1)

    def verified(self, rows: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Note how many of its drafts each row accepted."""
        for row, drafts, taken in zip(rows, drafted, accepted, strict=True):
            rate = self._rates.get(row, PRIOR)
            for hit in [1.0] * taken + [0.0] * (taken < drafts):
                rate += GAIN * (hit - rate)
            if drafts:
                self._rates[row] = rate
        if self._waits:
            self._waits -= 1
            return
        rates = [self._rates.get(row, PRIOR) for row in rows]
        pays = any(self._worth(rates, [self.most] * len(rows)))
        self._pause = FIRST_PAUSE if pays else min(LONGEST_PAUSE, 2 * self._pause)
        self._waits = self._pause

    def drop(self, rows: Iterable[Hashable]) -> None:
        """Forget rows."""
        for row in rows:
            self._rates.pop(row, None)

    def _worth(self, rates: Sequence[float], limits: Sequence[int]) -> list[int]:
        """Return the depths that give the most tokens a second at these rates; none where a plain step does."""
        caps = [min(limit, self.most, _deepest(rate, self.most)) for limit, rate in zip(limits, rates, strict=True)]
        count, gained = len(rates), 0.0
        plain = self._plain_seconds(count)
        known = [(count, plain), *self._believed(count)]
        best, speed = 0, count / plain
        for depth in range(1, max(caps, default=0) + 1):
            gained += sum(rate**depth for rate, cap in zip(rates, caps, strict=True) if depth <= cap)
            faster = (count + gained) / _between(known, count * (1 + depth))
            if faster > speed:
                best, speed = depth, faster
        return [min(best, cap) for cap in caps]

    def _plain_seconds(self, rows: int) -> float:
        """Return what a plain step of so many rows takes, or of nearly as many where there was none."""
        nearest = min(self._plain, key=lambda seen: (abs(seen - rows), seen))
        return max(self._plain[nearest].seconds, 1e-9)

    def _believed(self, rows: int) -> list[tuple[int, float]]:
        """Return the tokens and seconds of windows that were tried often enough, and not too long ago, ascending."""
        fresh = ((tokens, cost) for tokens, cost in self._verify.items() if self._steps - cost.at <= STALE)
        return sorted((tokens, cost.seconds) for tokens, cost in fresh if cost.seen >= TRIES and tokens > rows)


def _between(known: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the seconds at ``tokens``, on a line between those next to it; beyond the last, what that takes."""
    place = bisect.bisect_left(known, (tokens, 0.0))
    if place == len(known):
        return max(seconds for _, seconds in known)
    (before, least), (after, most) = known[place - 1], known[place]
    return least + (most - least) * (tokens - before) / (after - before)


def _deepest(rate: float, most: int) -> int:
    """Return how many drafts in a row are likely enough."""
    depth, chance = 0, rate
    while depth < most and chance >= LEAST:
        depth, chance = depth + 1, chance * rate
    return depth


@attrs.frozen(eq=False)
class Fixed:
    """As many drafts as there are, up to ``most``, whatever that takes. The same calls as `Depths`."""

    most: int

    def choose(self, rows: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        """Return the limits."""
        return self.certain(limits)

    def certain(self, limits: Sequence[int]) -> list[int]:
        """Return the limits."""
        return [min(limit, self.most) for limit in limits]

    def start(self) -> None:
        """Measure nothing."""

    def stop(self, rows: int, width: int) -> None:
        """Measure nothing."""

    def passed(self) -> None:
        """Note nothing."""

    def verified(self, rows: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Note nothing."""

    def drop(self, rows: Iterable[Hashable]) -> None:
        """Forget nothing: nothing is known."""
