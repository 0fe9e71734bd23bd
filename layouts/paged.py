"""Full attention in blocks: rows take blocks from one pool a model, and rows that share a prefix share its blocks.

It moves rows by name only: a join, a leave, a stored row and a rollback touch counts, never keys or values. Where
blocks lie is `blocks`' business, how they are read `pages`'. `docs/decisions/paged-reads.md` says what was measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState
from oarlock.layouts.blocks import Blocks, Share
from oarlock.layouts.joins import check_cut, check_room, check_slots
from oarlock.layouts.library import Library
from oarlock.layouts.masks import shared_mask
from oarlock.layouts.pages import PagedOptions, PagedState, Pages, attends, bytes_of, format_of
from oarlock.layouts.planes import NamedPlanes, Planes
from oarlock.layouts.reads import RowReads
from oarlock.layouts.tables import Plan, Table, continued

OARLOCK_API = 1


class PagedCache(NamedPlanes):
    """One layer of a group of rows. The table is shared with the other layers, the pages with other groups."""

    rewinds = True

    def __init__(self, pages: Pages, table: Table) -> None:
        """Hold the rows of ``table``."""
        self._pages, self._blocks = pages, pages.blocks
        self._table = table
        self._plan: Plan | None = None
        self._copied: Planes = {}
        self._written = 0

    # --- what models see ------------------------------------------------------------------------------

    @property
    def planes(self) -> Planes:  # type: ignore[override]
        """The planes of the layer's blocks ``[1, H, blocks * size, D]``, where they belong by now."""
        self._pages.follow()
        return self._pages.planes

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next token: one integer where all rows agree, else int32 ``[B]``."""
        return self._starts.moved(self._written)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask of the coming forward; models ask before the append."""
        return shared_mask(self._opened.starts, N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``[B, H, N, D]``, each row into its own blocks, and return columns 0 to max(starts) + N - 1."""
        plan = self._opened
        if keys.shape[0] != len(plan.rows) or keys.shape[2] != plan.width:
            msg = f"got shape {keys.shape} for {len(plan.rows)} rows and a window of {plan.width}"
            raise ValueError(msg)
        copied, self._copied = self._copied, {}
        self._pages.write(plan, keys, values, copied)
        self._written = plan.width
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last append returned: a view, a handle that attends row by row, or a copy."""
        plan, pages = self._opened, self._pages
        if spacing := plan.spacing():
            return pages.handed(pages.view(plan, *spacing))
        if pages.attends:
            return RowReads(pages, plan, "keys"), RowReads(pages, plan, "values")
        return pages.handed(pages.gathered(plan))

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward: blocks for the coming tokens, once for all layers; this layer's shared ones are copied."""
        table = self._table
        if len(widths) != self.rows or starts != table.tokens:
            msg = f"begin got {len(widths)} widths and {list(starts)} for {self.rows} rows at {list(self.tokens)}"
            raise ValueError(msg)
        key = ("begin", weakref.ref(table), tuple(widths))
        plan = self._blocks.together(self._pages.number, key, lambda: Plan(self._blocks, table, widths, starts))
        self._plan, self._written = plan, 0
        self._copied = self._pages.blocks_of(plan.copies()[0]) if plan.copied else {}

    def commit(self, kept: Sequence[int]) -> None:
        """Keep ``kept[i]`` tokens of row i; blocks behind them are free again."""
        plan, self._plan, self._copied, self._written = self._plan, None, {}, 0
        if not any(kept):
            return
        if plan is None:
            msg = f"commit got {list(kept)} without a forward"
            raise ValueError(msg)
        key = ("commit", weakref.ref(plan), tuple(kept))
        self._table = self._blocks.together(self._pages.number, key, lambda: plan.committed(kept))

    # --- rows -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held."""
        return len(self._table.rows)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens per row."""
        return self._table.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the pool; of a pool that others use too, the share of it that these rows' blocks are.

        The rest are other caches' and stored rows', each with its part of the blocks that nobody owns.
        """
        total, used = self._pages.nbytes, self._blocks.used
        return total * self._table.held() // used if used else total

    @property
    def live_bytes(self) -> int:
        """Bytes of the rows' blocks; what two rows share counts once."""
        return self._pages.block_bytes * self._table.held()

    def arrays(self) -> list[mx.array]:
        """Return the pages, once they exist."""
        return list(self.planes.values())

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return the bytes of the rows' blocks, at most with what the pool grows by for them, or has spare for them.

        What caches of one pool project adds up to no less than the pool will have, without what stored rows alone own.
        What these rows share now counts once. ``exact`` is `nbytes` after `reserve` while nobody else uses the pool.
        """
        blocks, used = self._blocks, self._blocks.used
        needed = self._table.needed(blocks, tokens)
        have = -(-blocks.capacity * self._table.held() // used) if used else blocks.capacity
        return self._pages.block_bytes * (needed if exact else max(have, blocks.grown(needed)))

    def reserve(self, tokens: Sequence[int]) -> None:
        """Fit the pool to the rows' blocks and to what others own; what others reserved beyond that is given back."""
        check_room(tokens, self.tokens)
        table = self._table
        self._blocks.fit(self._blocks.used + table.needed(self._blocks, tokens) - table.held(), table.rows)
        mx.eval(self.arrays())

    def compact(self) -> None:
        """Give back all blocks that nobody owns."""
        self.reserve(self.tokens)

    def add(self, n: int) -> None:
        """Append ``n`` empty rows."""
        self._become(lambda table: table.added(self._blocks, n), "add", n)

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Share the blocks of ``other``'s rows, or copy them from another pool. Nothing changes when it raises."""
        if not isinstance(other, PagedCache):
            msg = f"a paged cache cannot take rows of {type(other).__name__}"
            raise TypeError(msg)
        check_slots(slots, self.rows, other.rows)
        table, theirs = self._table, other._table
        if other._pages is self._pages:
            self._become(lambda table: table.joined(theirs), "join", weakref.ref(theirs))
            return
        self._pages.check_format(other._pages.format)
        rows = [other._pages.row(*row) if row[1] else {} for row in zip(theirs.rows, theirs.tokens, strict=True)]
        for row in rows:
            if row:
                self._pages.check(row)
        self._become(lambda table: table.filled(self._blocks, theirs.tokens), "fill", theirs.tokens)
        for row, share in zip(rows, self._table.rows[len(table.rows) :], strict=True):
            if row:
                self._pages.put(share, 0, row)

    def take(self, indices: Sequence[int]) -> PagedCache:
        """Return rows ``indices`` as a cache of their own on the same blocks: this very one when it is all of them."""
        table, wanted = self._table, tuple(indices)
        if wanted == tuple(range(self.rows)):
            return self
        key = ("take", weakref.ref(table), wanted)
        return PagedCache(self._pages, self._blocks.together(self._pages.number, key, lambda: table.taken(wanted)))

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i; the blocks of the others are free at once."""
        wanted = tuple(indices)
        self._become(lambda table: table.kept(wanted), "keep", wanted)

    def extract(self, row: int) -> RowState:
        """Return a counted share of a row's full blocks, and a dispatched copy of the tokens behind them."""
        own, tokens = self._table.rows[row], self._table.tokens[row]
        blocks, full = self._blocks, tokens // self._blocks.size
        key = ("extract", weakref.ref(own), full)
        share = blocks.together(self._pages.number, key, lambda: Share(blocks, own.ids[:full], grows=False))
        held: dict[str, Any] = {"pages": self._pages, "share": share, "tail": self._pages.tail(own, tokens)}
        return PagedState(layout="paged", tokens=tokens, arrays={}, meta=self._pages.meta(), **held)

    def reusable(self, tokens: int) -> int:
        """Return ``tokens``: any prefix of full attention is one."""
        return min(tokens, min(self.tokens, default=0))

    def cut(self, tokens: int) -> None:
        """Let rows go back to their first ``tokens``; blocks behind them are free again."""
        check_cut(tokens, self.reusable(tokens), self.tokens)
        self._become(lambda table: table.cut(self._blocks, tokens), "cut", tokens)

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns read: token t in column t, as far as the longest row reaches."""
        return ("left", self._starts.longest + max(widths, default=0))

    @property
    def _starts(self) -> Positions:
        return self._plan.starts if self._plan is not None else self._table.starts

    @property
    def _opened(self) -> Plan:
        if self._plan is None:
            msg = "the cache was asked without a forward; call begin first"
            raise ValueError(msg)
        return self._plan

    def _become(self, make: Callable[[Table], Table], *key: Hashable) -> None:
        """Have the table that ``make`` makes of this one: once for all layers that ask by the same ``key``."""
        table = self._table
        self._plan, self._copied, self._written = None, {}, 0
        self._table = self._blocks.together(self._pages.number, (*key, weakref.ref(table)), lambda: make(table))


class PagedLayout:
    """Registers as ``paged``; holds unbounded attention layers of any geometry, packed those whose heads fit the group.

    Caches that are opened for one bound layer share its pages, and all layers of an engine share their blocks, for as
    long as a cache or a stored row lives.
    """

    name = "paged"
    kinds = frozenset({"full"})
    options = PagedOptions

    def __init__(self) -> None:
        """Know no layer."""
        self._library = Library()
        self._bound: dict[str, tuple[LayerInfo, PagedOptions]] = {}

    def refuses(self, layer: LayerInfo, options: PagedOptions) -> str | None:
        """Return why attention row by row cannot be had, or which head size cannot be packed, or None."""
        self._bound[layer.path] = (layer, options)
        if options.reads == "rows" and not layer.attendable:
            return "reads = 'rows' needs a layer whose attention gets what its cache returns; say 'auto' or 'gather'"
        return options.format.refuses(layer) if options.format is not None else None

    def attends(self, layer: LayerInfo, options: PagedOptions) -> bool:
        """Return whether attention takes handles: on rows that no view covers, and wherever blocks are packed."""
        return attends(layer, options) or (options.format is not None and layer.attendable)

    def open(self, layer: LayerInfo, options: PagedOptions | None, *, slots: int, window: int) -> PagedCache:
        """Return a cache without rows; it reserves nothing, and any window can be rolled back."""
        pages = self._library.pages(layer, options or PagedOptions())
        return PagedCache(pages, pages.blocks.together(pages.number, ("open",), Table))

    def bytes_at(self, layer: LayerInfo, options: PagedOptions | None, tokens: int) -> int:
        """Return the bytes of the blocks of one row at ``tokens``."""
        size = (options := options or PagedOptions()).block_size
        return bytes_of(layer, options.format) * (-(-tokens // size) * size)

    def restore(self, state: RowState) -> PagedCache:
        """Return a one-row cache on the state's own blocks, or on new ones where it holds arrays.

        Raises ValueError where the layer's blocks store numbers in another format.
        """
        if isinstance(state, PagedState):
            pages, share = state.pages, state.share
            key: tuple[Any, ...] = ("restore", weakref.ref(share), state.tokens)
            table = pages.blocks.together(pages.number, key, lambda: continued(pages.blocks, share, state.tokens))
            if state.tail:
                pages.put(table.rows[0], state.tokens // pages.blocks.size * pages.blocks.size, state.tail)
            return PagedCache(pages, table)
        meta, arrays = state.meta(), state.arrays()
        bound = self._bound.get(meta.get("path", ""))
        if bound is not None:
            pages = self._library.pages(*bound)
            pages.check_format(format_of(meta))
        else:
            layer = LayerInfo(index=0, path="", kind="full")
            blocks = Blocks(int(meta.get("block_size", PagedOptions().block_size)))
            pages = Pages(layer, blocks, format_of(meta), attends=False)
        key = ("restore", state.tokens)
        table = pages.blocks.together(pages.number, key, lambda: Table().filled(pages.blocks, [state.tokens]))
        if arrays:
            pages.put(table.rows[0], 0, arrays)
        return PagedCache(pages, table)


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `paged`."""
    register(PagedLayout())
