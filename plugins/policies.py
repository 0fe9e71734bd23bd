"""Scheduling policies: where decode stands between admissions and prefill, and whose turn it is. They own no row.

What each promises is an inequality over what the config allows: ``rows`` are `scheduler.max_batch`, ``advance`` is the
most that one advance of a preparation forwards: `scheduler.prefill_batch_tokens`, or a chunk and a token where that is
more. ``prompt`` and ``answer`` are the longest there are, in tokens; ``chunks`` are those of the longest prompt. A
stall is counted in prefill tokens between two steps of a running row. Rows that end with their first token take no
place in the batch and stand apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.contracts.policy import Counts, Lane

OARLOCK_API = 1


def _first_token_waits(counts: Counts) -> bool:
    """True where ending the iteration lets a consumer see a first token before more device work."""
    alone = counts.before == 0 and not counts.preparing and counts.active == 1 and counts.queued == 0
    return counts.published or (counts.early_first_token and alone)


def _whole(_: object, field: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int or value < 1:
        msg = f"{field.name} is {value!r}; whole numbers >= 1 are allowed"
        raise ValueError(msg)


def _seconds(_: object, field: attrs.Attribute[float], value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        msg = f"{field.name} is {value!r}; finite numbers of seconds >= 0 are allowed"
        raise ValueError(msg)


class _HighestFirst:
    """First come first served within a priority, and no priority waits for a lower one."""

    def choose(self, lanes: Sequence[Lane]) -> int:
        """Return the highest priority."""
        return 0


@attrs.frozen
class DecodeFirst(_HighestFirst):
    """Running rows advance in every iteration; while nothing runs, admissions group.

    Worst stall: ``advance``, whatever arrives. Worst wait: a higher priority goes first however long it comes.
    """

    name: str = "decode_first"
    coalesce_s: float = attrs.field(default=0.0, validator=_seconds)

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True only while nothing ran before, so that nobody waits for the turn that is skipped."""
        return counts.before == 0 and _first_token_waits(counts)

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True only while nothing ran before."""
        return counts.before == 0


@attrs.frozen
class Fifo(_HighestFirst):
    """The reference order: a preparation that delivered a token ends the iteration, short admissions group first.

    Worst stall: ``rows * advance``, where short prompts come one by one. Worst wait: as under `decode_first`.
    """

    name: str = "fifo"
    coalesce_s: float = attrs.field(default=0.025, validator=_seconds)

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True when output was published, or a lone first token is ready."""
        return _first_token_waits(counts)

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True always."""
        return True


@attrs.frozen
class PrefillFirst(_HighestFirst):
    """Prompts go first: who waits and finds a place gets its first token before running rows get their next.

    Worst stall: ``(rows - 1) * prompt``. Worst wait of a request that finds a place: no step of the running rows.
    """

    name: str = "prefill_first"
    coalesce_s: float = attrs.field(default=0.0, validator=_seconds)

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True until every prompt is done, and for first tokens to be seen."""
        return counts.preparing or _first_token_waits(counts)

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True always."""
        return True


@attrs.frozen
class FairShare(DecodeFirst):
    """Steps as under `decode_first`; a priority that was passed over ``patience`` times is next, whoever else waits.

    Worst stall: ``advance``. Worst wait of the first of its priority among ``lanes`` of them, with a steady stream of
    others: ``patience + lanes - 1`` admissions, and so ``(patience + lanes + rows) * (chunks + answer)`` steps.
    """

    name: str = "fair_share"
    patience: int = attrs.field(default=4, validator=_whole)

    def choose(self, lanes: Sequence[Lane]) -> int:
        """Return the one passed over most often where that is too often, else the highest priority."""
        longest = max(range(len(lanes)), key=lambda place: lanes[place].passed)
        return longest if lanes[longest].passed >= self.patience else 0


@hookimpl
def register_policies(register: Callable[[object], None]) -> None:
    """Register the four orders."""
    for policy in (DecodeFirst(), Fifo(), PrefillFirst(), FairShare()):
        register(policy)
