"""Constraints: what tokens a row may take next (grammars). One object per row, borrowed by the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


class Constraint(Protocol):
    """A matcher of one row."""

    @property
    def terminated(self) -> bool:
        """True when the constraint is satisfied and nothing may follow."""
        ...

    def accept(self, token: int) -> None:
        """Advance by one generated token and start filling the next mask."""
        ...

    def ready(self) -> None:
        """Block until the mask is filled."""
        ...

    def mask(self) -> mx.array:
        """Return a boolean ``[V']`` mask of allowed tokens; V' may be below the vocabulary."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, if the constraint leaves no choice."""
        ...

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens."""
        ...


class ConstraintFactory(Protocol):
    """Registered by name; ``name`` is the key of `Request.constraint` that it serves."""

    name: str

    def open(self, spec: Any, tokenizer: Any, request: Mapping[str, Any]) -> Constraint:
        """Compile ``spec``; an error carries the library's message and position."""
        ...
