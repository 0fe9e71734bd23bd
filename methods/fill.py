"""Fill: what must follow is appended many tokens at a time, each row as many as it knows, beside rows that take their one.

Fixed text of a constraint is known, and nothing of it is drawn. It makes no drafts and tests none: see `speculative`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.contracts.constraint import MAX_FORCED
from oarlock.core.contracts.method import MethodHost
from oarlock.core.request import is_whole
from oarlock.methods.depths import Depths, Fixed
from oarlock.methods.plain import PlainDecoding

OARLOCK_API = 1


@attrs.frozen(kw_only=True)
class FillOptions:
    """``span``: the most known tokens of a row that one step appends, up to 16; 0 appends none.

    ``adaptive``: beyond what all rows know, only as many as are worth what the others wait for them; else all.
    """

    span: int = MAX_FORCED
    adaptive: bool = True

    def __attrs_post_init__(self) -> None:
        if not is_whole(self.span) or not 0 <= self.span <= MAX_FORCED:
            msg = f"span is {self.span!r}; whole numbers of tokens, 0 to {MAX_FORCED}, are allowed"
            raise ValueError(msg)
        if not isinstance(self.adaptive, bool):
            msg = f"adaptive is {self.adaptive!r}; true and false are allowed"
            raise ValueError(msg)


class FillDecoding(PlainDecoding):
    """Plain decoding, whose rows append what each knows. While nobody knows anything it is plain decoding."""

    def __init__(self, host: MethodHost, options: FillOptions) -> None:
        super().__init__(host)
        self._most = options.span
        self._worth = (Depths if options.adaptive else Fixed)(options.span)
        self._widest = 0

    @property
    def running_tokens(self) -> int:
        """As many tokens for each row as the widest may append: what it knows shows when it is read."""
        return len(self._host.rows) * (1 + (self._most if self._host.constrained else 0))

    def advance(self, work: Any = None) -> None:
        """Take a plain step with what each row knows. One with known tokens is read at once, so that it is known what it took."""
        count, self._widest = len(self._host.rows), 0
        measured = work is None and self._host.constrained
        steady = self._register is not None or not self._pipeline
        self._worth.start()
        super().advance(work)
        if measured and self._widest:
            self.flush()
        if measured and (self._widest or steady):
            self._worth.stop(count, 1 + self._widest)

    def _spans(self, work: Any) -> Sequence[Sequence[int]]:
        """Return what must follow each row: all that everybody knows, and more where that is worth its time."""
        known = [span[: self._most] for span in self._ahead()]
        limits = list(map(len, known))
        if not any(limits):
            return ()
        least = min(limits)
        wanted = self._worth.certain(limits)
        spans = self._host.forced([span[: max(least, n)] for span, n in zip(known, wanted, strict=True)])
        self._widest = max(map(len, spans), default=0)
        if self._widest:
            self._worth.start()  # what was read before is the previous step's
        return spans


@attrs.frozen
class Fill:
    """Registers as ``fill``."""

    name: str = "fill"
    options: type = FillOptions

    def measures(self, options: FillOptions) -> bool:
        """Return whether how long steps take decides anything."""
        return options.adaptive

    def open(self, host: MethodHost, options: FillOptions) -> FillDecoding:
        """Return a method without rows."""
        return FillDecoding(host, options)


@hookimpl
def register_methods(register: Callable[[object], None]) -> None:
    """Register `fill`."""
    register(Fill())
