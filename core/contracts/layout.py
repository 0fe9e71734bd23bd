"""Cache layouts: how a layer keeps its past. The core decides which rows exist; a layout only stores them.

Shapes: B rows, H key/value heads, N tokens of one forward, S columns that attention reads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import attrs

if TYPE_CHECKING:
    import mlx.core as mx

T = TypeVar("T")
KINDS = ("full", "rotating", "recurrent", "chunked", "composite")
"""Layer kinds: unbounded attention, sliding window, recurrent state, chunked attention, several caches in one."""


@attrs.frozen(kw_only=True)
class LayerInfo:
    """One layer of a model, as read at bind.

    ``path`` is "7", or "7.1" for part 1 of a composite. ``kind`` is one of `KINDS`, or the class name of a cache that
    no kind describes. ``window`` and ``keep`` belong to rotating layers (``keep`` first tokens are never evicted),
    ``chunk`` to chunked ones, ``slots`` (arrays that the layer keeps) and ``state_bytes`` (their bytes, one row) to
    recurrent ones. Geometry is 0 where the traced forward did not show it. ``attendable``: attention receives, by
    identity, what this layer's fetch returned.
    """

    index: int
    path: str
    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: Any = None
    window: int = 0
    keep: int = 0
    chunk: int = 0
    slots: int = 0
    state_bytes: int = 0
    attendable: bool = False
    parts: tuple[LayerInfo, ...] = ()


class Positions(tuple[int, ...]):
    """Per-row token counts before a forward, with the device arrays that all layers of the step share.

    One object serves every layer of one forward, so each array is made once, not once a layer.
    """

    equal: bool
    """True where all rows stand at one position: the serial graph applies."""
    longest: int
    """The largest count, 0 without rows."""
    _array: Any
    _shared: dict[Hashable, Any]

    def __new__(cls, counts: Iterable[int]) -> Positions:
        """Freeze ``counts`` (host integers, one a row)."""
        self = super().__new__(cls, counts)
        self.longest = max(self, default=0)
        self.equal = not self or min(self) == self.longest
        self._array = None
        self._shared = {}
        return self

    @property
    def array(self) -> mx.array:
        """The counts as int32 ``[B]``."""
        if self._array is None:
            import mlx.core as mx

            self._array = mx.array(list(self), dtype=mx.int32)
        array: mx.array = self._array
        return array

    def columns(self, width: int) -> mx.array:
        """Return int32 ``[B, width]``: where each of the next ``width`` tokens of each row is written."""

        def make() -> mx.array:
            import mlx.core as mx

            return self.array[:, None] + mx.arange(width, dtype=mx.int32)[None]

        return self.shared(("columns", width), make)

    def moved(self, written: int) -> int | mx.array:
        """Return where rows stand ``written`` tokens on: one integer where all agree, else int32 ``[B]``."""
        if self.equal:
            return self.longest + written
        return self.array + written if written else self.array

    def pick(self, rows: Sequence[int]) -> Positions:
        """Return where some rows stand: one object, whichever layer asks for it."""
        return self.shared(("pick", *rows), lambda: Positions(self[row] for row in rows))

    def after(self, kept: Sequence[int]) -> Positions:
        """Return where rows stand that keep ``kept`` more tokens."""
        return Positions(start + n for start, n in zip(self, kept, strict=True))

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` returned the first time: for what a layout computes once a step, not once a layer."""
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value


