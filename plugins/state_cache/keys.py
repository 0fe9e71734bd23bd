"""What memory and disk look entries up by, and what of an entry a prompt can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oarlock.core.contracts.composition import BoundLayer, restored
from oarlock.core.contracts.layout import RowState

Key = tuple[tuple[str, str], ...]


def usable(layers: Sequence[BoundLayer], states: Sequence[RowState], tokens: int, most: int) -> int:
    """Return the longest prefix, at most ``most``, that all states, which cover ``tokens``, can be cut to."""
    return most if most == tokens else restored(layers, states, most)[0]


def plain(key: Mapping[str, str]) -> Key:
    """Return a key as something that can be looked up."""
    return tuple(sorted(key.items()))
