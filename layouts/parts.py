"""Rows of one layer in several caches. It knows who stands where, not why rows are apart nor how they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx

from oarlock.core.contracts.composition import Part
from oarlock.core.contracts.layout import BatchCache
from oarlock.layouts.joins import check_cut, check_room

T = TypeVar("T")


class Parted:
    """What caches share that keep their rows in parts. What is done to a row is done in its part."""

    _parts: list[Part]

    @property
    def rows(self) -> int:
        """Rows held."""
        return sum(len(part.places) for part in self._parts)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens per row."""
        held = {place: n for part in self._parts for place, n in zip(part.places, part.cache.tokens, strict=True)}
        return tuple(held[place] for place in range(len(held)))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.cache.nbytes for part in self._parts)

    @property
    def live_bytes(self) -> int:
        """Bytes that the rows' tokens need."""
        return sum(part.cache.live_bytes for part in self._parts)

    def rooms(self, tokens: Sequence[int]) -> list[tuple[BatchCache, list[int]]]:
        """Return which caches need room for rows of ``tokens``, and for which of them."""
        raise NotImplementedError

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return what all parts come to."""
        return sum(cache.projected(each, exact=exact) for cache, each in self.rooms(tokens))

    def reserve(self, tokens: Sequence[int]) -> None:
        """Make room in every part."""
        check_room(tokens, self.tokens)
        for cache, each in self.rooms(tokens):
            cache.reserve(each)

    def compact(self) -> None:
        """Compact every part."""
        self.reserve(self.tokens)

    def reusable(self, tokens: int) -> int:
        """Return the longest prefix, at most ``tokens``, that every part can be cut to."""
        return min((part.cache.reusable(tokens) for part in self._parts if part.places), default=0)

    def cut(self, tokens: int) -> None:
        """Cut every part."""
        check_cut(tokens, self.reusable(tokens), self.tokens)
        for part in self._parts:
            if part.places:
                part.cache.cut(tokens)
        self._arrange()

    def _arrange(self) -> None:
        """Note that rows have changed."""

    def arrays(self) -> list[mx.array]:
        """Return the arrays of all parts."""
        return [array for part in self._parts for array in part.cache.arrays()]

    def part_of(self, row: int) -> tuple[Part, int]:
        """Return the part that holds a row, and its place there."""
        part = next(part for part in self._parts if row in part.places)
        return part, part.places.index(row)

    def copy_of(self, cache: BatchCache) -> BatchCache:
        """Return a cache of the same rows that nobody else holds."""
        raise NotImplementedError

    def taken(self, part: Part, indices: Sequence[int]) -> Part:
        """Return those rows of a part that stand at ``indices``, at their new places, always as copies."""
        new = [place for place, old in enumerate(indices) if old in part.places]
        local = [part.places.index(indices[place]) for place in new]
        whole = local == list(range(len(part.places)))
        return Part(new, self.copy_of(part.cache) if whole else part.cache.take(local))


def at(values: Sequence[T], places: Sequence[int]) -> list[T]:
    """Return the values at some places."""
    return [values[place] for place in places]


def drop(part: Part, rows: Sequence[int]) -> None:
    """Drop some rows of a part; the last ones fill the holes."""
    order = list(range(part.cache.rows))
    for row in sorted(rows, reverse=True):
        last = order.pop()
        if row < len(order):
            order[row] = last
    part.cache.keep(order)
    part.places = at(part.places, order)
