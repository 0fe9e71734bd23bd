"""Grouped decoding methods: how the rows of a group advance together. The core owns queueing and failures.

Shapes: B running rows, W tokens of the widest row in a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from oarlock.core.result import FinishReason, Logprob

if TYPE_CHECKING:
    import mlx.core as mx

    from oarlock.core.config import EngineConfig
    from oarlock.core.contracts.layout import BatchCache
    from oarlock.core.contracts.proposer import ProposerRows
    from oarlock.core.row import Row


class Draw(Protocol):
    """Tokens sampled but not yet read. Reading it is the one host sync of a step."""

    @property
    def tokens(self) -> mx.array:
        """uint32 ``[B]``, fed to the next forward unread; of `MethodHost.verify`, one a line."""
        ...

    def read(self) -> Sequence[Drawn]:
        """Block until the tokens are there and return one `Drawn` per row, or line."""
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Make old line ``indices[i]`` the new line i."""
        ...


@attrs.define  # not frozen: one is made per row and step, and freezing doubles what that costs
class Drawn:
    """One row's sampled token on the host.

    ``finite`` is False where the scores were NaN or all minus infinity: the row must fail. ``real`` is False for a
    placeholder: the row was not sampled in this step. ``error`` is what the sampler raised for this row alone. ``forced``:
    the row had no choice (`MethodHost.known`).
    """

    token: int
    finite: bool = True
    real: bool = True
    error: BaseException | None = None
    logprob: Logprob | None = None
    forced: bool = False


