"""Spans on the traces that requests bring along. They time what happens anyway and add no sync."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from oarlock.core.row import Row

_log = structlog.get_logger(__name__)
_work = itertools.count(1)


class Spans:
    """The open spans of one row: ``trace.begin(phase, attributes)`` returns the function that closes one."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace
        self._open: dict[str, Callable[[], Any]] = {}

    def __bool__(self) -> bool:
        """Return whether anybody traces."""
        return self._trace is not None

    def begin(self, phase: str, **attributes: Any) -> None:
        """Open a span. A trace that raises is logged and not asked again."""
        if self._trace is not None:
            self._guarded(lambda: self._open.__setitem__(phase, self._trace.begin(phase, attributes)))

    def end(self, *phases: str) -> None:
        """Close the named spans, or all of them, the latest first; those that are not open are passed over."""
        for phase in phases or reversed(list(self._open)):
            close = self._open.pop(phase, None)
            if close is not None:
                self._guarded(close)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a trace disturbs nothing
            self._trace = None
            _log.warning("trace_failed", error=repr(error))


@contextlib.contextmanager
def shared(rows: Iterable[Row], phase: str, tokens: int, **attributes: Any) -> Iterator[None]:
    """Record shared work on every traced row, under one work id; such spans are not additive across rows.

    ``tokens`` are those of each row.
    """
    rows = list(rows)
    traced = [row for row in rows if row.spans]
    if not traced:
        yield
        return
    work = next(_work)
    for row in traced:
        row.spans.begin(phase, work=work, rows=len(rows), tokens=tokens, **attributes)
    try:
        yield
    finally:
        for row in traced:
            row.spans.end(phase)
