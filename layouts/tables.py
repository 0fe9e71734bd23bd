"""Which blocks hold which row, before, in and after a forward. It moves no data; all layers of a model share it.

A table never changes: what begins, commits, joins or leaves makes another one, so a forward that is aborted needs
nothing undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.blocks import Arrangement, Blocks, Ids, Share, first_of

NONE = np.zeros(0, np.int32)


@attrs.frozen
class Table:
    """The rows of a group: blocks and tokens of each. Row i owns ``ceil(tokens[i] / size)`` blocks."""

    rows: tuple[Share, ...] = ()
    tokens: tuple[int, ...] = ()
    starts: Positions = attrs.field(init=False, eq=False)

    @starts.default
    def _starts(self) -> Positions:
        return Positions(self.tokens)

    def held(self) -> int:
        """Return how many blocks the rows hold; what two of them share counts once."""
        ids = [share.ids for share in self.rows]
        return int(np.unique(np.concatenate(ids)).size) if ids else 0

    def needed(self, blocks: Blocks, tokens: Sequence[int]) -> int:
        """Return how many blocks rows of ``tokens`` will hold: what they share stays so, but for where one writes."""
        each = zip(self.rows, self.tokens, tokens, strict=False)
        copied = [n < more and n % blocks.size > 0 and blocks.counts[row.ids[-1]] > 1 for row, n, more in each]
        shared = sum(row.ids.size for row in self.rows) - self.held()
        return sum(_blocks_for(n, blocks.size) for n in tokens) - shared + sum(map(int, copied))

    def added(self, blocks: Blocks, n: int) -> Table:
        """Return the table with ``n`` empty rows behind."""
        return Table((*self.rows, *(Share(blocks, NONE) for _ in range(n))), (*self.tokens, *([0] * n)))

    def kept(self, indices: Sequence[int]) -> Table:
        """Return rows ``indices`` in that order: the same owners."""
        return Table(tuple(self.rows[i] for i in indices), tuple(self.tokens[i] for i in indices))

    def taken(self, indices: Sequence[int]) -> Table:
        """Return rows ``indices`` with owners of their own."""
        return Table(tuple(self.rows[i].again() for i in indices), tuple(self.tokens[i] for i in indices))

    def cut(self, blocks: Blocks, tokens: int) -> Table:
        """Return the rows with their first ``tokens``."""
        full = _blocks_for(tokens, blocks.size)
        return Table(tuple(Share(blocks, row.ids[:full]) for row in self.rows), (tokens,) * len(self.rows))

    def joined(self, other: Table) -> Table:
        """Return the table with the rows of ``other`` behind, sharing their blocks."""
        return Table((*self.rows, *(share.again() for share in other.rows)), (*self.tokens, *other.tokens))

    def filled(self, blocks: Blocks, tokens: Sequence[int]) -> Table:
        """Return the table with rows of ``tokens`` behind, in blocks of their own that are still to be written."""
        before = self.added(blocks, len(tokens))
        wants = [0] * len(self.rows) + [_blocks_for(n, blocks.size) for n in tokens]
        blocks.reserve(before.rows, wants)
        rows = list(before.rows)
        for i, want in enumerate(wants):
            if want:
                rows[i] = Share(blocks, blocks.allocate(rows[i].end, want))
        return Table(tuple(rows), (*self.tokens, *tokens))


def continued(blocks: Blocks, stored: Share, tokens: int) -> Table:
    """Return a row on the full blocks of a stored one; its last block, where not full, is new and still to be written."""
    ids = stored.ids
    if _blocks_for(tokens, blocks.size) > ids.size:
        blocks.reserve((), (), 1)
        ids = stored.ids
        ids = np.concatenate((ids, blocks.allocate(int(ids[-1]) + 1 if ids.size else -1, 1)))
    return Table((Share(blocks, ids),), (tokens,))


@attrs.frozen
class Prefix:
    """A beginning that rows have in common, side by side: ``blocks`` from ``first`` on.

    ``rests``: per row, the first of the blocks behind it where those lie side by side, else None.
    """

    rows: tuple[int, ...]
    first: int
    blocks: int
    rests: dict[int, int | None]


class Plan:
    """One forward: the blocks that each row has in it, and where its tokens go, on every layer alike."""

    def __init__(self, blocks: Blocks, before: Table, widths: Sequence[int], starts: Positions) -> None:
        """Give every row blocks for its coming tokens that nobody else owns."""
        blocks.settle()
        self.blocks, self.before, self.starts = blocks, before, starts
        self.widths = tuple(widths)
        self.width = max(self.widths, default=0)
        self.padded = any(width != self.width for width in self.widths)
        self.copied: list[int] = []
        """Rows that write into a block with more than one owner: it is copied first."""
        self.opened: list[int] = []
        """Rows whose last block is new: what it held before is still there."""
        self.rows = self._grown()
        self._arrangement: Arrangement | None = None
        self._arrays: dict[str, Any] = {}
        blocks.note(self._apart())

    def _grown(self) -> tuple[Share, ...]:
        blocks, size = self.blocks, self.blocks.size
        rows, wants = list(self.before.rows), []
        for row, (share, start, width) in enumerate(zip(rows, self.starts, self.widths, strict=True)):
            ids = share.ids
            wants.append(max(0, _blocks_for(start + width, size) - ids.size))
            if width and start % size and blocks.counts[ids[start // size]] > 1:
                self.copied.append(row)
        if self.copied or any(wants):
            blocks.reserve(rows, wants, len(self.copied))
        for row in sorted({*self.copied, *(row for row, want in enumerate(wants) if want)}):
            ids = rows[row].ids
            if row in self.copied:
                ids = ids[:-1]
                own = blocks.allocate(int(ids[-1]) + 1 if ids.size else -1, 1 + wants[row])
            else:
                own = blocks.allocate(rows[row].end, wants[row])
            rows[row] = Share(blocks, np.concatenate((ids, own)))
            self.opened.append(row)
        return tuple(rows)

    def committed(self, kept: Sequence[int]) -> Table:
        """Return the rows with ``kept[i]`` of row i's tokens; blocks behind them are given back."""
        size, rows, tokens = self.blocks.size, list(self.rows), []
        for row, (start, n) in enumerate(zip(self.starts, kept, strict=True)):
            tokens.append(start + n)
            ids = rows[row].ids
            if (needed := _blocks_for(start + n, size)) < ids.size:
                rows[row] = Share(self.blocks, ids[:needed])
        return Table(tuple(rows), tuple(tokens))

    # --- where, as index arrays ---------------------------------------------------------------------------

    def slots(self) -> slice | mx.array:
        """Return where the real tokens go, row by row: columns of a plane."""
        return self._once("slots", lambda: as_index(self._slots()))  # type: ignore[no-any-return]

    def source(self) -> mx.array | None:
        """Return which tokens of the flattened window are real, or None where all are."""

        def make() -> mx.array:
            starts = (row * self.width + np.arange(width) for row, width in enumerate(self.widths))
            return mx.array(np.concatenate(list(starts)).astype(np.int32))

        return self._once("source", make) if self.padded else None

    def stale(self) -> slice | mx.array | None:
        """Return the columns behind the tokens in blocks that are new to their row, or None."""

        def make() -> slice | mx.array | None:
            size, columns = self.blocks.size, []
            for row in self.opened:
                behind = (self.starts[row] + self.widths[row]) % size
                if behind:
                    columns.append(self.rows[row].ids[-1] * size + np.arange(behind, size, dtype=np.int32))
            return as_index(np.concatenate(columns)) if columns else None

        return self._once("stale", make) if self.opened else None

    def copies(self) -> tuple[mx.array, mx.array]:
        """Return the blocks to copy, and where to: [copies] and [copies * size] columns."""
        size = self.blocks.size
        at = [self.starts[row] // size for row in self.copied]
        sources = np.array([self.before.rows[row].ids[i] for row, i in zip(self.copied, at, strict=True)], np.int32)
        targets = np.array([self.rows[row].ids[i] for row, i in zip(self.copied, at, strict=True)], np.int32)
        return mx.array(sources), mx.array((targets[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1))

    def grid(self) -> mx.array:
        """Return the blocks of all rows [rows * most], short rows filled up with a block of their own."""

        def make() -> mx.array:
            most = max(share.ids.size for share in self.rows)
            most = max(most, _blocks_for(self.starts.longest + self.width, self.blocks.size))
            grid = np.zeros((len(self.rows), most), np.int32)
            for line, share in zip(grid, self.rows, strict=True):
                if (ids := share.ids).size:
                    line[: ids.size], line[ids.size :] = ids, ids[-1]
            return mx.array(grid.reshape(-1))

        return self._once("grid", make)  # type: ignore[no-any-return]

    def row(self, row: int, skipped: int = 0) -> mx.array:
        """Return the blocks of one row, from block ``skipped`` on."""
        return self._once(f"row {row} {skipped}", lambda: mx.array(self.rows[row].ids[skipped:]))  # type: ignore[no-any-return]

    def prefixes(self) -> list[Prefix]:
        """Return what rows with tokens in this forward have in common with others. Nobody writes there: it is full."""
        return self._once("prefixes", lambda: list(self._prefixes()))  # type: ignore[no-any-return]

    def spacing(self) -> tuple[int, int] | None:
        """Return (first, step) where rows of one length lie at equal distances, each side by side: no copy to read."""
        return self._once("spacing", self._spacing)  # type: ignore[no-any-return]

    def _apart(self) -> int:
        """Return how many blocks are gathered to be read: of rows not side by side, without what is read for several."""
        apart = {row: share.ids.size for row, share in enumerate(self.rows) if share.first is None}
        for prefix in self.prefixes() if apart else ():
            for row, rest in prefix.rests.items():
                apart[row] = self.rows[row].ids.size - prefix.blocks if rest is None else 0
        return sum(apart.values())

    def _slots(self) -> Ids:
        size = self.blocks.size
        if self.width == 1 and not self.padded:
            at = [
                int(share.ids[start // size]) * size + start % size
                for share, start in zip(self.rows, self.starts, strict=True)
            ]
            return np.array(at, np.int32)
        columns = []
        for share, start, width in zip(self.rows, self.starts, self.widths, strict=True):
            columns.append(columns_of(share.ids, start, start + width, size))
        return np.concatenate(columns)

    def _prefixes(self) -> Iterator[Prefix]:
        alike: dict[int, list[int]] = {}
        for row, (share, start) in enumerate(zip(self.rows, self.starts, strict=True)):
            if self.widths[row] and start >= self.blocks.size:
                alike.setdefault(int(share.ids[0]), []).append(row)
        for first, rows in alike.items():
            most = min(self.starts[row] for row in rows) // self.blocks.size
            lines = np.stack([self.rows[row].ids[:most] for row in rows])
            parted = np.flatnonzero((lines != first + np.arange(most)).any(axis=0))
            if len(rows) > 1:
                common = int(parted[0]) if parted.size else most
                rests = {row: first_of(self.rows[row].ids[common:]) for row in rows}
                yield Prefix(tuple(rows), first, common, rests)

    def _spacing(self) -> tuple[int, int] | None:
        if self.padded or not self.starts.equal:
            return None
        firsts = [share.first for share in self.rows]
        first, size = firsts[0], self.rows[0].ids.size
        if first is None:
            return None
        if len(firsts) == 1:
            return first, size
        step = (firsts[1] or 0) - first
        if step < size or any(at != first + i * step for i, at in enumerate(firsts)):
            return None
        return (first, step) if first + len(firsts) * step <= self.blocks.capacity else None

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """Make an array once a forward, not once a layer; anew where blocks were renumbered since."""
        if self._arrangement is not self.blocks.arrangement:
            self._arrangement = self.blocks.arrangement
            self._arrays.clear()
        if name not in self._arrays:
            self._arrays[name] = make()
        return self._arrays[name]


def columns_of(ids: Ids, start: int, stop: int, size: int) -> Ids:
    """Return the columns of tokens ``start`` to ``stop`` of a row with blocks ``ids``."""
    at = np.arange(start, stop, dtype=np.int32)
    return ids[at // size] * size + at % size


def as_index(columns: Ids) -> slice | mx.array:
    """Return neighbouring columns as a slice, others as an array."""
    if columns.size and (columns.size == 1 or bool((np.diff(columns) == 1).all())):
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return mx.array(columns)


def _blocks_for(tokens: int, size: int) -> int:
    return -(-tokens // size)
