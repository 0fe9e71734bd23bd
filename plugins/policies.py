"""Scheduling policies: where decode stands between admissions and prefill. They own no queue and no row."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from oarlock.core import hookimpl
from oarlock.core.contracts.policy import Counts

OARLOCK_API = 1


def _first_token_waits(counts: Counts) -> bool:
    """True where ending the iteration lets a consumer see a first token before more device work."""
    alone = counts.before == 0 and not counts.preparing and counts.active == 1 and counts.queued == 0
    return counts.published or (counts.early_first_token and alone)


@attrs.frozen
class DecodeFirst:
    """Running rows advance in every iteration: they never wait longer than one prefill advance.

    Worst stall of a running row: one chunk per iteration, whatever arrives. While nothing runs, admissions group.
    """

    name: str = "decode_first"
    coalesce_s: float = 0.0

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True only while nothing ran before, so that nobody waits for the turn that is skipped."""
        return counts.before == 0 and _first_token_waits(counts)

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True only while nothing ran before."""
        return counts.before == 0


@attrs.frozen
class Fifo:
    """The reference order: a preparation that delivered a token ends the iteration, short admissions group first."""

    name: str = "fifo"
    coalesce_s: float = 0.025

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True when output was published, or a lone first token is ready."""
        return _first_token_waits(counts)

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True always."""
        return True


@hookimpl
def register_policies(register: Callable[[object], None]) -> None:
    """Register the two orders."""
    register(DecodeFirst())
    register(Fifo())
