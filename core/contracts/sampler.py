"""Samplers and processors: how scores become tokens. The core owns keys, rows and the register.

Shapes: R rows of scores (rows x window), V vocabulary. Scores are the model's logits in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import mlx.core as mx

    from oarlock.core.request import SamplingParams


@runtime_checkable
class Extending(Protocol):
    """What a sampler or a processor has besides, that reads keys of `SamplingParams.extra`."""

    extra: frozenset[str]
    """The keys. Requests with a key that nothing reads are refused."""

    def check(self, params: SamplingParams, vocabulary: int) -> None:
        """Raise `errors.InvalidParameter` where a value of one of the keys cannot be.

        Called when a request is submitted that has one of them; token ids stay below ``vocabulary``.
        """
        ...


class SamplerRows(Protocol):
    """A sampler opened for the rows of a group; their parameters live on the device.

    A row's outcome depends on its own scores, parameters and key only, bit for bit, whatever rows stand beside it.
    """

    def density(self, logits: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return float32 log-probabilities ``[R, V]`` after every filter; what is filtered out is minus infinity.

        ``rows`` (int32 ``[R]``) says which opened row each line belongs to; None: line i is row i.
        At least one token of a line stays finite.
        """
        ...

    def draw(self, density: mx.array, keys: mx.array) -> mx.array:
        """Return uint32 tokens ``[R]``. ``keys`` is uint32 ``[R, 2]``, a random key per line."""
        ...

    def sample(self, logits: mx.array, keys: mx.array, rows: mx.array | None = None) -> mx.array:
        """Return uint32 tokens ``[R]``: `draw` of `density`, by a shorter way where there is one."""
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        ...


class Sampler(Protocol):
    """Registered by name; opened at membership changes only."""

    name: str
    is_argmax_invariant: bool
    """True where a greedy row's token is never changed, so that greedy rows may skip it."""

    def handles(self, params: SamplingParams) -> bool:
        """Return whether rows with these parameters can be drawn here."""
        ...

    def open(self, params: Sequence[SamplingParams]) -> SamplerRows:
        """Return the sampler for these rows, in this order."""
        ...


@attrs.frozen(kw_only=True)
class ProcessedRow:
    """What a processor learns of a row. ``prompt`` and ``generated`` are its tokens so far, for `Processor.open` alone.

    ``stop_ids`` end the row, ``min_tokens`` must be generated before.
    """

    params: SamplingParams
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@attrs.frozen(eq=False)
class Drafted:
    """Tokens that stand before each line of a window and are not accepted yet.

    ``tokens`` uint32 ``[R, D]``, on the device; ``counts[i]``, on the host, says how many of line i are real, from the
    first: in a window of W tokens the lines of one row have 0, 1, ..., W - 1.
    """

    tokens: mx.array
    counts: Sequence[int]


class ProcessorRows(Protocol):
    """A processor opened for rows of a group: it rewrites scores and may look at each row's own history.

    A row's scores depend on its own scores, parameters and history only, bit for bit, whatever rows stand beside it.
    Nothing here waits for the device. Histories begin with the tokens that the rows were opened with.
    """

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: Drafted | None = None) -> mx.array:
        """Return rewritten scores ``[R, V]`` in the dtype of ``logits``, and change nothing else.

        ``rows`` (int32 ``[R]``, made on the host, so that reading it waits for nothing) says which opened row each line
        belongs to; None: line i is row i. ``drafted``: each line is rewritten as if those tokens had been pushed
        before. When it raises for several rows it is called again row by row, and only those that it raises for are
        rejected.
        """
        ...

    def push(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Append the first ``counts[i]`` tokens of line i of uint32 ``[B, W]`` to row i's history.

        Called after every draw, with tokens that nobody has read yet. When it raises nothing was appended; it is
        called again row by row, with counts of 0 for the others. What it leaves unevaluated must be evaluated with what the
        next `apply` returns, or work piles up.
        """
        ...

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last ``counts[i]`` pushed tokens of row i."""
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        ...


class Processor(Protocol):
    """Registered by name; opened for the rows that ask for it. Where several apply they do so by order of name."""

    name: str
    is_argmax_invariant: bool
    """True where the best token always stays the best one, so that greedy rows may skip it."""
    fields: frozenset[str]
    """The fields of `SamplingParams` that it applies, and "min_tokens" of `Request`; see `Extending` for other keys."""

    def handles(self, row: ProcessedRow) -> bool:
        """Return whether the row asks for this processor. Where none does, nothing is computed."""
        ...

    def open(self, rows: Sequence[ProcessedRow]) -> ProcessorRows:
        """Return the processor for these rows, in this order.

        Called when rows join, and for rows that were computed again: it goes on from all of their tokens.
        """
        ...
