"""The prefix cache: states of rows by their tokens, in memory, within a budget of bytes. It knows no layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import RowState
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.row import Row
from oarlock.plugins.state_cache.keys import Key, plain, usable
from oarlock.plugins.state_cache.trie import Trie

TRIED = 4
"""Stored rows that are looked into for one lookup: where those that share most cannot be cut, few others can."""


@attrs.define(eq=False)
class Entry:
    """A stored row: one state a layer, which cover exactly ``tokens``. ``worth``: who is worth least leaves first."""

    key: Key
    tokens: tuple[int, ...]
    states: tuple[RowState, ...]
    nbytes: int
    worth: float = 0.0


class PrefixCache(NullStateCache):
    """Keeps the states of rows that ended, and the longest prefix of a prompt that one of them covers.

    What leaves first, where bytes are short, is what saves the fewest tokens a byte and was not used for long: each use
    sets an entry's worth to what it saves above what the dearest that left was worth (GreedyDual-Size).
    """

    name = "memory"

    def __init__(self, layers: Sequence[BoundLayer], limit: int) -> None:
        """Keep up to ``limit`` bytes of states of these layers."""
        self._layers, self._limit = layers, limit
        self._tries: dict[Key, Trie[Entry]] = {}
        self._entries: dict[Entry, None] = {}  # in the order they came: of equal worth the oldest leaves
        self._floor = 0.0
        self._counts = dict.fromkeys(("hits", "misses", "evictions", "reused_tokens"), 0)
        self.nbytes = 0

    # --- states -------------------------------------------------------------------------------------------

    def keeps(self, row: Row) -> bool:
        """Return whether there is room for any."""
        return self._limit > 0

    def lookup(self, key: Mapping[str, str], tokens: Sequence[int]) -> tuple[int, Sequence[RowState]] | None:
        """Return the longest prefix that a stored row covers or can be cut to, and that row's states."""
        return self._counted(*self.find(key, tokens))

    def find(self, key: Mapping[str, str], tokens: Sequence[int]) -> tuple[int, Sequence[RowState]]:
        """Return what `lookup` does, or 0 and no states, and count nothing."""
        trie = self._tries.get(plain(key))
        most, best, found = len(tokens) - 1, 0, None
        for common, entry in itertools.islice(trie.shared(tokens) if trie is not None else (), TRIED):
            if (wanted := min(common, most)) <= best:
                break
            length = self._usable(entry, wanted)
            if length > best:
                best, found = length, entry
        if found is None:
            return 0, ()
        self._use(found)
        return best, found.states

    def publish(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Store states that cover exactly ``tokens``, in place of shorter ones, unless a longer one can be cut to them."""
        entry = Entry(plain(key), tuple(tokens), tuple(states), sum(state.nbytes for state in states))
        trie = self._tries.setdefault(entry.key, Trie())
        for common, other in list(itertools.islice(trie.shared(tokens), TRIED)):
            if common == len(tokens) < len(other.tokens) and self._usable(other, common) == common:
                self._use(other)
                return
            if common == len(other.tokens) and self._usable(entry, common) == common:
                self._drop(other)
        self._make_room(entry.nbytes)
        if entry.nbytes <= self._limit:
            self._tries.setdefault(entry.key, trie).put(entry.tokens, entry)
            self._entries[entry] = None
            self.nbytes += entry.nbytes
            self._use(entry)

    def stats(self) -> Mapping[str, Any]:
        """Return counts, entries and bytes."""
        return {**self._counts, "entries": len(self._entries), "bytes": self.nbytes}

    def _counted(self, length: int, states: Sequence[RowState]) -> tuple[int, Sequence[RowState]] | None:
        self._counts["hits" if length else "misses"] += 1
        self._counts["reused_tokens"] += length
        return (length, states) if length else None

    def _usable(self, entry: Entry, most: int) -> int:
        return usable(self._layers, entry.states, len(entry.tokens), most)

    def _use(self, entry: Entry) -> None:
        entry.worth = self._floor + len(entry.tokens) / max(1, entry.nbytes)

    def _make_room(self, nbytes: int) -> None:
        while self._entries and self.nbytes + nbytes > self._limit and nbytes <= self._limit:
            least = min(self._entries, key=lambda entry: entry.worth)
            self._floor = least.worth
            self._counts["evictions"] += 1
            self._drop(least)

    def _drop(self, entry: Entry) -> None:
        trie = self._tries[entry.key]
        trie.pop(entry.tokens)
        self._entries.pop(entry, None)
        self.nbytes -= entry.nbytes
        if not trie:
            del self._tries[entry.key]
