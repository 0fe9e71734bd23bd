"""The rows that requests have in the engine right now, as the page shows them. It observes and changes nothing."""

from __future__ import annotations

import time
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.request import Request

QUEUED, PREFILL, DECODE = "queued", "prefill", "decode"


@attrs.define(eq=False, kw_only=True)
class Row:
    """One row. Times are seconds of the clock of `time.monotonic`."""

    id: str
    phase: str = QUEUED
    tokens: int = 0
    submitted: float = attrs.field(factory=time.monotonic)
    first: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, by the time since then; 0 before there is one."""
        spent = time.monotonic() - self.first if self.first is not None else 0.0
        return (self.tokens - 1) / spent if spent > 0 and self.tokens > 1 else 0.0


@attrs.define(eq=False)
class Board:
    """A plugin of the engine: it is told what becomes of requests on the engine's thread, and read on any other."""

    _rows: dict[str, Row] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        """Return how many rows wait, prepare or run."""
        return len(self._rows)

    def enter(self, name: str) -> None:
        """Put a request on the board, before it is submitted."""
        self._rows[name] = Row(id=name)

    def count(self, name: str) -> None:
        """Count a token that a request was delivered."""
        if (row := self._rows.get(name)) is not None:
            row.tokens += 1

    def leave(self, name: str) -> None:
        """Take a request off the board."""
        self._rows.pop(name, None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows in the order in which they were submitted."""
        now = time.monotonic()
        return [
            {
                "id": row.id,
                "phase": row.phase,
                "tokens": row.tokens,
                "seconds": round(now - row.submitted, 3),
                "tokens_per_second": round(row.tokens_per_second, 2),
            }
            for row in list(self._rows.values())
        ]

    def _set(self, request: Request, phase: str) -> Row | None:
        row = self._rows.get(request.id or "")
        if row is not None:
            row.phase = phase
        return row

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """Called when a request leaves the queue."""
        self._set(request, PREFILL)

    @hookimpl
    def request_first_token(self, request: Request) -> None:
        """Called when a request has its first token."""
        if (row := self._set(request, DECODE)) is not None:
            row.first = time.monotonic()

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """Called when a request goes back to the queue."""
        self._set(request, QUEUED)
