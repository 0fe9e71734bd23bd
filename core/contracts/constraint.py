"""Constraints: what tokens a row may take next (grammars). One object per row, borrowed by the core.

The core asks in this order, for every token that it delivers: ``ready``, ``mask``, then ``accept`` with the token. What
ends the row by itself, an end token of the row, is not passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from oarlock.core.request import Request

MAX_FORCED = 16
"""Most tokens that follow without a choice and are appended in one forward."""


class Constraint(Protocol):
    """A matcher of one row. What it raises rejects that row alone."""

    @property
    def terminated(self) -> bool:
        """True when the constraint is satisfied and nothing may follow: the row ends, and is asked no more."""
        ...

    def accept(self, token: int) -> None:
        """Advance by one generated token and start filling the next mask. Raises for a token that is not allowed."""
        ...

    def ready(self) -> None:
        """Block until the mask is filled. Called after the row's next forward was given to the device."""
        ...

    def mask(self) -> np.ndarray:
        """Return the allowed tokens, bool ``[V']`` on the host; ids from V' on are not allowed.

        An end token of the row is allowed only where the constraint may end.
        """
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, if the constraint leaves no choice."""
        ...

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens and start filling the mask that there was before them."""
        ...


class ConstraintFactory(Protocol):
    """Registered by name; ``name`` is the key of `Request.constraint` that it serves."""

    name: str

    def open(self, spec: Any, tokenizer: Any, request: Request) -> Constraint:
        """Compile ``spec``, start filling the first mask, and return the matcher of a row without tokens.

        Called at submit, on the caller's thread. ``tokenizer`` is the engine's, or None. An error refuses the request:
        its message is the library's, with the position.
        """
        ...
