"""Values by sequences of tokens. Tokens are compared, never hashed as a whole; what the values are is not known here."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

V = TypeVar("V")


class _Node(Generic[V]):
    """The end of an edge with ``run`` on it; ``depth`` tokens lie above its end."""

    __slots__ = ("below", "depth", "run", "value")

    def __init__(self, run: tuple[int, ...], depth: int, value: V | None = None) -> None:
        self.run, self.depth, self.value = run, depth, value
        self.below: dict[int, _Node[V]] = {}


class Trie(Generic[V]):
    """A radix tree: one edge for each run of tokens that no two sequences part in."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._root: _Node[V] = _Node((), 0)

    def __bool__(self) -> bool:
        """Whether any sequence has a value."""
        return bool(self._root.below) or self._root.value is not None

    def get(self, tokens: Sequence[int]) -> V | None:
        """Return the value of exactly ``tokens``."""
        path, common = self._path(tuple(tokens))
        return path[-1].value if common == len(tokens) == path[-1].depth else None

    def put(self, tokens: Sequence[int], value: V) -> None:
        """Give ``tokens`` a value, in place of what they had."""
        tokens = tuple(tokens)
        path, common = self._path(tokens)
        node = path[-1]
        if common < node.depth:  # in the middle of its edge: part it
            above, at = path[-2], node.depth - common
            upper: _Node[V] = _Node(node.run[:-at], common)
            above.below[node.run[0]] = upper
            upper.below[node.run[-at]] = node
            node.run = node.run[-at:]
            node = upper
        if common < len(tokens):
            node.below[tokens[common]] = _Node(tokens[common:], len(tokens), value)
        else:
            node.value = value

    def pop(self, tokens: Sequence[int]) -> V | None:
        """Take the value of exactly ``tokens`` out, and the edges that only led there."""
        path, common = self._path(tuple(tokens))
        node = path[-1]
        if not common == len(tokens) == node.depth:
            return None
        value, node.value = node.value, None
        for above, below in zip(path[-2::-1], path[:0:-1], strict=True):
            if below.value is not None or len(below.below) > 1:
                break
            (inner,) = below.below.values() or (None,)
            if inner is None:
                del above.below[below.run[0]]
            else:
                inner.run = below.run + inner.run
                above.below[below.run[0]] = inner
                break
        return value

    def shared(self, tokens: Sequence[int]) -> Iterator[tuple[int, V]]:
        """Yield (common, value) of all that share tokens from the first on: the longest common prefix first.

        Of those that share as many, the one that ends there, then the shorter ones.
        """
        path, common = self._path(tuple(tokens))
        seen: set[int] = set()
        while path and common:
            yield from ((common, value) for value in _nearest(path[-1], seen))
            seen.add(id(path.pop()))
            common = path[-1].depth if path else 0

    def _path(self, tokens: tuple[int, ...]) -> tuple[list[_Node[V]], int]:
        """Return the nodes along ``tokens``, the last of which may end behind what is common, and how many are common."""
        path, common = [self._root], 0
        while common < len(tokens) and (node := path[-1].below.get(tokens[common])) is not None:
            path.append(node)
            ahead = tokens[common : common + len(node.run)]
            same = next((i for i, (a, b) in enumerate(zip(ahead, node.run, strict=False)) if a != b), len(ahead))
            common += same
            if common < node.depth:
                break
        return path, common


def _nearest(top: _Node[V], without: set[int]) -> Iterator[V]:
    """Yield the values at and below a node, the least deep first; subtrees ``without`` are left out."""
    order = itertools.count()
    nodes = [(top.depth, next(order), top)]
    while nodes:
        _, _, node = heapq.heappop(nodes)
        if node.value is not None:
            yield node.value
        for below in node.below.values():
            if id(below) not in without:
                heapq.heappush(nodes, (below.depth, next(order), below))
