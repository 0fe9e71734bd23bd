"""Blocks of one model: which are free, which are owned, and by how many. It knows no keys, no values and no device.

One id names the same block on every layer of a model: each layer has its own planes, all of them the same places. So
who owns what is decided once a step for the whole model.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Result = TypeVar("Result")

SPARE = 8
"""A pool that must grow takes at least one block in so many more than it had."""
SHRINK = 4
"""A pool of which less than one block in so many is needed gives the others back when it next allocates."""
SMALL = 64
"""Blocks up to which shrinking is not worth a copy."""


@attrs.define(eq=False)
class Arrangement:
    """Where blocks lie. A later one says where each went: block i of this is block ``target[i]`` of ``after``.

    Planes and owners follow the chain from the arrangement that they know, whenever they are next used.
    """

    capacity: int
    after: Arrangement | None = None
    target: Ids | None = None


class Share:
    """One owner of blocks, in the order of its tokens. It counts while it lives, and gives back when it dies.

    ``grows``: a running row holds it, so it is placed with room behind it; a stored one is not.
    """

    __slots__ = ("__weakref__", "_blocks", "_first", "_held", "grows", "home")

    def __init__(self, blocks: Blocks, ids: Ids, *, grows: bool = True) -> None:
        self._blocks = blocks
        self._held = (blocks.arrangement, ids)
        self._first: tuple[Arrangement, int | None] | None = None
        self.grows = grows
        self.home: tuple[Arrangement, int] | None = None
        blocks.add(self, ids)

    def __del__(self) -> None:
        """Give back. Whichever thread drops the last reference: the pool's own thread counts."""
        self._blocks.returned.append(self._held)

    @property
    def ids(self) -> Ids:
        """The blocks, as numbered now."""
        arrangement, ids = self._held
        if arrangement.after is not None:
            self._held = arrangement, ids = follow(arrangement, ids)
        return ids

    @property
    def first(self) -> int | None:
        """The first block where all of them lie side by side in order, else None; None without blocks."""
        ids = self.ids
        known = self._first
        if known is None or known[0] is not self._held[0]:
            known = self._first = (self._held[0], first_of(ids))
        return known[1]

    @property
    def end(self) -> int:
        """The block that should come next; -1 where any will do."""
        ids = self.ids
        if ids.size:
            return int(ids[-1]) + 1
        return self.home[1] if self.home is not None and self.home[0].after is None else -1

    def again(self, *, grows: bool = True) -> Share:
        """Return another owner of the same blocks."""
        return Share(self._blocks, self.ids, grows=grows)


def first_of(ids: Ids) -> int | None:
    """Return the first of blocks that lie side by side in order, else None; None without blocks."""
    side_by_side = ids.size > 0 and (ids.size == 1 or bool((np.diff(ids) == 1).all()))
    return int(ids[0]) if side_by_side else None


def follow(arrangement: Arrangement, ids: Ids) -> tuple[Arrangement, Ids]:
    """Return the latest arrangement and ``ids`` as numbered there."""
    while arrangement.after is not None and arrangement.target is not None:
        target, arrangement = arrangement.target, arrangement.after
        ids = target[ids]
    return arrangement, ids


