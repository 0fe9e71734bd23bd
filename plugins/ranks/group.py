"""The journal of a group of ranks: the first one's events reach all, by sums in which the others are zero. It knows no model."""

from __future__ import annotations

import json
import zlib
from typing import Any

import mlx.core as mx
import numpy as np

from oarlock.core.errors import RankLost, ScheduleDiverged
from oarlock.core.journal import Record

WORDS = 256
"""Words of the sum that each step begins with; what is longer takes a second one."""


class Ranks:
    """Implements `core.journal.Journal` over ``group``, an `mx.distributed` group. Each step costs one small sum."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.leads = self.rank == 0
        self._group = group

    def exchange(self, record: Record | None, digest: bytes) -> Record:
        """Return the leading rank's record. Raises `errors.ScheduleDiverged` where digests differ."""
        told: Record = json.loads(self._send(None if record is None else json.dumps(record), digest))
        return told

    def share(self, text: str | None) -> str:
        """Return the leading rank's text."""
        return self._send(text, b"")

    def _send(self, text: str | None, digest: bytes) -> str:
        data = b"" if text is None else text.encode()
        body = np.frombuffer(data + bytes(-len(data) % 4), dtype=np.uint32)
        head = np.zeros(WORDS, dtype=np.uint32)
        head[self.rank] = zlib.crc32(digest)
        head[self.size] = len(data)
        room = WORDS - self.size - 1
        head[self.size + 1 : self.size + 1 + min(room, len(body))] = body[:room]
        summed = self._sum(head)
        if len(set(summed[: self.size].tolist())) > 1:
            seen = ", ".join(f"{each:08x}" for each in summed[: self.size].tolist())
            msg = f"ranks did not do the same (digests {seen}): they must have the same weights, packages and settings"
            raise ScheduleDiverged(msg)
        length = int(summed[self.size])
        words = summed[self.size + 1 :]
        if (more := -(-length // 4) - room) > 0:
            rest = np.zeros(more, dtype=np.uint32)
            rest[: max(0, len(body) - room)] = body[room:]
            words = np.concatenate([words, self._sum(rest)])
        return words.tobytes()[:length].decode()

    def _sum(self, mine: np.ndarray) -> np.ndarray:
        try:
            total = mx.distributed.all_sum(mx.array(mine), group=self._group, stream=mx.cpu)
            return np.array(total)
        except RuntimeError as error:
            msg = f"rank {self.rank} of {self.size}: another rank is gone ({error}); start all ranks again"
            raise RankLost(msg) from error
