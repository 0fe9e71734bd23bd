"""Plain storage until a row holds `start` tokens, then 2 to 8 bits a number. It stores nothing: two other caches do.

A row is packed once and for good, by itself, when a forward begins in which it takes part. What it is stored as thus
depends on its length alone, not on its company nor on chunks, provided that no forward runs past `start`: the core
cuts them there, see `DelayedLayout.stops`. Plain and packed rows share forwards; `layouts.mixed` attends to both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.composition import Part
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState
from oarlock.layouts.full import FullCache, FullLayout, FullOptions
from oarlock.layouts.joins import check_slots
from oarlock.layouts.mixed import Share, SharedKeysValues, Shares
from oarlock.layouts.parts import Parted, at, drop
from oarlock.layouts.planes import NamedPlanes, Planes
from oarlock.layouts.quantized import QuantizedCache, QuantizedLayout, QuantizedOptions, QuantizedRing, packed_of
from oarlock.layouts.rotating import RingCache, RotatingCache, RotatingLayout
from oarlock.layouts.slots import SlotCache

OARLOCK_API = 1
NAME = "delayed"

Plain = FullCache | RotatingCache
Packed = QuantizedCache | QuantizedRing


@attrs.frozen
class DelayedOptions(QuantizedOptions):
    """``start``: how many tokens of a row are written and read plainly; its first one is in any case."""

    start: int = attrs.field(default=5000)

    @start.validator
    def _check_start(self, attribute: Any, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            msg = f"start is {value!r}; whole numbers of tokens, 0 or more, are allowed"
            raise ValueError(msg)

    @property
    def stop(self) -> int:
        """The most tokens of a plain row."""
        return max(1, self.start)


class DelayedCache(NamedPlanes, Parted):
    """Rows in a plain cache and in a packed one. While either has none, models see the other as it is."""

    rewinds = True
    plain: Plain
    packed: Packed
    _whole: Plain | Packed | None
    _starts, _written = Positions(()), 0

    def __init__(self, parts: Iterable[Part], stop: int) -> None:
        """Hold the rows of two parts; a plain row of ``stop`` tokens is packed before it gets another."""
        self._parts, self.stop = list(parts), stop
        self.plain, self.packed = (part.cache for part in self._parts)  # type: ignore[assignment]
        self._arrange()

    # --- what models see ------------------------------------------------------------------------------

    @property
    def planes(self) -> Planes:  # type: ignore[override]
        """The planes of one cache that has rows: models tie to them what must be computed with the layer."""
        return (self._whole or self.packed).planes

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next token: one integer where all rows agree, else int32 ``[B]``."""
        return self._starts.moved(self._written) if self._whole is None else self._whole.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask of the coming forward: that of one cache with all rows. Models ask before the append."""
        return (self._whole or self._outline(self._starts)).make_mask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``[B, H, N, D]``, each row where it is stored, and return the columns that `make_mask` spoke of."""
        if self._whole is not None:
            return self._whole.update_and_fetch(keys, values)
        for part, cache in self._both:
            rows = self._indices(part.places)
            cache.update_and_fetch(keys[rows], values[rows])
        self._written = keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last append returned."""
        if self._whole is not None:
            return self._whole.keys_and_values()
        each = [Share(self._indices(part.places), *cache.keys_and_values()) for part, cache in self._both]
        right = isinstance(self.plain, RotatingCache) and self.plain.ring.is_block(self._written)
        shares = Shares(each, self._indices(self._order()), right)
        return SharedKeysValues.pair(shares) if self.packed.attends else shares.stacked()

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward at ``starts``, after packing the rows whose time has come; that blocks."""
        if len(widths) != self.rows or len(starts) != self.rows:
            msg = f"begin got {len(widths)} widths and {len(starts)} starts for {self.rows} rows"
            raise ValueError(msg)
        early = enumerate(self._parts[0].places)
        self._pack([row for row, place in early if widths[place] and starts[place] >= self.stop])
        if self._whole is not None:
            self._whole.begin(widths, starts)
            return
        self._starts, self._written = starts, 0
        for part, cache in self._both:
            cache.begin(at(widths, part.places), starts.pick(part.places))

    def commit(self, kept: Sequence[int]) -> None:
        """Close the forward in both caches. A row that went past its stop in one forward is packed at once."""
        if self._whole is not None:
            self._whole.commit(kept)
        else:
            for part, cache in self._both:
                cache.commit(at(kept, part.places))
            self._starts, self._written = Positions(self.tokens), 0
        self._pack([row for row, n in enumerate(self.plain.tokens) if n > self.stop])

    # --- rows -------------------------------------------------------------------------------------------

    def add(self, n: int) -> None:
        """Append ``n`` empty rows."""
        self._parts[0].places += range(self.rows, self.rows + n)
        self.plain.add(n)
        self._arrange()

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Copy the rows of ``other`` behind the others, each as it is stored. Nothing changes when it raises."""
        if not isinstance(other, DelayedCache) or other.stop != self.stop:
            msg = f"rows of {type(other).__name__} cannot join rows that are packed from {self.stop} tokens on"
            raise TypeError(msg)
        check_slots(slots, self.rows, other.rows)
        before = self.plain.rows
        self.plain.join(other.plain, range(before, before + other.plain.rows))
        try:
            self.packed.join(other.packed, range(self.packed.rows, self.packed.rows + other.packed.rows))
        except Exception:
            self.plain.keep(range(before))
            raise
        for part, theirs in zip(self._parts, other._parts, strict=True):
            part.places += at(slots, theirs.places)
        self._arrange()

    def take(self, indices: Sequence[int]) -> DelayedCache:
        """Return rows as a cache of their own: this very one when it is all of them in order, else copies."""
        if list(indices) == list(range(self.rows)):
            return self
        return DelayedCache([self.taken(part, indices) for part in self._parts], self.stop)

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i. Blocks once where rows move, and the fewest do."""
        if self._whole is not None:
            self._whole.keep(indices)
            self._parts[self._whole is self.packed].places = list(range(len(indices)))
        else:
            new = {old: place for place, old in enumerate(indices)}
            for part in self._parts:
                drop(part, [row for row, place in enumerate(part.places) if place not in new])
                part.places = [new[place] for place in part.places]
        self._arrange()

    def extract(self, row: int) -> RowState:
        """Return a dispatched copy of a row, as it is stored."""
        part, place = self.part_of(row)
        cache = self.packed if part is self._parts[1] else self.plain
        sizes = f"{self.plain.column_bytes} {self.packed.column_bytes}"
        meta = {"stop": str(self.stop), "packed": str(int(cache is self.packed)), "bytes": sizes, **self.packed.meta()}
        return RowState(layout=NAME, tokens=cache.tokens[place], arrays=cache.row_planes(place), meta=meta)

    def reusable(self, tokens: int) -> int:
        """Return the longest prefix, at most ``tokens``; 0 where a packed row would be cut to what should be plain."""
        found = super().reusable(tokens)
        return 0 if self.packed.rows and found < self.stop else found

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns read: those of one cache with all rows."""
        return (self._whole or self._outline(Positions(self.tokens))).columns(widths)

    def copy_of(self, cache: BatchCache) -> BatchCache:
        """Return a cache of the same rows that nobody else holds."""
        assert isinstance(cache, SlotCache)
        return cache._copy(range(cache.rows))

    def rooms(self, tokens: Sequence[int]) -> list[tuple[BatchCache, list[int]]]:
        """Return both caches: a row that is not packed yet, or not there, is plain first, whatever it will be."""
        early = [*self._parts[0].places, *range(self.rows, len(tokens))]
        late = [*self._parts[1].places, *(row for row in early if tokens[row] > self.stop)]
        return [(self.plain, [min(tokens[row], self.stop) for row in early]), (self.packed, at(tokens, late))]

    # --- plain and packed -------------------------------------------------------------------------------

    @property
    def _both(self) -> tuple[tuple[Part, Plain | Packed], ...]:
        return (self._parts[0], self.plain), (self._parts[1], self.packed)

    def _pack(self, rows: Sequence[int]) -> None:
        """Pack some of the plain cache's rows, and wait for it: layer by layer, so that one at a time is held twice."""
        if not rows:
            return
        packed = self.packed.packing(self.plain.take(rows))
        self.packed.join(packed, range(self.packed.rows, self.packed.rows + len(rows)))
        self._parts[1].places += at(self._parts[0].places, rows)
        drop(self._parts[0], rows)
        if not self.plain.rows:
            self.plain.planes = {}
        self._arrange()
        mx.eval(self.packed.arrays())
        mx.clear_cache()

    def _arrange(self) -> None:
        """Find out whether one cache holds all rows, and put them in order there."""
        self._whole = None
        for (part, cache), other in zip(self._both, reversed(self._parts), strict=True):
            if not other.places and self._whole is None:
                order = sorted(range(cache.rows), key=part.places.__getitem__)
                if order != list(range(cache.rows)):
                    cache.keep(order)
                part.places, self._whole = list(range(cache.rows)), cache
        if self._whole is None:
            self._starts, self._written = Positions(self.tokens), 0

    def _outline(self, starts: Positions) -> Plain:
        """Return a cache with all rows and nothing in it: it knows where they stand."""
        rows = self.plain.sibling(0)
        rows.add(len(starts))
        if isinstance(rows, RotatingCache):
            phases = [phase for _, ring in self._both if isinstance(ring, RingCache) for phase in ring.ring.phases]
            rows.ring = attrs.evolve(rows.ring, phases=tuple(at(phases, self._order())))
        rows.begin([0] * len(starts), starts)
        return rows

    def _order(self) -> list[int]:
        """Return where each row stands when the packed ones are put behind the plain ones."""
        places = [place for part in self._parts for place in part.places]
        return sorted(range(len(places)), key=places.__getitem__)

    def _indices(self, places: Sequence[int]) -> mx.array:
        return self._starts.shared(("indices", *places), lambda: mx.array(list(places), dtype=mx.int32))


