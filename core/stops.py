"""Stop sequences: which of several sequences a stream ends with, and a row's tokens that may be the beginning of one.

It ends no row: the emitter does. Stop strings, which are sequences of characters, are in `text.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from oarlock.core.contracts.method import Drawn


class Automaton:
    """The automaton of Aho and Corasick (1975) over the items of ``sequences``: linear in the stream."""

    def __init__(self, sequences: Sequence[Sequence[Any]]) -> None:
        self._next: list[dict[Hashable, int]] = [{}]
        self._fallback = [0]
        self._found: list[Sequence[Any] | None] = [None]
        self.depth = [0]
        """Per state: how many items at the end of the stream are the beginning of a sequence."""
        for sequence in sequences:
            self._insert(sequence)
        self._link()

    def _insert(self, sequence: Sequence[Any]) -> None:
        state = 0
        for item in sequence:
            if item not in self._next[state]:
                self._next[state][item] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._found.append(None)
                self.depth.append(self.depth[state] + 1)
            state = self._next[state][item]
        self._found[state] = sequence

    def _link(self) -> None:
        """Give each state its longest proper suffix that is a state, shallow ones first."""
        queue = list(self._next[0].values())
        for state in queue:
            for item, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], item)
                queue.append(child)
            if self._found[state] is None:
                self._found[state] = self._found[self._fallback[state]]

    def step(self, state: int, item: Hashable) -> int:
        """Return the state after one more item."""
        while state and item not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(item, 0)

    def found(self, state: int, most: int | None = None) -> Any:
        """Return the longest sequence that ends here, of at most ``most`` items, or None."""
        found = self._found[state]
        while found is not None and most is not None and len(found) > most:
            state = self._fallback[state]
            found = self._found[state]
        return found


class StopSequences:
    """The stop sequences of one row, and its newest tokens: held back while they may be the beginning of one.

    The first sequence that is complete wins; of several that end with the same token the longest. One that would leave
    fewer than ``min_tokens`` tokens is none.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], *, include: bool = False, min_tokens: int = 0) -> None:
        self._automaton = Automaton(sequences)
        self._include, self._min_tokens = include, min_tokens
        self._state = 0
        self._held: list[Drawn] = []
        self.released = 0
        """How many tokens were not held back, or are not any more."""

    def push(self, drawn: Drawn) -> int:
        """Take the next token; return how many tokens, this one the last, are a stop sequence: 0 where none is complete.

        They are forgotten, or free where the row includes its end.
        """
        self._held.append(drawn)
        self._state = self._automaton.step(self._state, drawn.token)
        spare = self.released + len(self._held) - self._min_tokens
        if self._include:
            found = self._automaton.found(self._state) if spare >= 0 else None
        else:
            found = self._automaton.found(self._state, max(0, spare))
        if found is None:
            return 0
        self._state = 0
        if not self._include:
            del self._held[-len(found) :]
        return len(found)

    def free(self) -> list[Drawn]:
        """Return the tokens that can be delivered now, each once."""
        count = len(self._held) - self._automaton.depth[self._state]
        freed, self._held = self._held[:count], self._held[count:]
        self.released += count
        return freed

    def end(self) -> None:
        """Let what is held back be delivered: nothing follows that could make it a stop sequence."""
        self._state = 0

    def drop(self) -> None:
        """Forget what is held back."""
        self._held = []
