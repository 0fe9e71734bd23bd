"""What every cache asks before rows join it, go back, or get room. It moves none."""

from __future__ import annotations

from collections.abc import Sequence


def check_slots(slots: Sequence[int], held: int, joining: int) -> None:
    """Raise ValueError where ``slots`` are not the next ones behind ``held`` rows."""
    if list(slots) != (free := list(range(held, held + joining))):
        msg = f"slots are {list(slots)}; the free ones are {free}"
        raise ValueError(msg)


def check_room(tokens: Sequence[int], held: Sequence[int]) -> None:
    """Raise ValueError where ``tokens`` are fewer than the rows hold."""
    if len(tokens) < len(held) or any(wanted < has for wanted, has in zip(tokens, held, strict=False)):
        msg = f"room was asked for rows of {list(tokens)} tokens; the rows hold {list(held)}, the least allowed"
        raise ValueError(msg)


def check_cut(tokens: int, longest: int, held: Sequence[int]) -> None:
    """Raise ValueError where rows of ``held`` tokens cannot be cut to ``tokens``, of which ``longest`` are reusable."""
    if not 0 < tokens == longest:
        msg = f"rows of {list(held)} tokens cannot be cut to {tokens}; the longest prefix of it has {longest} tokens"
        raise ValueError(msg)
