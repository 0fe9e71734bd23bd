"""Caches of a few layers beside a plain list of tokens per row: what is done to one is done to the other.

Every forward is checked token by token, and every complaint says what had been done until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.composition import BoundLayer, longest_append, stops_of
from oarlock.core.contracts.layout import BatchCache, Positions, RowState
from oarlock.core.testing.layouts.toys import PADDING, POISON, Toy, by_part, number

ROUNDING = {mx.float32: 2e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}
"""How far two ways to compute the same numbers may be apart."""


class Layers:
    """The layers of a toy model, each bound to a layout.

    ``tolerance``: how far what a layer gives may be from what exact storage gives. Where that is more than rounding
    explains, each row is compared with itself, stored alone, as well.
    """

    def __init__(self, bound: Sequence[BoundLayer], toys: Sequence[Toy], tolerance: float) -> None:
        self.bound, self.toys = bound, toys
        info = bound[0].info
        self.rounding = ROUNDING[info.dtype] if info.dtype in ROUNDING else ROUNDING[mx.float32]
        self.tolerance = max(tolerance, self.rounding)
        self.stops = stops_of(bound)
        self._alone: dict[tuple[tuple[int, ...], ...], list[np.ndarray]] = {}

    @property
    def lossy(self) -> bool:
        """Whether what is stored is more than rounding away from what was given."""
        return self.tolerance > self.rounding

    def longest(self, tokens: int, width: int) -> int:
        """Return ``width``, or less where a row of ``tokens`` comes to a length before that no forward goes past."""
        return longest_append(self.stops, tokens, width)

    def open(self, slots: int = 1, window: int = 1) -> Rows:
        """Return caches without rows; ``window`` is the widest forward that will be cut in the middle."""
        opened = [b.layout.open(b.info, b.options, slots=slots, window=window) for b in self.bound]
        return Rows(self, opened, [], [f"open(slots={slots}, window={window})"], window)

    def alone(self, pieces: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
        """Return what the last of ``pieces``, a row's tokens as they were forwarded, gives in caches of its own."""
        if pieces not in self._alone:
            rows = self.open()
            rows.add(1)
            for piece in pieces:
                seen = rows.forward([list(piece)])
                rows.commit([len(piece)])
                rows.pieces[0].append(piece)
            self._alone[pieces] = [layer[0] for layer in seen]
        return self._alone[pieces]