class MethodHost(Protocol):
    """What the core lends a method. Valid from ``open`` to ``close``."""

    @property
    def rows(self) -> Sequence[Row]:
        """The running rows; their order is that of the caches' rows. During ``keep`` it is still the old list."""
        ...

    @property
    def config(self) -> EngineConfig:
        """The engine's frozen configuration."""
        ...

    @property
    def constrained(self) -> bool:
        """Whether a running row's scores are masked by what its tokens so far allow.

        Then a step reads what is unread and calls `follow` before its `forward`; `emit` may come later.
        """
        ...

    def follow(self, drawn: Sequence[Drawn]) -> None:
        """Let constraints follow one read token per running row before it is emitted, so that masks are filled meanwhile.

        Rows that a constraint ends with it are no longer ``live``. Twice is once; `emit` does it where it was not done.
        """
        ...

    def known(self) -> Iterator[Sequence[int]]:
        """Yield the tokens that must follow each running row's last read one, in order; asked after `follow`.

        None for a row that has a choice, or of which somebody would have to look at the scores between. They stay one
        short of its limit and of what ends it. Each row is asked when its turn comes, and may wait for its mask.
        """
        ...

    def forced(self, spans: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Let constraints follow what is `known`, or the beginning of it, and return what they followed, or nothing.

        It is to be forwarded at once behind the last read token, no further than `longest_append` allows; then each
        row's ``sampled`` grows by its own, and all are emitted in their order as ``forced``. A row whose constraint
        raises gets none, and its error when it is sampled. Asked again, with other spans, those are taken back.
        """
        ...

    def open_caches(self, *, slots: int = 1, window: int = 1) -> list[BatchCache]:
        """Return one empty cache per layer of the bound model, as a plain list."""
        ...

    def forward(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], work: Any = None) -> mx.array:
        """Forward ``ids`` uint32 ``[B, W]`` and return logits ``[B, W, V]``; `settle` must follow.

        ``widths[i]`` tokens of row i are real. ``work``: what `GroupedMethod.advance` got. An error while the graph is built leaves the caches as they were.
        """
        ...

    def settle(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], kept: Sequence[int]) -> None:
        """Close the forward: row i keeps its first ``kept[i]`` tokens, on layers of every kind.

        An error is none that a method can repeat: then all rows are built again from what was delivered of them.
        """
        ...

    def sample(self, logits: mx.array, live: Sequence[bool]) -> Draw:
        """Sample one token per running row from ``logits`` [B, V] and start its evaluation; no sync.

        Rows that are not ``live`` get a placeholder, and their count of samples stays. A sampler that raises for the
        batch is called again row by row; only the guilty row carries the error.
        """
        ...

    def verify(self, logits: mx.array, ids: mx.array, widths: Sequence[int]) -> Draw:
        """Sample what each row draws behind each real token of a window, and start the evaluation; no sync.

        ``logits`` [B, W, V] are those of the forward of ``ids`` and ``widths``. The draw has sum(widths) lines, row after
        row; line j of a row is what it would draw after its first j + 1 tokens of the window, were all of them its own:
        so those up to the first draft that differs from the line before it are the very tokens of `sample`.
        A sampler that raises blames lines as it blames rows there. Counts nothing: `accept` must follow.
        """
        ...

    def accept(self, widths: Sequence[int], taken: Sequence[int], known: Sequence[int] = ()) -> None:
        """Say how many lines of a window each row took: they count as samples, and all but the last as accepted drafts.

        The first ``known[i]`` tokens behind row i's current one were `known`, and count as no drafts.
        """
        ...

    def longest_append(self, tokens: int, width: int) -> int:
        """Return ``width``, or less where a row of ``tokens`` may not be given as many tokens in one forward."""
        ...

    def open_proposer(self, name: str, options: Mapping[str, Any]) -> ProposerRows:
        """Open a registered proposer. Raises what an unknown name or wrong options raise."""
        ...

    def emit(self, row: Row, drawn: Drawn) -> bool:
        """Account one sampled token and deliver it (limits, EOS, stop strings, consumer, cancellation).

        Returns False when the row is over: by a reason, an error of its own, or a cancellation. Never raises.
        """
        ...

    def finish(self, row: Row, reason: FinishReason) -> None:
        """End a row without another token."""
        ...

    def retire(self) -> None:
        """Drop the rows that are over. Calls the method's `keep`, then shrinks `rows`. Once, after a whole emission."""
        ...


class GroupedMethod(Protocol):
    """Numerical state and order of one group. Not thread-safe: the driver alone calls it.

    ``advance`` is restartable: when `MethodHost.forward` raises, the method is as it was before the call, since the
    core removes the guilty row and calls again.
    """

    window: int
    """Tokens a row of the longest forward of which a row may keep fewer: caches of joiners are opened for it."""

    @property
    def running_tokens(self) -> int | None:
        """Most target tokens that the next `advance` forwards; None where it hands no ``work`` to `MethodHost.forward`."""
        ...

    def join(self, row: Row, caches: Sequence[BatchCache], first: Draw | None = None) -> None:
        """Add a prefilled row: flush first (which can empty the group), then adopt or merge its one-row ``caches``.

        ``first`` is a sampled but unread first token, given only where the group is empty. All or nothing.
        """
        ...

    def advance(self, work: Any = None) -> None:
        """Do one iteration: build the next step from what is unread, then read and emit the previous one.

        ``work`` is a preparation's chunk that the step's forward may take along: hand it to `MethodHost.forward` as it
        is. It is taken once; what is left of it runs alone afterwards.
        """
        ...

    def flush(self) -> None:
        """Read and emit what is unread; nothing is in flight afterwards."""
        ...

    def keep(self, indices: Sequence[int], discard: bool) -> None:
        """Make old row ``indices[i]`` the new row i. ``discard``: what is dropped must not be published."""
        ...

    def abort(self) -> None:
        """Drop everything in flight and all rows; the method stays open for new ones."""
        ...

    def caches(self) -> Sequence[BatchCache]:
        """Return the target model's caches of the running rows (empty without rows)."""
        ...

    def close(self) -> None:
        """Release everything. Called once, when another method takes over or the engine closes."""
        ...


class Method(Protocol):
    """Registered by name; opens one `GroupedMethod` per group of compatible rows."""

    name: str
    options: type
    """An attrs class: the method's options in the config file."""

    def open(self, host: MethodHost, options: Any) -> GroupedMethod:
        """Return a method without rows."""
        ...


@runtime_checkable
class WindowedMethod(Protocol):
    """What a method has besides, whose groups have a `GroupedMethod.window` of more than one token."""

    def window(self, options: Any) -> int:
        """Return the window of the groups that it opens with these options: what a row needs is known by it before."""
        ...


@runtime_checkable
class StoringMethod(Protocol):
    """What a `GroupedMethod` has besides, that holds arrays beside its rows' caches: the budget of bytes counts them.

    Both are called on the driving thread, and only where there is a budget.
    """

    def beside(self, tokens: Sequence[int]) -> int:
        """Return the bytes that it holds at most beside the caches of rows of ``tokens``, no fewer rows than there are."""
        ...

    def spare(self, limit: int) -> None:
        """Hold no more than ``limit`` bytes beside the caches until the next call, which comes before each step.

        Rows go on without what does not fit.
        """
        ...


@runtime_checkable
class MeasuringMethod(Protocol):
    """What a method has besides, that may decide by how long steps take: processes that run one schedule cannot use it then."""

    def measures(self, options: Any) -> bool:
        """Return whether it does with these options."""
        ...


@runtime_checkable
class CheckedMethod(Protocol):
    """What a method has besides, that can tell at bind whether it can do what its options ask for."""

    def check(self, bound: Any, options: Any) -> None:
        """Raise, before any request is taken, what would be raised when ``bound`` (`BoundModel`) opens it."""
        ...
