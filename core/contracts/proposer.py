"""Proposers: where drafts come from. What becomes of a draft is the method's business; it never changes a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx

    from oarlock.core.contracts.layout import BatchCache
    from oarlock.core.row import Row


class ProposerRows(Protocol):
    """A proposer opened for the rows of a group. It knows a row from its first proposal until it is dropped.

    Only the driving thread calls it.
    """

    def propose(self, rows: Sequence[Row], depths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return up to ``depths[i]`` tokens that may follow the prompt and the delivered tokens of row i, all of them ids of the model.

        Asked again about the same tokens, where a forward failed or was not made, it answers the same.
        """
        ...

    def commit(self, row: Row, accepted: int) -> None:
        """Say how many of a row's last drafts were accepted, once they were verified."""
        ...

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows that are over, or run no more; of some it may never have heard."""
        ...

    def close(self) -> None:
        """Let go of everything. Called once, after the last row was dropped."""
        ...


@runtime_checkable
class StoringRows(Protocol):
    """What `ProposerRows` have besides, that hold arrays: the same two calls as `contracts.method.StoringMethod`.

    A proposer that must not hold what drafts would need has none.
    """

    def beside(self, tokens: Sequence[int]) -> int:
        """Return the bytes that it holds at most for rows of ``tokens``, no fewer rows than there are."""
        ...

    def spare(self, limit: int) -> None:
        """Hold no more than ``limit`` bytes until the next call."""
        ...


class Companion(Protocol):
    """A second model beside the bound one, as ``bound.companion(source)`` lends it to a proposer.

    It is loaded when it is first asked for, once an engine, and bound with the layouts that its layers have by themselves.
    """

    vocabulary: int
    """Rows of its embedding: token ids stay below it."""
    positions: int | None
    """The most tokens of a sequence, None where the model does not say."""
    tokenizer: Any
    """A `contracts.loader.Tokenizer`, or None."""

    def enter(self) -> None:
        """Make its forwards possible, until `leave`."""
        ...

    def leave(self) -> None:
        """Undo `enter`."""
        ...

    def open_caches(self, *, window: int) -> list[BatchCache]:
        """Return a cache a layer, without rows, for forwards of which rows may keep fewer than ``window`` tokens."""
        ...

    def forward(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int]) -> mx.array:
        """Forward ``ids`` uint32 ``[B, W]`` and return logits ``[B, W, V]``; `settle` must follow.

        ``widths[i]`` tokens of row i are real. What is raised while the graph is built leaves the caches as they were.
        """
        ...

    def settle(self, caches: Sequence[BatchCache], ids: mx.array, widths: Sequence[int], kept: Sequence[int]) -> None:
        """Close the forward: row i keeps its first ``kept[i]`` tokens, on layers of every kind."""
        ...


@runtime_checkable
class ListeningRows(ProposerRows, Protocol):
    """What an opened proposer is besides, that wants the model's hidden states (heads as those of MTP and EAGLE do).

    Where the engine's method may open one, steps are neither mixed nor compiled.
    """

    def hear(self, row: Row, start: int, states: mx.array) -> None:
        """Take what the model's head was given for some tokens of a row: ``[N, D]``, nothing of it evaluated.

        They are those of its tokens ``start`` to ``start + N - 1``, counted from the first of the prompt. It is called
        once a forward for each row, with the tokens that stay: not with drafts that were rejected. Before the first
        proposal come those of the prompt; in `propose` all delivered tokens were heard, but perhaps the last.

        What was restored with a state (a prefix that was known, a checkpoint) is never heard: then the first ``start`` is
        not 0. A row that lost its state begins anew, at 0 or where it was restored; what is heard twice holds from then
        on. Rows that end before they join are dropped like others, some forwards later. What it raises is logged, costs no
        row anything, and is the end: it hears nothing more.
        """
        ...


@runtime_checkable
class ListeningProposer(Protocol):
    """What a proposer has besides, that may open `ListeningRows`."""

    def listens(self, options: Any) -> bool:
        """Return whether it does; then a model that cannot be tapped is refused at bind, `ProposerRefused`."""
        ...


class Proposer(Protocol):
    """Registered by name; opened once for each group of a method that drafts."""

    name: str
    options: type
    """An attrs class: what may stand beside its name in the configuration."""

    def refuses(self, bound: Any, options: Any) -> str | None:
        """Return why it cannot draft for a bound model (`BoundModel`), or None. Called at bind."""
        ...

    def open(self, bound: Any, options: Any) -> ProposerRows:
        """Return a proposer without rows for a model that it did not refuse."""
        ...
