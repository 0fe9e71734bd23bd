"""Checkpoints on disk: one file for each request that is on its way. It knows no row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future

import attrs
import structlog

from oarlock.core.contracts.state_cache import Checkpoint
from oarlock.core.result import Logprob
from oarlock.plugins.state_cache.disk import Directory
from oarlock.plugins.state_cache.files import Damaged, Stored, packed, unpacked

_log = structlog.get_logger(__name__)


class Checkpoints:
    """A request's newest file takes the place of the one before once it is whole."""

    def __init__(self, directory: Directory) -> None:
        """Read and write in ``directory``."""
        self._directory = directory
        self._writing: dict[str, Future[str]] = {}

    def put(self, key: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """Begin to write; wait before where the last one of this request is not written yet."""
        prefix = _prefix(key)
        if (before := self._writing.get(prefix)) is not None:
            before.result()
        self._writing = {other: future for other, future in self._writing.items() if not future.done()}
        stored = Stored(
            key=key,
            tokens=checkpoint.tokens,
            states=checkpoint.states,
            more={
                "seed": checkpoint.seed,
                "cached_tokens": checkpoint.cached_tokens,
                "logprobs": [attrs.astuple(each) for each in checkpoint.logprobs],
            },
        )
        future = self._directory.write(prefix, stored.nbytes, lambda: packed(stored), lambda: self._of(prefix))
        if future is not None:
            self._writing[prefix] = future

    def get(self, key: Mapping[str, str]) -> Checkpoint | None:
        """Return the one with most tokens that is whole and of exactly this request."""
        found: list[Stored] = []
        for name in self._of(_prefix(key)):
            try:
                stored = unpacked(self._directory.read(name))
                if dict(stored.key) != dict(key):
                    msg = "it is another request's"
                    raise Damaged(msg)
                found.append(stored)
            except Damaged as error:
                _log.warning("file_not_used", file=name, reason=str(error))
        if not found:
            return None
        best = max(found, key=lambda stored: (len(stored.tokens), sum(state.tokens for state in stored.states)))
        return Checkpoint(
            seed=int(best.more["seed"]),
            tokens=best.tokens,
            logprobs=tuple(map(Logprob.of, best.more["logprobs"])),
            cached_tokens=int(best.more["cached_tokens"]),
            states=best.states,
        )

    def drop(self, key: Mapping[str, str]) -> None:
        """Take a request's files away, also the one that is being written."""
        prefix = _prefix(key)
        if (writing := self._writing.pop(prefix, None)) is not None:
            writing.cancel()
        self._directory.clear(prefix)

    def _of(self, prefix: str) -> list[str]:
        return [name for name in self._directory.names() if name.startswith(f"{prefix}-")]


def _prefix(key: Mapping[str, str]) -> str:
    """Return what the names of a request's files begin with; their contents hold the whole key."""
    return f"checkpoint-{hashlib.sha256(json.dumps(sorted(key.items())).encode()).hexdigest()[:32]}"
