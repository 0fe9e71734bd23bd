"""What a group lends a method that drafts: draws behind every token of a window, and their accounting.

It accepts no draft itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from oarlock.core.contracts.method import GroupedMethod, StoringMethod
from oarlock.core.contracts.proposer import ListeningRows, ProposerRows
from oarlock.core.recording import StepLog
from oarlock.core.row import Row
from oarlock.core.sampling import PendingDraw, SamplerGroup

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


class Windows:
    """A part of the execution group, and of `contracts.method.MethodHost`."""

    bound: BoundModel
    log: StepLog
    _rows: list[Row]
    _samplers: SamplerGroup
    _method: GroupedMethod | None = None
    _storing: StoringMethod | None = None
    """The same, where it holds bytes beside its caches: to ask a protocol in each step takes long."""
    _method_name: str = ""

    @property
    def window(self) -> int:
        """Tokens a row of the longest forward that the open method may cut."""
        return self._method.window if self._method is not None else 1

    def beside(self, tokens: Sequence[int]) -> int:
        """Return the bytes that the method holds at most beside the caches of rows of ``tokens``."""
        return self._storing.beside(tokens) if self._storing is not None else 0

    def spare(self, left: Callable[[], int]) -> None:
        """Let the method hold as many bytes beside its caches as are ``left``; asked only where it holds any."""
        if self._storing is not None:
            self._storing.spare(left())

    def verify(self, logits: mx.array, ids: mx.array, widths: Sequence[int]) -> PendingDraw:
        """Sample behind each real token of a window."""
        with self.log.times.spent("build"):
            self._samplers.set_rows(self._rows)
            return self._samplers.verify(logits, ids, widths, self.log.times)

    def accept(self, widths: Sequence[int], taken: Sequence[int], known: Sequence[int] = ()) -> None:
        """Account what each row took of a window."""
        self._samplers.accept(taken)
        self.log.verified_forwards += 1
        self.log.verified_tokens += sum(taken)
        for row, width, lines, sure in zip(self._rows, widths, taken, known or [0] * len(taken), strict=True):
            row.sampled += lines
            self.log.drafted.update(range(width - 1 - sure))
            self.log.accepted.update(range(lines - 1 - sure))

    def longest_append(self, tokens: int, width: int) -> int:
        """Return ``width``, or less where a layer's storage changes before."""
        return self.bound.longest_append(tokens, width)

    def open_proposer(self, name: str, options: Mapping[str, Any]) -> ProposerRows:
        """Open a registered proposer, and let it hear hidden states where it listens."""
        opened = self.bound.proposer(name, options)()
        if self.bound.tap.path and isinstance(opened, ListeningRows):
            self.bound.tap.listener = opened
        return opened

    def close_method(self) -> None:
        """Release the method, once; nobody listens any more."""
        method, self._method, self._storing, self._method_name = self._method, None, None, ""
        if method is not None:
            self.bound.tap.close()
            method.close()
