"""The state cache with directories behind it: prefixes and checkpoints that outlive the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import RowState
from oarlock.core.contracts.state_cache import Checkpoint
from oarlock.plugins.state_cache.disk import Directory
from oarlock.plugins.state_cache.prefixes import PrefixCache
from oarlock.plugins.state_cache.resuming import Checkpoints
from oarlock.plugins.state_cache.shelf import Shelf


class PersistentCache(PrefixCache):
    """Entries are written as they come, read where they cover more than memory does, and kept in memory then.

    Without room in memory no prefix is stored anywhere.
    """

    resumes = True

    def __init__(
        self, layers: Sequence[BoundLayer], limit: int, disk: Directory | None, checkpoints: Directory | None
    ) -> None:
        """Keep up to ``limit`` bytes in memory, prefixes in ``disk`` as well; one of the directories may be None."""
        super().__init__(layers, limit)
        self._directories = [each for each in dict.fromkeys((disk, checkpoints)) if each is not None]
        self._shelf = Shelf(disk, layers) if disk is not None and limit else None
        self._checkpoints = Checkpoints(checkpoints or self._directories[0])
        self.persists = self._shelf is not None
        self._counts["disk_hits"] = 0

    def lookup(self, key: Mapping[str, str], tokens: Sequence[int]) -> tuple[int, Sequence[RowState]] | None:
        """Return the longest prefix in memory, or on disk where that one is longer."""
        length, states = self.find(key, tokens)
        read = self._shelf.longer(key, tokens, length) if self._shelf is not None else None
        if read is not None:
            length, stored = read
            states = stored.states
            self._counts["disk_hits"] += 1
            self.publish(key, stored.tokens, states)
        return self._counted(length, states)

    def persist(self, key: Mapping[str, str], tokens: Sequence[int], states: Sequence[RowState]) -> None:
        """Write states, after this returns."""
        if self._shelf is not None:
            self._shelf.put(key, tokens, states)

    def checkpoint(self, key: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """Write how far a request is, after this returns."""
        self._checkpoints.put(key, checkpoint)

    def resume(self, key: Mapping[str, str]) -> Checkpoint | None:
        """Return how far a request was."""
        return self._checkpoints.get(key)

    def discard(self, key: Mapping[str, str]) -> None:
        """Take away what was written of a request."""
        self._checkpoints.drop(key)

    def close(self) -> None:
        """Write what waits."""
        for each in self._directories:
            each.close()

    def stats(self) -> Mapping[str, Any]:
        """Return counts, entries and bytes."""
        return {**super().stats(), "written": sum(each.written for each in self._directories)}
