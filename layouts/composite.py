"""Several caches in one layer, each with a layout of its own. It stores nothing: its parts do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions, RowState
from oarlock.layouts.joins import check_cut

OARLOCK_API = 1


@attrs.frozen
class CompositeOptions:
    """`composite` has no options; its parts are configured by kind, or by path ("3.1")."""


class CompositeCache:
    """The caches of one layer, which models reach by index; all of them hold the same rows."""

    def __init__(self, parts: Sequence[BatchCache]) -> None:
        self.caches = tuple(parts)
        self.rewinds = all(part.rewinds for part in self.caches)

    # --- what models see ------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> BatchCache:
        return self.caches[index]

    def __iter__(self) -> Iterator[BatchCache]:
        return iter(self.caches)

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward in every part."""
        for part in self.caches:
            part.begin(widths, starts)

    def commit(self, kept: Sequence[int]) -> None:
        """Close it in every part."""
        for part in self.caches:
            part.commit(kept)

    # --- rows -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held."""
        return self.caches[0].rows

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens per row."""
        return self.caches[0].tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.caches)

    @property
    def live_bytes(self) -> int:
        """Bytes that the rows' tokens need in all parts."""
        return sum(part.live_bytes for part in self.caches)

    def arrays(self) -> list[mx.array]:
        """Return the arrays of all parts."""
        return [array for part in self.caches for array in part.arrays()]

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return what all parts come to."""
        return sum(part.projected(tokens, exact=exact) for part in self.caches)

    def reserve(self, tokens: Sequence[int]) -> None:
        """Make room in every part; the first refuses before any has changed."""
        for part in self.caches:
            part.reserve(tokens)

    def compact(self) -> None:
        """Compact every part."""
        for part in self.caches:
            part.compact()

    def add(self, n: int) -> None:
        """Append empty rows to every part."""
        for part in self.caches:
            part.add(n)

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Join part by part; where one refuses, those before it drop the rows again."""
        if not isinstance(other, CompositeCache) or len(other.caches) != len(self.caches):
            msg = f"a composite of {len(self.caches)} caches cannot take rows of {type(other).__name__}"
            raise TypeError(msg)
        rows, done = range(self.rows), []
        try:
            for part, theirs in zip(self.caches, other.caches, strict=True):
                part.join(theirs, slots)
                done.append(part)
        except Exception:
            for part in done:
                part.keep(rows)
            raise

    def take(self, indices: Sequence[int]) -> CompositeCache:
        """Return rows ``indices`` as a composite of their own: this very one when it is all of them."""
        if list(indices) == list(range(self.rows)):
            return self
        return CompositeCache([part.take(indices) for part in self.caches])

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i in every part."""
        for part in self.caches:
            part.keep(indices)

    def extract(self, row: int) -> RowState:
        """Return the row's states of all parts in one, their names prefixed with the part's number."""
        states = [part.extract(row) for part in self.caches]
        arrays = {f"{i}.{name}": array for i, state in enumerate(states) for name, array in state.arrays().items()}
        meta = {f"{i}.{name}": text for i, state in enumerate(states) for name, text in state.meta().items()}
        meta |= {f"{i}.layout": state.layout for i, state in enumerate(states)}
        return RowState(layout="composite", tokens=self.tokens[row], arrays=arrays, meta=meta)

    def reusable(self, tokens: int) -> int:
        """Return the longest prefix, at most ``tokens``, that every part can reuse."""
        for part in self.caches:
            tokens = part.reusable(tokens)
        return tokens if all(part.reusable(tokens) == tokens for part in self.caches) else 0

    def cut(self, tokens: int) -> None:
        """Cut every part, or none."""
        check_cut(tokens, self.reusable(tokens), self.tokens)
        for part in self.caches:
            part.cut(tokens)

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns of every part."""
        return tuple(part.columns(widths) for part in self.caches)


@attrs.frozen
class CompositeLayout:
    """Registers as ``composite``. What is registered has no parts; bind composes one of a layer's own parts."""

    parts: tuple[BoundLayer, ...] = ()
    name: str = "composite"
    kinds: frozenset[str] = frozenset({"composite"})
    options: type = CompositeOptions

    def compose(self, parts: Sequence[BoundLayer]) -> CompositeLayout:
        """Return the layout of one layer, whose parts are held as ``parts`` says."""
        return attrs.evolve(self, parts=tuple(parts))

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return None: each part was asked for itself."""
        return None

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> CompositeCache:
        """Open every part."""
        return CompositeCache(
            [part.layout.open(part.info, part.options, slots=slots, window=window) for part in self.parts]
        )

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row in all parts."""
        return sum(part.layout.bytes_at(part.info, part.options, tokens) for part in self.parts)

    def restore(self, state: RowState) -> CompositeCache:
        """Restore every part by its own layout. Raises ValueError where the state was stored by other layouts."""
        arrays, meta = state.arrays(), state.meta()
        caches = []
        for i, part in enumerate(self.parts):
            stored = meta.get(f"{i}.layout")
            if stored != part.layout.name:
                msg = f"part {part.info.path} is held by {part.layout.name!r}, the state was stored by {stored!r}"
                raise ValueError(msg)
            inner = RowState(
                layout=stored, tokens=state.tokens, arrays=_below(arrays, i), meta=_below(meta, i, "layout")
            )
            caches.append(part.layout.restore(inner))
        return CompositeCache(caches)


def _below(named: dict[str, Any], index: int, *without: str) -> dict[str, Any]:
    """Return the entries of part ``index`` under their own names."""
    head = f"{index}."
    inner = {name.removeprefix(head): value for name, value in named.items() if name.startswith(head)}
    return {name: value for name, value in inner.items() if name not in without}


@hookimpl
def register_layouts(register: Callable[[object], None]) -> None:
    """Register `composite`."""
    register(CompositeLayout())
