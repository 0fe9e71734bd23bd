"""The proposer `ngram`: what followed the last tokens where they stood before, in the prompt or in the output.

It runs no model. The longest match goes first, and the newest among equals; of the places where the shortest match stands
no more than `LOOKS` are compared. A row takes one entry in a table and eight bytes a token, whatever the options are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.request import is_whole

if TYPE_CHECKING:
    from oarlock.core.row import Row

OARLOCK_API = 1
LOOKS = 64
"""The most places that one proposal compares: text that says one thing again and again has it everywhere."""


@attrs.frozen(kw_only=True)
class NgramOptions:
    """``min_n`` last tokens must have stood before at least; ``max_n`` are compared at most."""

    min_n: int = 2
    max_n: int = 8

    def __attrs_post_init__(self) -> None:
        for name in ("min_n", "max_n"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                msg = f"{name} is {value!r}; whole numbers of tokens, 1 or more, are allowed"
                raise ValueError(msg)
        if self.min_n > self.max_n:
            msg = f"min_n is {self.min_n} and max_n {self.max_n}; min_n may be no more than max_n"
            raise ValueError(msg)


class History:
    """One row's tokens, and for each where the few that end with it ended last before."""

    def __init__(self, options: NgramOptions) -> None:
        self._least, self._most = options.min_n, options.max_n
        self.tokens = array("I")
        self._before = array("i")
        self._last: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            place = len(self.tokens) - 1
            gram = tuple(self.tokens[-self._least :])
            whole = len(gram) == self._least
            self._before.append(self._last.get(gram, -1) if whole else -1)
            if whole:
                self._last[gram] = place

    def draft(self, count: int) -> list[int]:
        """Return ``count`` tokens that may come next; none where the last ones stand nowhere before.

        Where the match runs into the end, what it would copy from there on is the draft itself: a loop goes on.
        """
        tokens, place = self.tokens, self._match()
        if place < 0:
            return []
        draft: list[int] = []
        for at in range(place + 1, place + 1 + count):
            draft.append(tokens[at] if at < len(tokens) else draft[at - len(tokens)])
        return draft

    def _match(self) -> int:
        """Return where the best earlier match ends, -1 where there is none."""
        place = self._before[-1] if self._before else -1
        best, longest, looks = -1, 0, 0
        while place >= 0 and longest < self._most and looks < LOOKS:
            common = self._common(place)
            if common > longest:
                best, longest = place, common
            place, looks = self._before[place], looks + 1
        return best

    def _common(self, place: int) -> int:
        """Return how many tokens up to ``place`` are those up to the end, `_most` at most."""
        tokens, last, n = self.tokens, len(self.tokens) - 1, self._least
        while n < self._most and n <= place and tokens[place - n] == tokens[last - n]:
            n += 1
        return n


class NgramRows:
    """The histories of the rows that were asked about; each takes in what came since then."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._rows: dict[Row, History] = {}

    def propose(self, rows: Sequence[Row], depths: Sequence[int]) -> list[list[int]]:
        """Return drafts; rows at depth 0 are not looked at."""
        return [self._history(row).draft(depth) if depth else [] for row, depth in zip(rows, depths, strict=True)]

    def commit(self, row: Row, accepted: int) -> None:
        """Do nothing: what the row took is among its tokens."""

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows."""
        for row in rows:
            self._rows.pop(row, None)

    def close(self) -> None:
        """Do nothing: nothing is held without rows."""

    def _history(self, row: Row) -> History:
        history = self._rows.get(row)
        if history is None:
            history = self._rows[row] = History(self._options)
            history.extend(row.prompt_ids)
        history.extend(row.token_ids[len(history.tokens) - row.prompt_tokens :])
        return history


@attrs.frozen
class Ngram:
    """Registers as ``ngram``."""

    name: str = "ngram"
    options: type = NgramOptions

    def refuses(self, bound: Any, options: NgramOptions) -> str | None:
        """Return None: it needs nothing of a model."""
        return None

    def open(self, bound: Any, options: NgramOptions) -> NgramRows:
        """Return a proposer without rows."""
        return NgramRows(options)


@hookimpl
def register_proposers(register: Callable[[object], None]) -> None:
    """Register `ngram`."""
    register(Ngram())
