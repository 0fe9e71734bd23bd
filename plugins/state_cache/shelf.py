"""Prefixes on disk: an index of what any process wrote, and the entries of a key that is ours. It keeps no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import structlog

from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import RowState
from oarlock.plugins.state_cache.disk import Directory
from oarlock.plugins.state_cache.files import Damaged, Gone, Stored, header, packed, unpacked
from oarlock.plugins.state_cache.keys import Key, plain, usable
from oarlock.plugins.state_cache.trie import Trie

_log = structlog.get_logger(__name__)
PREFIX = "prefix"
FIRST_READ = 1 << 16
"""Bytes in which most headers lie."""
LOOKS = 3
"""How often what others replace meanwhile is looked for again, before it counts as missed."""


class Shelf:
    """Reads an entry when it is asked for, checks all of its bytes, and forgets it where they are wrong."""

    def __init__(self, directory: Directory, layers: Sequence[BoundLayer]) -> None:
        """Know nothing yet."""
        self._directory, self._layers = directory, layers
        self._known: dict[str, tuple[Key, tuple[int, ...]]] = {}
        self._refused: set[str] = set()
        self._tries: dict[Key, Trie[str]] = {}
        self._writing: list[tuple[Key, tuple[int, ...], Future[str]]] = []

    def longer(self, key: Mapping[str, str], tokens: Sequence[int], than: int) -> tuple[int, Stored] | None:
        """Return the entry that covers the longest prefix of ``tokens``, if that is longer than ``than``, and its length."""
        for _ in range(LOOKS):
            complete = self._look()
            try:
                found = self._longest(key, tokens, than)
            except Gone:
                continue
            if found is not None or complete:
                return found
        return None

    def _longest(self, key: Mapping[str, str], tokens: Sequence[int], than: int) -> tuple[int, Stored] | None:
        """Return it, of what is known. Raises `Gone` where that is no longer there."""
        most = len(tokens) - 1
        trie = self._tries.get(plain(key))
        for common, name in list(trie.shared(tokens)) if trie is not None else ():
            if min(common, most) <= than:
                return None
            stored = self._read(name, key)
            if stored is None or stored.tokens[:common] != tuple(tokens[:common]):
                continue
            length = usable(self._layers, stored.states, len(stored.tokens), min(common, most))
            if length > than:
                return length, stored
        return None

    def put(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Write an entry in place of those that it covers, unless there is one that covers it."""
        self._writing = [each for each in self._writing if not each[2].done()]
        self._look()
        tokens = tuple(tokens)
        covered: list[Callable[[], str]] = []
        trie = self._tries.get(plain(key))
        others: list[tuple[tuple[int, ...], Callable[[], str]]] = []
        if trie is not None:
            others += [(self._known[name][1], partial(str, name)) for _, name in trie.shared(tokens)]
        others += [(own, future.result) for other, own, future in self._writing if other == plain(key)]
        for own, name in others:
            if own != tokens[: len(own)]:
                continue
            if len(own) == len(tokens):
                return
            if usable(self._layers, states, len(tokens), len(own)) == len(own):
                covered.append(name)
        entry = Stored(key=dict(key), tokens=tokens, states=tuple(states))
        # What comes is written before: its name is known by the time that it is replaced.
        replaced = lambda: [name() for name in covered]  # noqa: E731
        future = self._directory.write(PREFIX, entry.nbytes, lambda: packed(entry), replaced)
        if future is not None:
            self._writing.append((plain(key), tokens, future))

    def _look(self) -> bool:
        """Bring the index up to what is there; False where some of that was gone before it was read."""
        complete = True
        there = {name for name in self._directory.names() if name.startswith(f"{PREFIX}-")}
        for name in self._known.keys() - there:
            self._forget(name)
        for name in sorted(there - self._known.keys() - self._refused):
            try:
                self._learn(name)
            except Gone:
                complete = False
            except Damaged as error:
                self._refuse(name, error)
        return complete

    def _learn(self, name: str) -> None:
        beginning = self._directory.beginning(name, FIRST_READ)
        size, found = header(beginning)
        if not found:
            size, found = header(self._directory.beginning(name, size))
        if not found:
            msg = "it is shorter than its header says"
            raise Damaged(msg)
        key, tokens = plain(found["key"]), found["tokens"]
        self._known[name] = key, tokens
        self._tries.setdefault(key, Trie()).put(tokens, name)

    def _read(self, name: str, key: Mapping[str, str]) -> Stored | None:
        try:
            stored = unpacked(self._directory.read(name))
            if dict(stored.key) != dict(key) or len(stored.states) != len(self._layers):
                msg = "it is another model's, or another's rows"
                raise Damaged(msg)
        except Gone:
            self._forget(name)
            raise
        except Damaged as error:
            self._refuse(name, error)
            return None
        return stored

    def _refuse(self, name: str, error: Damaged) -> None:
        """Never look at a file again."""
        self._forget(name)
        self._refused.add(name)
        _log.warning("file_not_used", file=name, reason=str(error))

    def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is None:
            return
        key, tokens = known
        trie = self._tries[key]
        if trie.get(tokens) == name:
            trie.pop(tokens)
        if not trie:
            del self._tries[key]
