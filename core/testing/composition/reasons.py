"""Why a cell may be refused: a closed list. Each member says what stands against it, and whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from oarlock.core.errors import BindError, CompiledRefused, MixedRefused


@attrs.frozen(kw_only=True)
class Reason:
    """A member. ``error`` and ``pattern`` are those of the message by which bind refuses.

    ``why`` is the inequality or the missing operation.
    """

    name: str
    error: type[BindError]
    pattern: str
    why: str

    def fits(self, error: BindError) -> bool:
        """Return whether bind said this."""
        return isinstance(error, self.error) and re.search(self.pattern, str(error)) is not None


_ALL = (
    Reason(
        name="state",
        error=MixedRefused,
        pattern="keeps a past that attention does not receive as it is",
        why="A mixed forward lays its T tokens out as T lines of one token and tells rows apart where attention asks the "
        "cache for keys. A state is updated in the model's own code, from one line's state and that line's tokens, and "
        "n > 1 tokens of a row stand in n lines. Missing operation: the model's update of one state by tokens of several "
        "lines.",
    ),
    Reason(
        name="position",
        error=MixedRefused,
        pattern="rows of different length cannot share a forward",
        why="The model's forward takes one integer as the position of all its lines; those of a mixed forward stand at "
        "positions p != q.",
    ),
    Reason(
        name="constant",
        error=CompiledRefused,
        pattern="takes no array of positions",
        why="A replayed step computes what its trace computed. The model's forward takes its position as an integer, which "
        "is a constant of the trace, and the next step is at p + 1 != p. Missing operation: a forward that takes "
        "positions as an array.",
    ),
    Reason(
        name="shape",
        error=CompiledRefused,
        pattern="whose steps cannot be replayed",
        why="A replayed step reads and writes arrays of the shapes and in the places that its trace had. Missing "
        "operations of the layout's caches: `fixed_columns` and `traced` (`contracts.composition.TraceableCache`). What a "
        "step reads, or where it writes, is settled on the host: a ring's head, a table of blocks, which rows are packed "
        "already, which state is a row's.",
    ),
)
REASONS: Mapping[str, Reason] = MappingProxyType({reason.name: reason for reason in _ALL})


def reason_of(error: BindError) -> str | None:
    """Return the name of the member that bind's message is, None where it is none of them."""
    return next((reason.name for reason in REASONS.values() if reason.fits(error)), None)
