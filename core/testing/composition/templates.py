"""The constraint ``template``: fixed text with gaps, or loose text that nobody knows beforehand. It is a plugin by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oarlock.core import hookimpl

FREE = 5
"""Every so many-th token of a text is free."""
TURNS = -1
"""The text whose tokens are even and odd by turns."""


def fixed(place: int, row: int, width: int) -> int | None:
    """Return what stands at ``place`` in the template of ``row``, None where any of ``width`` tokens may."""
    return (7 * place + 3 * row) % width if place % FREE else None


class Template:
    """The place of a row in its text; where it ``says`` so it tells beforehand what is fixed, else it masks that only."""

    terminated = False

    def __init__(self, row: int, width: int, *, says: bool, taken_back: Callable[[int], None]) -> None:
        """``row`` chooses the text, ``width`` is the vocabulary's."""
        self._row, self._width, self._says, self._taken_back = row, width, says, taken_back
        self.taken: list[int] = []

    def accept(self, token: int) -> None:
        """Take a token. Raises ValueError for another than the fixed one."""
        if not self.mask()[token]:
            msg = f"token {token} stands where {self._fixed(len(self.taken))} must"
            raise ValueError(msg)
        self.taken.append(token)

    def ready(self) -> None:
        """Wait for nothing: no mask is filled elsewhere."""

    def mask(self) -> np.ndarray:
        """Return the fixed token, or all."""
        only = self._fixed(len(self.taken))
        return np.ones(self._width, dtype=np.bool_) if only is None else np.arange(self._width) == only

    def forced(self) -> Sequence[int]:
        """Return what is fixed up to the next free token."""
        if not self._says:
            return ()
        ahead = map(self._fixed, itertools.count(len(self.taken)))
        return [token for token in itertools.takewhile(lambda token: token is not None, ahead) if token is not None]

    def rollback(self, n: int) -> None:
        """Forget the last ``n``."""
        self._taken_back(n)
        del self.taken[-n:]

    def _fixed(self, place: int) -> int | None:
        return fixed(place, self._row, self._width)


class Turns(Template):
    """Even and odd tokens by turns: every token is a choice, which drafts may meet or miss."""

    def mask(self) -> np.ndarray:
        """Return every second token."""
        return np.equal(np.arange(self._width) % 2, len(self.taken) % 2)

    def forced(self) -> Sequence[int]:
        """Return nothing."""
        return ()


class Templates:
    """Registers as ``template``; a request names its text by a number, or `TURNS`. ``taken_back`` counts tokens."""

    name = "template"
    taken_back = 0

    def __init__(self, width: int, *, says: bool = True) -> None:
        """``width``: tokens of the vocabulary."""
        self._width, self._says = width, says

    def open(self, spec: Any, tokenizer: Any, request: Any) -> Template:
        """Return the beginning of a text."""
        kind = Turns if spec == TURNS else Template
        return kind(spec, self._width, says=self._says, taken_back=self._count)

    def _count(self, n: int) -> None:
        self.taken_back += n

    @hookimpl
    def register_constraints(self, register: Callable[[object], None]) -> None:
        """Register itself."""
        register(self)
