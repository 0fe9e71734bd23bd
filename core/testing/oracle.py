"""A proposer that knows what rows will say and is wrong on purpose, so that drafts are rejected as well as accepted.

    Engine(model, plugins=[Oracle({prompt: answer})], config={"method": {"name": ..., "proposer": "oracle"}})

It is a plugin by itself. Where and how it is wrong depends on the row and the position alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.row import Row

__all__ = ["Oracle"]


@attrs.frozen
class OracleOptions:
    """`oracle` has no options."""


@attrs.define(eq=False, kw_only=True)
class Oracle:
    """Drafts from ``answers``, by prompt; a share of ``wrong`` tokens is another, at a share of ``silent`` places is none.

    ``known`` are the rows that it was asked about and not yet told to forget, ``refusal`` is what it answers at bind.
    """

    answers: Mapping[tuple[int, ...], Sequence[int]]
    wrong: float = 0.2
    silent: float = 0.0
    vocabulary: int = 97
    refusal: str | None = None
    name: str = "oracle"
    options: type = OracleOptions
    known: set[Row] = attrs.field(factory=set)
    committed: list[tuple[str, int]] = attrs.field(factory=list)

    def refuses(self, bound: Any, options: Any) -> str | None:
        """Return ``refusal``."""
        return self.refusal

    def open(self, bound: Any, options: Any) -> Oracle:
        """Return itself."""
        return self

    def propose(self, rows: Sequence[Row], depths: Sequence[int]) -> list[list[int]]:
        """Return what each row will say, or not quite."""
        self.known.update(rows)
        return [self._draft(row, depth) for row, depth in zip(rows, depths, strict=True)]

    def commit(self, row: Row, accepted: int) -> None:
        """Note it."""
        self.committed.append((row.id, accepted))

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows."""
        self.known.difference_update(rows)

    def close(self) -> None:
        """Hold nothing."""

    def _draft(self, row: Row, depth: int) -> list[int]:
        done = len(row.token_ids)
        if self._drawn(row, done, "silent") < self.silent:
            return []
        tokens = enumerate(self.answers[row.prompt_ids][done : done + depth], start=done)
        return [(token + (self._drawn(row, at, "wrong") < self.wrong)) % self.vocabulary for at, token in tokens]

    def _drawn(self, row: Row, position: int, purpose: str) -> float:
        return random.Random(f"{row.prompt_ids} {position} {purpose}").random()

    @hookimpl
    def register_proposers(self, register: Callable[[object], None]) -> None:
        """Register itself."""
        register(self)
