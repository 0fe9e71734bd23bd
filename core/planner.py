"""Chunk planning for prefill: where a row's next forward ends. Pure; it moves no row and sees no array."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Chunk:
    """One planned forward ``[start, end)`` of a prompt.

    ``drain``: the state is evaluated and maintained at its end. ``snapshot``: the state at ``end`` is worth storing.
    ``final``: it ends the prompt, and its last position yields the first token. ``yields``: the advance ends here,
    so that running rows get their turn.
    """

    start: int
    end: int
    drain: bool
    snapshot: bool
    final: bool
    yields: bool


def plan(length: int, position: int, chunk: int, *, tail_split: bool, snapshot: int | None = None) -> Chunk:
    """Return the next chunk of a prompt of ``length`` tokens of which ``position`` are done.

    With ``tail_split`` the final chunk is exactly the last token, so that the first token is sampled from a forward
    of width one whatever the chunk size. A ``snapshot`` position strictly ahead ends a chunk there.
    Raises ValueError where the numbers make no sense.
    """
    for name, value in (("length", length), ("position", position), ("chunk", chunk), ("snapshot", snapshot)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            msg = f"{name} is {value!r}; whole numbers are allowed"
            raise ValueError(msg)
    if not 0 <= position < length or chunk < 1 or (snapshot is not None and not 0 <= snapshot <= length):
        msg = (
            f"cannot plan: length {length}, position {position}, chunk {chunk}, snapshot {snapshot}; "
            "allowed: 0 <= position < length, chunk >= 1, 0 <= snapshot <= length"
        )
        raise ValueError(msg)
    if snapshot is not None and position < snapshot < length:
        end = min(position + chunk, snapshot)
        return Chunk(start=position, end=end, drain=True, snapshot=end == snapshot, final=False, yields=True)
    left = length - position
    if left > (1 if tail_split else chunk):
        end = position + (min(chunk, left - 1) if tail_split else chunk)
        yields = not tail_split or left - 1 > chunk
        return Chunk(start=position, end=end, drain=True, snapshot=False, final=False, yields=yields)
    return Chunk(start=position, end=length, drain=False, snapshot=False, final=True, yields=False)


def shared_width(positions: Sequence[int], chunks: Sequence[Chunk], budget: int | None = None) -> int:
    """Return how many tokens every row of a cohort forwards together: never padded, each row keeps its own end.

    ``budget`` caps the tokens of the forward over all rows, but never below one a row.
    """
    width = min(chunk.end - position for position, chunk in zip(positions, chunks, strict=True))
    if budget is not None:
        width = min(width, max(1, budget // len(chunks)))
    return width