@attrs.frozen
class DelayedLayout:
    """Registers as ``delayed``; holds what `quantized` holds."""

    name: str = NAME
    kinds: frozenset[str] = QuantizedLayout().kinds
    options: type = DelayedOptions

    def refuses(self, layer: LayerInfo, options: DelayedOptions) -> str | None:
        """Return why a layer cannot be packed, or None."""
        return QuantizedLayout().refuses(layer, options)

    def attends(self, layer: LayerInfo, options: DelayedOptions) -> bool:
        """Return whether attention takes handles, as packed rows are read."""
        return layer.attendable

    def stops(self, layer: LayerInfo, options: DelayedOptions) -> tuple[int, ...]:
        """Return where a row's storage changes."""
        return (options.stop,)

    def open(self, layer: LayerInfo, options: DelayedOptions, *, slots: int, window: int) -> DelayedCache:
        """Return a cache without rows; slots are reserved where rows are."""
        pairs = zip(_layouts(layer), (FullOptions(reads="padded"), options), strict=True)
        caches = [layout.open(layer, own, slots=slots, window=window) for layout, own in pairs]
        return DelayedCache([Part([], cache) for cache in caches], options.stop)

    def bytes_at(self, layer: LayerInfo, options: DelayedOptions, tokens: int) -> int:
        """Return the bytes of one row at ``tokens``, as it is stored then."""
        size: int = _layouts(layer)[tokens > options.stop].bytes_at(layer, options, tokens)
        return size

    def restore(self, state: RowState) -> DelayedCache:
        """Return a one-row cache that copies the state's arrays when it is written to, and never writes them."""
        meta = state.meta()
        packed = packed_of(meta)
        plain = RotatingCache(1, packed.ring) if isinstance(packed, QuantizedRing) else FullCache(1)
        (packed if meta["packed"] == "1" else plain).adopt(state.arrays(), state.tokens)
        each = [cache.sized(int(size)) for cache, size in zip((plain, packed), meta["bytes"].split(), strict=True)]
        return DelayedCache([Part(list(range(cache.rows)), cache) for cache in each], int(meta["stop"]))


def _layouts(layer: LayerInfo) -> tuple[Any, Any]:
    """Return what holds rows plain and packed."""
    return RotatingLayout() if layer.kind == "rotating" else FullLayout(), QuantizedLayout()


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `delayed`."""
    register(DelayedLayout())
