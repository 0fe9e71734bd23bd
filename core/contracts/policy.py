"""Scheduling policies: small stateless objects that place decode between admissions and prefill."""

from __future__ import annotations

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


class Policy(Protocol):
    """Where decode stands between admissions and preparations. Stateless, chosen in the config."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def coalesce_s(self) -> float:
        """Seconds that a lone running row may go on without ending the iteration."""
        ...

    def ends_after_preparation(self, counts: Counts) -> bool:
        """Return True to end the iteration before decode, so that first tokens are seen early."""
        ...

    def admits_before_decode(self, counts: Counts) -> bool:
        """Return True to go round again without decoding, so that admissions group before the next step."""
        ...
