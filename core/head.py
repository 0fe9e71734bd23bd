"""Scores for some lines of a forward only: the head is a model's widest layer, and most tokens of a prompt need none.

What a model's body (all but its head) returns is cut to the lines that are asked for. The body's class stands aside for one
that does so, for as long as an engine needs it; nobody else's forwards notice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class _Asked(threading.local):
    lines: mx.array | None = None
    seen: list[Any] | None = None


_asked = _Asked()
_mutex = threading.Lock()
_trimmed: dict[int, _Stand] = {}


@contextmanager
def only(lines: Sequence[int]) -> Iterator[None]:
    """Have this thread's forwards return scores of these lines alone, in this order, where their model is `Trimmed`."""
    _asked.lines = mx.array(list(lines), dtype=mx.int32)
    try:
        yield
    finally:
        _asked.lines = None


@contextmanager
def seen() -> Iterator[list[Any]]:
    """Collect what the bodies of this thread's forwards return to their heads, of all lines, where they are `Trimmed`."""
    states: list[Any] = []
    _asked.seen = states
    try:
        yield states
    finally:
        _asked.seen = None


class _Stand:
    """The class that stands aside, the one in its place, and how many need that."""

    def __init__(self, kind: type) -> None:
        self.kind, self.users = kind, 0

        def call(body: Any, *given: Any, **named: Any) -> Any:
            out = kind.__call__(body, *given, **named)
            if _asked.seen is not None:
                _asked.seen.append(out)
            return out if _asked.lines is None else out[_asked.lines]

        self.cutting = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class Trimmed:
    """The body at ``path`` of a model can be cut until `close`, and as long as somebody else needs that."""

    def __init__(self, model: Any, path: str) -> None:
        """Change nothing but the class of one module."""
        self._body: Any = dict(model.named_modules())[path]
        with _mutex:
            stand = _trimmed.setdefault(id(self._body), _Stand(type(self._body)))
            stand.users += 1
            self._body.__class__ = stand.cutting

    def close(self) -> None:
        """Give it up; the last one puts the class back. Idempotent."""
        with _mutex:
            body, self._body = self._body, None
            if body is None:
                return
            stand = _trimmed[id(body)]
            stand.users -= 1
            if not stand.users:
                del _trimmed[id(body)]
                if type(body) is stand.cutting:  # else somebody put another in its place since
                    body.__class__ = stand.kind
