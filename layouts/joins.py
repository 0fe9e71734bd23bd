"""What every cache asks before rows join it. It moves none."""

from __future__ import annotations

from collections.abc import Sequence


def check_slots(slots: Sequence[int], held: int, joining: int) -> None:
    """Raise ValueError where ``slots`` are not the next ones behind ``held`` rows."""
    if list(slots) != (free := list(range(held, held + joining))):
        msg = f"slots are {list(slots)}; the free ones are {free}"
        raise ValueError(msg)