class Blocks:
    """The pool: an owner count per block of ``size`` tokens. Grows when asked for more than is free."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrangement = Arrangement(0)
        self.counts = np.zeros(0, np.int32)
        self.returned: deque[tuple[Arrangement, Ids]] = deque()
        self.reserved = 0
        """Blocks of a pool that was fitted: it does not shrink below before it has grown, or is fitted anew."""
        self.debt = 0
        """Blocks that reads copied since the last arrangement, beyond what no arrangement avoids."""
        self._apart: int | None = None
        self._shares: weakref.WeakValueDictionary[int, Share] = weakref.WeakValueDictionary()
        self._serials = itertools.count()
        self._layers = itertools.count()
        self._enlisted: weakref.WeakSet[object] = weakref.WeakSet()
        self._known: deque[_Transition] = deque(maxlen=4)

    @property
    def capacity(self) -> int:
        """Blocks there are."""
        return self.arrangement.capacity

    @property
    def used(self) -> int:
        """Blocks that have an owner."""
        self.settle()
        return int(np.count_nonzero(self.counts))

    def enlist(self, pages: object) -> int:
        """Return the number of another layer that keeps its planes by this pool."""
        self._enlisted.add(pages)
        return next(self._layers)

    def add(self, share: Share, ids: Ids) -> None:
        """Count a new owner; the ids of one owner are distinct."""
        self.counts[ids] += 1
        self._shares[next(self._serials)] = share

    def settle(self) -> None:
        """Count what dead owners gave back."""
        while self.returned:
            _, ids = follow(*self.returned.popleft())
            self.counts[ids] -= 1

    def reserve(self, rows: Sequence[Share], wants: Sequence[int], extra: int = 0) -> None:
        """Make sure of ``wants[i]`` free blocks for each row, and ``extra`` more; may renumber all blocks."""
        needed = self.used + sum(wants) + extra
        if needed > self.capacity:
            self.reserved = 0
            self.arrange(max(needed, self.capacity + self.capacity // SPARE), rows, wants)
        elif self.capacity > max(SMALL, SHRINK * needed, self.reserved):
            self.arrange(needed + needed // SPARE, rows, wants)
        elif self.debt > 2 * needed:  # copying all once costs less than going on
            self.arrange(self.capacity, rows, wants)

    @staticmethod
    def grown(needed: int) -> int:
        """Return how many blocks there may be, at most, where `reserve` made room for ``needed`` one after the other."""
        return needed + -(-needed // SPARE)

    def fit(self, capacity: int, rows: Sequence[Share]) -> None:
        """Have as many blocks as that, no fewer than are owned; ``rows`` lie first where any move."""
        self.reserved = capacity
        if capacity != self.capacity:
            self.arrange(capacity, rows)

    def allocate(self, first: int, n: int) -> Ids:
        """Return ``n`` free blocks, from block ``first`` on while those are free, else in the widest gap."""
        found: list[Ids] = []
        while n:
            if not 0 <= first < self.capacity or self.counts[first]:
                first = self._widest_gap(n)
            busy = np.flatnonzero(self.counts[first : first + n])
            end = first + int(busy[0]) if busy.size else min(first + n, self.capacity)
            found.append(np.arange(first, end, dtype=np.int32))
            self.counts[first:end] = 1  # not to be found twice
            n -= end - first
            first = -1
        ids = np.concatenate(found) if found else np.zeros(0, np.int32)
        self.counts[ids] = 0
        return ids

    def _widest_gap(self, n: int) -> int:
        """Return where to begin in the widest gap, with half of its slack left to the row in front of it."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self.counts > 0, [True])).astype(np.int8)))
        starts, ends = edges[::2], edges[1::2]
        if not starts.size:
            msg = f"no block is free of {self.capacity}"
            raise RuntimeError(msg)
        widest = int(np.argmax(ends - starts))
        start, room = int(starts[widest]), int(ends[widest] - starts[widest])
        return start + max(0, room - n) // 2 if start else start

    def note(self, apart: int) -> None:
        """Take down that a forward reads ``apart`` blocks of rows that do not lie side by side."""
        if self._apart is None:  # the first forward of an arrangement: shared blocks can lie behind one owner only
            self._apart = apart
        self.debt += max(0, apart - self._apart)

    def arrange(self, capacity: int, rows: Sequence[Share] = (), wants: Sequence[int] = ()) -> None:
        """Renumber all blocks for a pool of ``capacity``: each owner's side by side, room behind those that grow.

        ``rows`` lie first, in order, row i with ``wants[i]`` blocks of room at least.
        """
        self.settle()
        used = np.flatnonzero(self.counts)
        first = set(map(id, rows))
        others = [share for share in list(self._shares.values()) if id(share) not in first]
        growing = len(rows) + sum(share.grows for share in others)
        room = max(0, capacity - used.size - sum(wants)) // max(1, growing)
        target, later = np.full(self.capacity, -1, np.int32), Arrangement(capacity)
        at = 0
        for share, want in itertools.chain(
            zip(rows, wants, strict=True) if wants else ((row, 0) for row in rows), ((share, 0) for share in others)
        ):
            ids = share.ids
            if not ids.size:
                share.home = (later, at)
            placed = ids[target[ids] < 0]
            target[placed] = np.arange(at, at + placed.size, dtype=np.int32)
            at += placed.size + (want + room if share.grows else 0)
        left = used[target[used] < 0]  # an owner dies in another thread just now
        counts = np.zeros(capacity, np.int32)
        target[left] = np.arange(at, at + left.size, dtype=np.int32)
        counts[target[used]] = self.counts[used]
        self.counts, self.debt, self._apart = counts, 0, None
        self.arrangement.target, self.arrangement.after = target, later
        self.arrangement = later

    def together(self, layer: int, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
        """Return what ``make`` returns, once for all layers that do the same thing one after the other.

        ``key`` says what is done to what, by weak references. A layer, known by a number, gets each result once:
        asking again means doing it again.
        """
        for known in self._known:
            if layer not in known.served and known.key == key and (result := known.result()) is not None:
                known.served.add(layer)
                self._release(known)
                return result  # type: ignore[no-any-return]
        made = make()
        self._known.appendleft(known := _Transition(key, weakref.ref(made), {layer}, made))
        self._release(known)
        return made

    def _release(self, known: _Transition) -> None:
        """Let a result go once every layer has it: its rows own blocks."""
        if len(known.served) >= len(self._enlisted):
            known.kept = None


@attrs.define(eq=False)
class _Transition:
    """What a layer did, for the others to follow: at once, or after the first layer has gone on."""

    key: tuple[Any, ...]
    result: Callable[[], Any]
    served: set[int]
    kept: Any