@runtime_checkable
class KeyValues(Protocol):
    """What an attending layout returns from ``update_and_fetch``, once as keys and once as values.

    It stands for the logical array: ``shape`` and ``dtype`` are that array's. The step's write position is in the
    handle, not in the cache, since models may attend with another layer's cache, or with none.
    """

    shape: tuple[int, ...]
    dtype: Any

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` [B, heads, N, D] over this state; the shape of ``queries`` comes back."""
        ...


@attrs.frozen(kw_only=True)
class RowState:
    """One row of one layer, owned: nothing in it aliases a running batch.

    ``layout`` is the registered name through which it is restored. ``arrays`` and ``meta`` are safe to write as
    safetensors; children of a composite are prefixed ``0.``, ``1.``. ``nbytes`` counts the arrays.
    """

    layout: str
    tokens: int
    _arrays: Mapping[str, Any] = attrs.field(alias="arrays")
    _meta: Mapping[str, str] = attrs.field(alias="meta", factory=dict)

    def arrays(self) -> dict[str, mx.array]:
        """Return the arrays by name."""
        return dict(self._arrays)

    def meta(self) -> dict[str, str]:
        """Return what the arrays do not say, as strings."""
        return dict(self._meta)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(int(array.nbytes) for array in self._arrays.values())


class BatchCache(Protocol):
    """One layer's state for all rows of a group. With one row it *is* that row's serial cache.

    The model side (``update_and_fetch``, ``offset``, ``make_mask``, settable ``keys`` and ``values``,
    ``keys_and_values``; item access, iteration, ``lengths``, ``advance`` and being an ``ArraysCache`` for recurrent
    layers) is what mlx-lm models expect of a cache; which of it is needed depends on the kind.
    Never define ``__len__`` and never be falsy: models test ``if cache``.

    No method syncs with the device except where said, and none copies all rows in a step, a join, a leave or a
    rollback, amortised over growth. When no row is padded, positions, masks and reads are exactly those of
    mlx-lm's own serial cache.
    """

    rewinds: bool
    """True: `commit` takes any count. False (recurrent): a row keeps 0 or its whole width."""

    @property
    def rows(self) -> int:
        """Rows held, at places 0 to rows - 1."""
        ...

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed tokens per row, as the last `begin` and `commit` left them."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated. Of buffers that several caches share, the part that is this one's."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that the rows' tokens need, without reserve."""
        ...

    def projected(self, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Return what `nbytes` comes to, at most, on the way to rows of ``tokens``: joins and appends of any size.

        ``tokens``: first those of the rows there are, none fewer than now, then those of rows that will have joined;
        the longest is as far as a padded window may reach. Never below `nbytes`. ``exact``: what it is after
        ``reserve(tokens)``, once every row is there and has tokens. Without rows it answers too, for a group to come.
        """
        ...

    def reserve(self, tokens: Sequence[int]) -> None:
        """Make room for rows of ``tokens``, as in `projected`, and give the rest back.

        Up to there `nbytes` does not pass ``projected(tokens, exact=True)``; it is that at once where all rows are
        there and have tokens. Rows whose arrays are their own bring their room with them when they join, and buffers
        that do not exist yet get theirs when they are made. Blocks once where something must be copied, and copies
        nothing where all is as asked. Raises ValueError, and changes nothing, where a row holds more than is asked for.
        """
        ...

    def compact(self) -> None:
        """Reserve what the rows hold and no more. Called when idle or under memory pressure."""
        ...

    def arrays(self) -> list[mx.array]:
        """Return what must be evaluated at a boundary: after a prefill chunk, before a join, before a publication.

        A decode step evaluates the sampled tokens only; evaluating these with them makes MLX copy the cache.
        """
        ...

    def begin(self, widths: Sequence[int], starts: Positions) -> None:
        """Open a forward. Called before every forward, for every layer.

        ``widths``: real tokens per row (0 allowed); the window is the widest. ``starts``: tokens per row before it.
        """
        ...

    def commit(self, kept: Sequence[int]) -> None:
        """Close a forward: row i keeps its first ``kept[i]`` tokens, ``0 <= kept[i] <= widths[i]``.

        ``commit([0] * rows)`` aborts, also after a forward that raised half way while it was built.
        """
        ...

    def add(self, n: int) -> None:
        """Append ``n`` empty rows."""
        ...

    def join(self, other: BatchCache, slots: Sequence[int]) -> None:
        """Put the rows of ``other`` at places ``slots`` (the next free ones). All or nothing; ``other`` is borrowed."""
        ...

    def take(self, indices: Sequence[int]) -> BatchCache:
        """Return rows as a cache of their own: by reference when it is all of them in order, else a copy."""
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Make old row ``indices[i]`` the new row i, in any order; rows not named are dropped.

        May block once to materialise rows that move.
        """
        ...

    def extract(self, row: int) -> RowState:
        """Return an owned copy of a row, already dispatched (``async_eval``), or a counted share of immutable blocks."""
        ...

    def reusable(self, tokens: int) -> int:
        """Return the longest prefix, at most ``tokens``, that `cut` can bring all rows to; 0 where there is none."""
        ...

    def cut(self, tokens: int) -> None:
        """Let every row go back to its first ``tokens``, between forwards. Copies nothing.

        Raises ValueError, and changes nothing, where ``tokens`` is 0 or `reusable` says less.
        """
        ...

    def columns(self, widths: Sequence[int]) -> Hashable:
        """Describe the columns that a forward of ``widths`` reads; layers that share a mask must agree."""
        ...


class CacheLayout(Protocol):
    """A storage idea, registered by name; it holds no rows itself."""

    name: str
    kinds: frozenset[str]
    """The layer kinds it can hold."""
    options: type
    """An attrs class: the layout's options in the config file. Unknown keys are refused."""

    def refuses(self, layer: LayerInfo, options: Any) -> str | None:
        """Return why this layer cannot be held, or None. Called once per layer at bind."""
        ...

    def open(self, layer: LayerInfo, options: Any, *, slots: int, window: int) -> BatchCache:
        """Return a cache without rows.

        ``slots`` rows are reserved at the first write. ``window`` is the longest forward that may be rolled back.
        """
        ...

    def bytes_at(self, layer: LayerInfo, options: Any, tokens: int) -> int:
        """Return the bytes of one row that holds ``tokens``."""
        ...

    def restore(self, state: RowState) -> BatchCache:
        """Return a cache with the one row that ``state`` describes; it shares the state's arrays and never writes them."""
        ...