@attrs.define(eq=False)
class Rows:
    """``caches``, one a layer, and the ``pieces`` in which each row's tokens were forwarded. ``log``: what was done."""

    layers: Layers
    caches: list[BatchCache]
    pieces: list[list[tuple[int, ...]]]
    log: list[str]
    window: int = 1
    fresh: int = 0

    # --- tokens -------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.pieces)

    @property
    def lengths(self) -> list[int]:
        """Tokens per row."""
        return [sum(map(len, pieces)) for pieces in self.pieces]

    @property
    def cuts(self) -> bool:
        """Whether a row can keep a part of a window."""
        return all(cache.rewinds for cache in self.caches)

    def tokens(self, row: int) -> list[int]:
        """Return a row's tokens."""
        return [token for piece in self.pieces[row] for token in piece]

    def new(self, n: int) -> list[int]:
        """Return ``n`` fresh token ids: no two neighbours alike, none of the special ones."""
        self.fresh += n
        return [(11 * i + 3) % POISON for i in range(self.fresh - n, self.fresh)]

    # --- forwards -----------------------------------------------------------------------------------------

    def step(self, widths: Sequence[int], kept: Sequence[int] | None = None) -> None:
        """Forward ``widths`` fresh tokens, check what every real one saw, and keep ``kept`` (None: all).

        Where a layout has stops, a row gets no more tokens than to the next one.
        """
        asked, widths = widths, [self.layers.longest(*each) for each in zip(self.lengths, widths, strict=True)]
        kept = [min(n, width) for n, width in zip(asked if kept is None else kept, widths, strict=True)]
        new = [self.new(width) for width in widths]
        self.log.append(f"step({widths}, kept={kept})")
        self.check_seen(new, self.forward(new))
        self.commit(kept)
        for pieces, fresh, n in zip(self.pieces, new, kept, strict=True):
            if n:
                pieces.append(tuple(fresh[:n]))
        self.check_counts()

    def check(self) -> None:
        """Look at every row by a forward that is undone."""
        if self.count:
            self.step([1] * self.count, [0] * self.count)
        self.check_counts()

    def forward(self, new: Sequence[Sequence[int]], until: int | None = None) -> list[np.ndarray]:
        """Do what core and model do with a window, for the first ``until`` layers; return each layer's ``[B, N, F]``."""
        width = max(map(len, new), default=0)
        ids = np.array([[*fresh, *[PADDING] * (width - len(fresh))] for fresh in new], dtype=int).reshape(-1, width)
        self.begin([len(fresh) for fresh in new])
        if until == 0:
            return []
        each = list(zip(self.layers.toys, self.caches, strict=True))[:until]
        if hasattr(self.caches[0], "parts"):
            return [by_part(toy, cache, new, ids) for toy, cache in each]
        masks = [toy.mask(cache, width) for toy, cache in each]
        return [number(toy.forward(cache, ids, masks[0])) for toy, cache in each]

    def begin(self, widths: Sequence[int]) -> None:
        """Open a forward on every layer, with one `Positions` for all."""
        starts = Positions(self.lengths)
        for cache in self.caches:
            cache.begin(list(widths), starts)

    def commit(self, kept: Sequence[int]) -> None:
        """Close it."""
        for cache in self.caches:
            cache.commit(list(kept))

    def check_seen(self, new: Sequence[Sequence[int]], seen: Sequence[np.ndarray]) -> None:
        """Compare what each real token saw with what its row's own past gives, and with itself alone."""
        for layer, (toy, got) in enumerate(zip(self.layers.toys, seen, strict=True)):
            for row, fresh in enumerate(new):
                if not fresh:
                    continue
                mine = got[row, : len(fresh)]
                wanted = toy.expected([*self.tokens(row), *fresh], len(fresh))
                self._compare(mine, wanted, self.layers.tolerance, layer, row, "its own past gives")
                if self.layers.lossy:
                    wanted = self.layers.alone((*self.pieces[row], tuple(fresh)))[layer]
                    self._compare(mine, wanted, self.layers.rounding, layer, row, "it gives alone")

    def _compare(self, got: np.ndarray, wanted: np.ndarray, tolerance: float, layer: int, row: int, other: str) -> None:
        off = np.abs(got - wanted)
        off[np.isnan(got) & np.isnan(wanted)] = 0
        bad = ~(off <= tolerance * (1 + np.abs(wanted)))
        if bad.any():
            at = int(bad.any(axis=-1).argmax())
            self.fail(
                f"layer {layer}, row {row}, token {at} of the window: off by {off[at].max():.3g} from what {other} "
                f"(at most {tolerance:g})"
            )

    def check_counts(self) -> None:
        """Compare the counts of every cache with the lists."""
        for layer, cache in enumerate(self.caches):
            if cache.rows != self.count:
                self.fail(f"layer {layer} holds {cache.rows} rows, not {self.count}")
            if tuple(cache.tokens) != tuple(self.lengths):
                self.fail(f"layer {layer} counts {tuple(cache.tokens)} tokens, not {tuple(self.lengths)}")

    def require(self, holds: bool, complaint: str) -> None:
        """Fail with ``complaint`` unless it holds."""
        if not holds:
            self.fail(complaint)

    def fail(self, complaint: str) -> None:
        """Raise AssertionError with the complaint and what was done until then."""
        msg = f"{complaint}; after {', '.join(self.log)}"
        raise AssertionError(msg)

    # --- rows ---------------------------------------------------------------------------------------------

    def add(self, n: int) -> None:
        """Append empty rows."""
        self.log.append(f"add({n})")
        for cache in self.caches:
            cache.add(n)
        self.pieces += [[] for _ in range(n)]

    def join(self, other: Rows) -> None:
        """Put copies of the other's rows behind these."""
        self.log.append(f"join(rows of {other.lengths})")
        for cache, theirs in zip(self.caches, other.caches, strict=True):
            cache.join(theirs, list(range(self.count, self.count + other.count)))
        self.pieces += [list(pieces) for pieces in other.pieces]

    def enter(self, *lengths: int, pieces: int = 1, window: int = 1) -> None:
        """Let rows of these lengths join that were prefilled alone, in ``pieces`` forwards each.

        Prompts are not cut, so their caches are opened with another ``window``, as in an engine.
        """
        for length in lengths:
            alone = self.layers.open(window=window)
            alone.fresh = self.fresh
            alone.add(1)
            while (left := length - alone.lengths[0]) > 0:
                alone.step([min(left, -(-length // pieces))])
            self.fresh = alone.fresh
            self.join(alone)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep rows in this order."""
        self.log.append(f"keep({list(indices)})")
        for cache in self.caches:
            cache.keep(list(indices))
        self.pieces = [self.pieces[i] for i in indices]

    def take(self, indices: Sequence[int]) -> Rows:
        """Return rows as caches of their own."""
        self.log.append(f"take({list(indices)})")
        taken = [cache.take(list(indices)) for cache in self.caches]
        return self._others(taken, [list(self.pieces[i]) for i in indices])

    def states(self, row: int) -> list[RowState]:
        """Extract a row from every layer."""
        self.log.append(f"extract({row})")
        return [cache.extract(row) for cache in self.caches]

    def restored(self, states: Sequence[RowState], pieces: Sequence[tuple[int, ...]]) -> Rows:
        """Return a row made of what was extracted when its tokens were ``pieces``."""
        self.log.append("restore")
        caches = [bound.layout.restore(state) for bound, state in zip(self.layers.bound, states, strict=True)]
        return self._others(caches, [list(pieces)])

    def reusable(self, tokens: int) -> bool:
        """Say whether every layer can be cut to so few."""
        return all(cache.reusable(tokens) == tokens > 0 for cache in self.caches)

    def cut(self, tokens: int) -> None:
        """Let every row go back to its first ``tokens``."""
        self.log.append(f"cut({tokens})")
        for cache in self.caches:
            cache.cut(tokens)
        self.pieces = [_first(pieces, tokens) for pieces in self.pieces]
        self.check_counts()

    def compact(self) -> None:
        """Compact every layer."""
        self.log.append("compact()")
        for cache in self.caches:
            cache.compact()

    def abort(self, width: int, until: int | None = None) -> None:
        """Forward up to ``width`` tokens of every row through the first ``until`` layers (None: all), and undo it."""
        new = [self.new(self.layers.longest(length, width)) for length in self.lengths]
        self.log.append(f"abort({[len(fresh) for fresh in new]}, layers done: {'all' if until is None else until})")
        self.forward(new, until)
        self.commit([0] * self.count)

    def poison(self, row: int) -> None:
        """Let a row's last token be one of numbers that are none; the others have none in this forward."""
        self.log.append(f"poison({row})")
        new = [[POISON] if i == row else [] for i in range(self.count)]
        self.forward(new)
        self.commit([len(fresh) for fresh in new])
        self.pieces[row].append((POISON,))

    def evaluate(self) -> None:
        """Evaluate what must be at a boundary."""
        mx.eval([array for cache in self.caches for array in cache.arrays()])

    def _others(self, caches: list[BatchCache], pieces: list[list[tuple[int, ...]]]) -> Rows:
        return Rows(self.layers, caches, pieces, [*self.log, "then of it:"], self.window, self.fresh)


def _first(pieces: Sequence[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:
    """Return the first ``tokens`` of a row in the pieces that they came in."""
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    return [piece[: tokens - start] for start, piece in zip(starts, pieces, strict=True) if start < tokens]


def through_file(state: RowState, folder: Path) -> RowState:
    """Write a state as safetensors and read it back: what a disk or another process would give."""
    path = str(folder / "state.safetensors")
    mx.save_safetensors(path, state.arrays(), state.meta())
    arrays, meta = cast(Any, mx.load(path, return_metadata=True))
    mx.eval(arrays)  # read now, before the file is another's
    return RowState(layout=state.layout, tokens=state.tokens, arrays=arrays, meta=meta)
