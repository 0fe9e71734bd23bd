"""Rows of different length kept apart, for models whose forward takes one position for all rows. It picks no model.

Rows of one length share a cache and a forward; each other length is a forward of its own. Rows that decode together
stay together, since all advance alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.contracts.composition import APART, BoundLayer, Part
from oarlock.core.contracts.layout import BatchCache, CacheLayout, LayerInfo, Positions, RowState
from oarlock.layouts.joins import check_slots
from oarlock.layouts.parts import Parted, at

OARLOCK_API = 1


@attrs.frozen
class ApartOptions:
    """`apart` has no options; bind chooses it, not the config."""


class ApartCache(Parted):
    """One layer's rows in parts. What is done to a row is done in its part; models see the parts only."""

    def __init__(self, opened: Callable[[], BatchCache], parts: Sequence[Part] = ()) -> None:
        """``opened`` makes a cache without rows."""
        self._parts = list(parts)
        self.rewinds = opened().rewinds
        self._opened = opened

    @property
    def parts(self) -> Sequence[Part]:
        """The rows of each length, see `contracts.composition.PartedCache`."""
        return self._parts

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Put rows of one start together, and open a forward in every part."""
        self._parts = self._regrouped(starts)
        for part in self._parts:
            part.cache.begin(at(widths, part.places), Positions(at(starts, part.places)))

    def commit(self, kept: Sequence[int]) -> None:
        """Close the forward in every part; rows that kept different counts part company at the next `begin`."""
        for part in self._parts:
            part.cache.commit(at(kept, part.places))

    def add(self, n: int) -> None:
        """Append empty rows, in a part of their own."""
        cache, first = self._opened(), self.rows
        cache.add(n)
        self._parts.append(Part(list(range(first, first + n)), cache))

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Append copies of the other's parts."""
        if not isinstance(other, ApartCache):
            msg = f"rows kept apart by length cannot take rows of {type(other).__name__}"
            raise TypeError(msg)
        check_slots(slots, self.rows, other.rows)
        self._parts += [Part(at(slots, part.places), self.copy_of(part.cache)) for part in other.parts]

    def take(self, indices: Sequence[int]) -> ApartCache:
        """Return rows as a cache of their own: this very one when it is all of them, else copies."""
        if list(indices) == list(range(self.rows)):
            return self
        named = [part for part in self._parts if not set(part.places).isdisjoint(indices)]
        return ApartCache(self._opened, [self.taken(part, indices) for part in named])

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i."""
        kept = []
        for part in self._parts:
            new = [place for place, old in enumerate(indices) if old in part.places]
            if new:
                part.cache.keep([part.places.index(indices[place]) for place in new])
                kept.append(Part(new, part.cache))
        self._parts = kept

    def extract(self, row: int) -> RowState:
        """Return an owned copy of a row."""
        part, place = self.part_of(row)
        return part.cache.extract(place)

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns of every part."""
        return tuple((tuple(part.places), part.cache.columns(at(widths, part.places))) for part in self._parts)

    def rooms(self, tokens: Sequence[int]) -> list[tuple[BatchCache, list[int]]]:
        """Return the parts, and a new one for each row to come. Rows that come together later are copied."""
        joining = [(self._opened(), [n]) for n in tokens[self.rows :]]
        return [*((part.cache, at(tokens, part.places)) for part in self._parts), *joining]

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return what the parts come to; at most, all rows in one part, and what parts have beside their rows."""
        if exact:
            return super().projected(tokens, exact=True)
        longest, opened = max(tokens, default=0), self._opened()
        beside = 0
        for part in self._parts:
            mine, rows = [longest] * len(part.places), len(part.places)
            beside += max(0, part.cache.projected(mine) - rows * opened.projected([longest]))
        return opened.projected([longest] * len(tokens)) + beside

    def copy_of(self, cache: BatchCache) -> BatchCache:
        """Return a cache of the same rows that nobody else holds."""
        copy = self._opened()
        copy.join(cache, range(cache.rows))
        return copy

    def _regrouped(self, starts: Positions) -> list[Part]:
        """Return the parts with one start each, split and joined where they are not; nothing is copied otherwise."""
        together: dict[int, Part] = {}
        for part in self._parts:
            for start in dict.fromkeys(at(starts, part.places)):
                local = [i for i, place in enumerate(part.places) if starts[place] == start]
                one = Part(at(part.places, local), part.cache.take(local))
                first = together.setdefault(start, one)
                if first is not one:
                    first.cache.join(one.cache, range(len(first.places), len(first.places) + len(one.places)))
                    first.places += one.places
        return list(together.values())


@attrs.frozen
class ApartLayout:
    """Registers as ``apart``. What is registered holds nothing; bind composes one of a layer and its own layout."""

    inner: BoundLayer | None = None
    name: str = "apart"
    kinds: frozenset[str] = frozenset({APART})
    options: type = ApartOptions

    def compose(self, parts: Sequence[BoundLayer]) -> ApartLayout:
        """Return the layout of one layer; states are stored under the name of its own layout."""
        (inner,) = parts
        return attrs.evolve(self, inner=inner, name=inner.layout.name, kinds=inner.layout.kinds)

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return why a layer cannot be held: its own layout was asked for that."""
        return None if self.inner else "it holds layers that have a layout already"

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> ApartCache:
        """Return no rows; each part reserves one slot, since nobody knows which lengths will meet."""
        return ApartCache(lambda: self._layout.open(layer, options, slots=1, window=window))

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Ask the layer's own layout."""
        return self._layout.bytes_at(layer, options, tokens)

    def restore(self, state: RowState) -> ApartCache:
        """Return one row; it gets the window of the rows that it joins."""
        opened = functools.partial(self._layout.open, self._inner.info, self._inner.options, slots=1, window=1)
        return ApartCache(opened, [Part([0], self._layout.restore(state))])

    @property
    def _inner(self) -> BoundLayer:
        assert self.inner is not None, "bind composes it with a layer first"
        return self.inner

    @property
    def _layout(self) -> CacheLayout:
        return self._inner.layout


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `apart`."""
    register(ApartLayout())
