"""Drafts from what other rows said: the tokens that followed the same few last tokens, in any answer so far.

Where many requests are answered alike (forms, reports, tests that run again) most of an answer was given before. Tokens
of one namespace are never drafted in another, so that nobody learns from the pace of an answer what somebody else asked;
requests with ``reuse_prefix=False`` are not remembered at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from oarlock.core import hookimpl
from oarlock.core.row import Row

OARLOCK_API = 1
Place = tuple[str, tuple[int, ...]]
"""A namespace, and some tokens in a row."""


@attrs.frozen(kw_only=True)
class SharedOptions:
    """``match``: how many last tokens must be the same. ``entries``: places that are remembered; the oldest go first."""

    match: int = attrs.field(default=3, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    entries: int = attrs.field(default=1 << 20, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])


class Memory:
    """What came behind each place, last time."""

    def __init__(self, options: SharedOptions) -> None:
        self._options = options
        self._next: dict[Place, int] = {}  # in the order in which they were last seen

    def learn(self, namespace: str, tokens: Sequence[int], start: int) -> None:
        """Remember the tokens from ``start`` on, each behind those before it."""
        match = self._options.match
        for at in range(max(start, match), len(tokens)):
            place = (namespace, tuple(tokens[at - match : at]))
            self._next.pop(place, None)
            self._next[place] = tokens[at]
        while len(self._next) > self._options.entries:
            del self._next[next(iter(self._next))]

    def draft(self, namespace: str, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to ``count`` tokens that may follow ``tokens``."""
        last = list(tokens[-self._options.match :])
        draft: list[int] = []
        while len(draft) < count and (token := self._next.get((namespace, tuple(last)))) is not None:
            draft.append(token)
            last = [*last[1:], token]
        return draft


class SharedRows:
    """The rows of a group: how much of each was learnt, and what was last drafted for it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: dict[Row, int] = {}
        self._drafts: dict[Row, list[int]] = {}

    def propose(self, rows: Sequence[Row], depths: Sequence[int]) -> list[list[int]]:
        """Learn what came since the last time, from all rows first, and draft. Asked again, answer the same."""
        for row in rows:
            tokens, known = row.prompt_tokens + len(row.token_ids), self._known.get(row, 0)
            if tokens != known:
                self._learn(row, known)
                self._known[row] = tokens
                self._drafts.pop(row, None)
        return [self._drafted(row, depth) if depth else [] for row, depth in zip(rows, depths, strict=True)]

    def commit(self, row: Row, accepted: int) -> None:
        """Do nothing: what a row took is among its tokens when it is asked about next."""

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows, not what they said: their last tokens are learnt now."""
        for row in rows:
            known = self._known.pop(row, None)
            self._drafts.pop(row, None)
            if known is not None and row.error is None:
                self._learn(row, known)

    def close(self) -> None:
        """Do nothing: what is remembered belongs to the model."""

    def _learn(self, row: Row, known: int) -> None:
        if row.request.reuse_prefix:
            self._memory.learn(row.namespace, row.known_ids, known)

    def _drafted(self, row: Row, depth: int) -> list[int]:
        draft = self._drafts.get(row)
        if draft is None or len(draft) < depth:
            draft = self._drafts[row] = self._memory.draft(row.namespace, row.known_ids, depth)
        return draft[:depth]


class Shared:
    """Registers as ``shared``; remembers for as long as the model is there."""

    name = "shared"
    options = SharedOptions

    def __init__(self) -> None:
        self._memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()

    def refuses(self, bound: Any, options: SharedOptions) -> str | None:
        """Return None: it needs nothing of a model."""
        return None

    def open(self, bound: Any, options: SharedOptions) -> SharedRows:
        """Return a proposer without rows, which knows what was said on this model before."""
        return SharedRows(self._memories.setdefault(bound, Memory(options)))


@hookimpl
def register_proposers(register: Callable[[Any], None]) -> None:
    """Register `shared`."""
    register(Shared())
