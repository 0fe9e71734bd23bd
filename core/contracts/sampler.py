"""Samplers and processors: how scores become tokens. The core owns keys, rows and the register.

Shapes: R rows of scores (rows x window), V vocabulary. Scores are the model's logits in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mlx.core as mx

    from oarlock.core.request import SamplingParams


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


class ProcessorRows(Protocol):
    """A processor opened for the rows of a group: it rewrites scores and may look at each row's own history."""

    def apply(self, logits: mx.array, rows: mx.array | None = None, drafted: mx.array | None = None) -> mx.array:
        """Return rewritten scores ``[R, V]``. ``drafted`` holds unaccepted tokens before each line, in a window."""
        ...

    def push(self, tokens: mx.array) -> None:
        """Append one sampled token per row (uint32 ``[B]``, on the device: nobody has read it yet)."""
        ...

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last ``counts[i]`` pushed tokens of row i."""
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        ...


class Processor(Protocol):
    """Registered by name; opened for the rows whose parameters ask for it."""

    name: str
    is_argmax_invariant: bool

    def handles(self, params: SamplingParams) -> bool:
        """Return whether these parameters ask for this processor."""
        ...

    def open(self, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]]) -> ProcessorRows:
        """Return the processor for these rows; ``histories`` are prompt plus generated tokens."""
        ...
