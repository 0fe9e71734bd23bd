"""The state cache of one rank among several: what it finds beyond its own memory is the leading rank's to say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from oarlock.core.contracts.state_cache import Checkpoint, StateCache
from oarlock.core.journal import Journal
from oarlock.core.result import Logprob


class AgreedStateCache:
    """A state cache whose checkpoints are one rank's: tokens alone, since its states are a part of each layer.

    Whoever resumes computes again what they stand for. Prefixes in memory are each rank's own, and alike on all.
    """

    def __init__(self, store: StateCache, journal: Journal) -> None:
        """Ask all ranks whether the leading one stores checkpoints."""
        self._store, self._journal = store, journal
        self.name, self.persists = store.name, store.persists
        self.resumes: bool = self._agreed(store.resumes)

    def __getattr__(self, name: str) -> Any:
        """Return what is each rank's own."""
        return getattr(self._store, name)

    def checkpoint(self, key: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """Store tokens, on the leading rank."""
        if self._journal.leads:
            self._store.checkpoint(key, attrs.evolve(checkpoint, states=()))

    def resume(self, key: Mapping[str, str]) -> Checkpoint | None:
        """Return what the leading rank stored."""
        found = self._store.resume(key) if self._journal.leads else None
        told = self._agreed(found and _plain(found))
        return None if told is None else _read(told)

    def _agreed(self, mine: Any) -> Any:
        """Return the leading rank's value, which is plain data."""
        return json.loads(self._journal.share(json.dumps(mine) if self._journal.leads else None))

    def discard(self, key: Mapping[str, str]) -> None:
        """Forget a request, on the leading rank."""
        if self._journal.leads:
            self._store.discard(key)


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    logprobs = [attrs.astuple(each) for each in checkpoint.logprobs]
    kept = {"seed": checkpoint.seed, "tokens": checkpoint.tokens, "cached_tokens": checkpoint.cached_tokens}
    return {**kept, "logprobs": logprobs}


def _read(told: Mapping[str, Any]) -> Checkpoint:
    lists = {"tokens": tuple(told["tokens"]), "logprobs": tuple(map(Logprob.of, told["logprobs"]))}
    return Checkpoint(seed=told["seed"], cached_tokens=told["cached_tokens"], **lists)
