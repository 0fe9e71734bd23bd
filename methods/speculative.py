"""Speculative decoding: a proposer's drafts are verified in one forward, each row with its own number of them.

A draft is accepted where it is the token that the row draws there itself, greedy or with its seed, so tokens are those
of plain decoding whoever drafts, and however well. What a row's constraint leaves no choice about goes before drafts. It
makes no drafts, and says not how many pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import structlog

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache
from oarlock.core.contracts.method import Draw, Drawn, MethodHost
from oarlock.core.contracts.proposer import StoringRows
from oarlock.core.request import is_whole
from oarlock.core.row import Row
from oarlock.methods.depths import Depths, Fixed
from oarlock.methods.fill import FillDecoding, FillOptions

OARLOCK_API = 1
_log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class SpeculativeOptions:
    """``proposer`` is a registered name, or a table of it and its options; ``depth`` the most drafts a row and step.

    ``adaptive``: fewer where fewer pay, and none where none do; else as many as there are. A depth of 0 is `plain`.
    """

    proposer: str | Mapping[str, Any] = "ngram"
    depth: int = 8
    adaptive: bool = True

    def __attrs_post_init__(self) -> None:
        if not is_whole(self.depth) or self.depth < 0:
            msg = f"depth is {self.depth!r}; whole numbers of drafts, 0 or more, are allowed"
            raise ValueError(msg)
        if not isinstance(self.adaptive, bool):
            msg = f"adaptive is {self.adaptive!r}; true and false are allowed"
            raise ValueError(msg)
        name = self.proposer.get("name") if isinstance(self.proposer, Mapping) else self.proposer
        if not isinstance(name, str) or not name.strip():
            msg = f'proposer is {self.proposer!r}; a name, or a table with "name" and options, is allowed'
            raise ValueError(msg)

    @property
    def chosen(self) -> tuple[str, dict[str, Any]]:
        """The proposer's name and its options."""
        table = self.proposer if isinstance(self.proposer, Mapping) else {"name": self.proposer}
        return table["name"], {option: value for option, value in table.items() if option != "name"}


