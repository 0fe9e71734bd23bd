"""What the harness adds to the real parts: it sees every cache that is made and may stop one that joins another."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import pytest
import structlog

from oarlock.core import manager
from oarlock.layouts.full import FullCache

PARTS = ("full", "plain", "greedy", "policies")
"""The plugins of ours that a simulated engine has."""


@attrs.define
class Instruments:
    """``caches`` holds every living `FullCache`; ``on_join(cache, other)`` is called before rows are joined.

    ``warnings`` counts what was logged, by event.
    """

    warnings: Counter[str] = attrs.field(factory=Counter)
    caches: weakref.WeakSet = attrs.field(factory=weakref.WeakSet)
    on_join: Callable | None = None


@contextlib.contextmanager
def instruments() -> Iterator[Instruments]:
    """Patch `FullCache`, and find only `PARTS`, once: collecting plugins would cost more than the schedules."""
    tools = Instruments()
    found = [plugin for plugin in manager.discover() if plugin.info.name in PARTS]
    assert len(found) == len(PARTS)
    init, join = FullCache.__init__, FullCache.join

    def seen(self, *given, **named):
        tools.caches.add(self)
        init(self, *given, **named)

    def joining(self, other, slots):
        if tools.on_join is not None:
            tools.on_join(self, other)
        join(self, other, slots)

    def logged(logger, level, event):
        tools.warnings[event["event"]] += 1
        raise structlog.DropEvent

    structlog.configure([logged], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "discover", lambda: found)
        patch.setattr(FullCache, "__init__", seen)
        patch.setattr(FullCache, "join", joining)
        yield tools
    structlog.reset_defaults()


class Lock:
    """An exclusive lock that remembers. ``released`` is called after each release."""

    def __init__(self, released: Callable[[], None]) -> None:
        self.held, self.taken, self._released = False, 0, released

    def __enter__(self):
        assert not self.held, "the lock was taken twice"
        self.held = True
        self.taken += 1
        return self

    def __exit__(self, *error):
        assert self.held, "the lock was given back twice"
        self.held = False
        self._released()
