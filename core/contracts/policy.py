"""Scheduling policies: small stateless objects that place decode between admissions and prefill, and order those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs


@attrs.frozen(kw_only=True)
class Counts:
    """What a policy may look at. ``before``: rows running when the iteration's preparation began."""

    before: int
    active: int
    preparing: bool
    queued: int
    published: bool
    room: bool
    groups: bool
    early_first_token: bool


@attrs.frozen(kw_only=True)
class Lane:
    """The waiting rows of one priority, first come first.

    ``passed``: rows of other priorities that were admitted since one of this was, while one of this waited.
    """

    priority: int
    passed: int


class Policy(Protocol):
    """Where decode stands between admissions and preparations, and who is next. Stateless, chosen in the config.

    The fields of one that is an attrs class are its options: the config changes them in a copy of the one registered.
    """

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def coalesce_s(self) -> float:
        """Seconds that a lone running row may go on without ending the iteration."""
        ...

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True to end the iteration before decode, so that first tokens are seen early.

        Where it would for a preparation that delivers nothing, no decode step takes a chunk of it along.
        """
        ...

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True to go round again without decoding, so that admissions group before the next step."""
        ...

    def choose(self, lanes: Sequence[Lane]) -> int:
        """Return the place in ``lanes`` of the priority whose first row is admitted next.

        Called where rows of several priorities wait, each time the head of the queue is asked for; ``lanes`` go from
        the highest priority down. Rows put back by preemption come before all of them.
        """
        ...