class SpeculativeDecoding(FillDecoding):
    """`fill`'s caches and register, and a proposer. While nobody has a draft it is that."""

    def __init__(self, host: MethodHost, options: SpeculativeOptions) -> None:
        super().__init__(host, FillOptions(adaptive=options.adaptive))
        self.window = 1 + options.depth
        self._proposer = host.open_proposer(*options.chosen)
        self._depths = (Depths if options.adaptive else Fixed)(options.depth)
        self._known: list[Row] = []
        self._failed = False

    @property
    def running_tokens(self) -> int:
        """As many tokens for each row as the widest may have in the next window, or append."""
        return max(super().running_tokens, len(self._host.rows) * (1 + max(self._wanted(), default=0)))

    def beside(self, tokens: Sequence[int]) -> int:
        """Return what the proposer holds at most."""
        return self._proposer.beside(tokens) if isinstance(self._proposer, StoringRows) else 0

    def spare(self, limit: int) -> None:
        """Let the proposer hold so much."""
        if isinstance(self._proposer, StoringRows):
            self._proposer.spare(limit)

    def join(self, row: Row, caches: Sequence[BatchCache], first: Draw | None = None) -> None:
        """Adopt a lone row's caches by reference, or copy them into the next slots."""
        super().join(row, caches, first)
        self._known.append(row)

    def advance(self, work: Any = None) -> None:
        """Verify drafts where there are any, else take a plain step. What is unread is read before drafts follow it."""
        self._depths.start()
        steady = work is None and (self._register is not None or not self._pipeline)
        self._widest, (drafts, certain) = 0, self._drafts()
        if any(drafts) and self._register is not None:
            self.flush()
            steady, (drafts, certain) = False, self._drafts()
        count, width = len(self._host.rows), 1 + max(map(len, drafts), default=0)
        if width > 1:
            self._verify(drafts, certain, work)
        elif count:
            super().advance(work)
            self._depths.passed()
        if steady and not self._widest:
            self._depths.stop(count, width)

    def keep(self, indices: Sequence[int], discard: bool) -> None:
        """Filter caches and register in lockstep, and let the proposer forget the rows that leave."""
        rows, stay = self._known, set(indices)
        super().keep(indices, discard)
        self._forget(row for place, row in enumerate(rows) if place not in stay)
        self._known = [rows[i] for i in indices]

    def abort(self) -> None:
        """Drop everything."""
        super().abort()
        self._forget(self._known)
        self._known = []

    def close(self) -> None:
        """Release everything, the proposer too."""
        super().close()
        self._proposer.close()

    def _forget(self, rows: Iterable[Row]) -> None:
        gone = list(rows)
        self._proposer.drop(gone)
        self._depths.drop(gone)

    def _wanted(self) -> list[int]:
        """Return how many drafts each row is to have: none beyond its last token, nor where its storage changes."""
        rows = self._host.rows
        if not rows or self.window == 1:
            return [0] * len(rows)
        limits = []
        for row, tokens in zip(rows, self._caches[0].tokens, strict=True):
            width = min(self.window, row.max_tokens - row.generated)
            limits.append(max(0, self._host.longest_append(tokens, width) - 1))
        return self._depths.choose(rows, limits)

    def _drafts(self) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
        """Return drafts of each row, none where tokens are known, and beside them these: a row whose last token is unread knows none.

        An error of the proposer costs drafts, and no row.
        """
        rows, wanted = self._host.rows, self._wanted()
        none: list[Sequence[int]] = [()] * len(rows)
        certain = none
        if any(wanted):
            certain = list(self._ahead()) if self._host.constrained else none
            wanted = [0 if span else depth for span, depth in zip(certain, wanted, strict=True)]
        if not any(wanted):
            return none, certain
        try:
            drafts = self._proposer.propose(rows, wanted)
        except Exception as error:  # noqa: BLE001 - whatever it is, rows can do without
            if not self._failed:
                _log.warning("proposer_failed", error=repr(error))
            self._failed = True
            return none, certain
        limits = [min(len(draft), depth) for draft, depth in zip(drafts, wanted, strict=True)]
        worth = self._depths.choose(rows, limits)
        return [draft[:depth] for draft, depth in zip(drafts, worth, strict=True)], certain

    def _verify(self, drafts: Sequence[Sequence[int]], certain: Sequence[Sequence[int]], work: Any) -> None:
        """Forward every row's current token with its drafts, and let each take what it drew, up to its first other token.

        Beside them a row that is ``certain`` of tokens has as many of those as the widest has drafts: it draws just them.
        """
        rows, deepest = list(self._host.rows), max(map(len, drafts))
        certain = [() if draft else span[:deepest] for span, draft in zip(certain, drafts, strict=True)]
        windows = [[row.current, *span, *draft] for row, span, draft in zip(rows, certain, drafts, strict=True)]
        widths, known = [len(window) for window in windows], [len(span) for span in certain]
        widest = max(widths)
        ids = mx.array([window + [0] * (widest - len(window)) for window in windows], dtype=mx.uint32)  # (B, W)
        logits = self._host.forward(self._caches, ids, widths, work)  # (B, W, V)
        lines = iter(self._host.verify(logits, ids, widths).read())
        taken = [
            self._take(row, window, [next(lines) for _ in window], sure)
            for row, window, sure in zip(rows, windows, known, strict=True)
        ]
        self._host.accept(widths, taken, known)
        self._host.settle(self._caches, ids, widths, taken)
        self._note(rows, drafts, taken)
        self._host.retire()

    def _take(self, row: Row, window: Sequence[int], lines: Sequence[Drawn], known: int = 0) -> int:
        """Deliver one by one what a row drew until it is no draft, or the row is over; return how many that were.

        So many tokens of the window entered its state: the last one drawn is the next window's first. The first ``known``
        behind the current one are no drafts.
        """
        taken = 0
        row.drafted_tokens += len(window) - 1 - known
        for drawn, draft in zip(lines, [*window[1:], None], strict=True):
            row.accepted_tokens += taken > known
            drawn.forced = taken < known and drawn.token == draft
            taken += 1
            if not self._host.emit(row, drawn) or drawn.token != draft:
                break
        row.fed.extend(window[:taken])
        return taken

    def _note(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], taken: Sequence[int]) -> None:
        """Tell the proposer and the choice of depths what became of the drafts; a row that is over was cut short."""
        going = [place for place, row in enumerate(rows) if not row.over]
        accepted = [lines - 1 for lines in taken]
        for place in going:
            if drafts[place]:
                self._proposer.commit(rows[place], accepted[place])
        self._depths.verified(
            [rows[place] for place in going],
            [len(drafts[place]) for place in going],
            [accepted[place] for place in going],
        )


@attrs.frozen
class Speculative:
    """Registers as ``speculative``."""

    name: str = "speculative"
    options: type = SpeculativeOptions

    def window(self, options: SpeculativeOptions) -> int:
        """Return a token and its drafts."""
        return 1 + options.depth

    def check(self, bound: Any, options: SpeculativeOptions) -> None:
        """Raise where the proposer is unknown, its options are wrong, or it cannot draft for this model."""
        bound.proposer(*options.chosen)

    def measures(self, options: SpeculativeOptions) -> bool:
        """Return whether how long steps take decides anything."""
        return options.adaptive

    def open(self, host: MethodHost, options: SpeculativeOptions) -> SpeculativeDecoding:
        """Return a method without rows."""
        return SpeculativeDecoding(host, options)


@hookimpl
def register_methods(register: Callable[[object], None]) -> None:
    """Register `speculative`."""
    register(Speculative())
