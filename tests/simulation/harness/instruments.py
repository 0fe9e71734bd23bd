"""What the harness adds to the real parts: it sees every cache that is made and may stop one that joins another.

It also plays the device: an error of evaluation is raised once, by whatever is read or evaluated next, as MLX does.
Real ones are not used: MLX 0.32 on the CPU blocks for ever after one in some hundred.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import mlx.core as mx
import pytest
import structlog

from oarlock.core import manager
from oarlock.core.rebuild import Rebuild
from oarlock.core.relief import Relief
from oarlock.core.sampling import PendingDraw, SamplerGroup
from oarlock.layouts import planes, slots
from oarlock.layouts.full import FullCache
from oarlock.methods.plain import PlainDecoding

PARTS = ("full", "plain", "greedy", "policies")
"""The plugins of ours that a simulated engine has."""

COLUMN_STEP = 16
"""Columns that a cache grows by: few, so that rows of some tens of tokens take unequal bytes."""


@attrs.define
class Instruments:
    """``caches`` holds every living `FullCache`; ``on_join(cache, other)`` is called before rows are joined.

    ``warnings`` counts what was logged, by event. ``pending`` is the device's error that nothing has raised yet,
    ``raised`` counts those that were raised outside a rebuild, ``rebuilds`` what they led to. ``on_wait()`` is called
    where the budget of bytes lets a row wait, ``on_close()`` after a method was closed.
    """

    warnings: Counter[str] = attrs.field(factory=Counter)
    caches: weakref.WeakSet = attrs.field(factory=weakref.WeakSet)
    on_join: Callable | None = None
    on_wait: Callable | None = None
    on_close: Callable | None = None
    pending: Exception | None = None
    late: bool = False
    """Whether what was drawn before the failing forward can still be read."""
    doubtful: set[int] = attrs.field(factory=set)
    """Draws since then, by identity."""
    raised: int = 0
    rebuilds: int = 0
    rebuilding: bool = False

    def restart(self) -> None:
        """Forget the last schedule."""
        self.warnings.clear()
        self.caches = weakref.WeakSet()  # an error that is still looked at may hold some of the last
        self.on_join = self.on_wait = self.on_close = self.pending = None
        self.raised = self.rebuilds = 0

    def fail_device(self, error: Exception, *, late: bool) -> None:
        """Let what is read next raise, unless another error waits already."""
        if self.pending is None:
            self.pending, self.late = error, late
            self.doubtful.clear()

    def check_device(self, draw: PendingDraw | None = None) -> None:
        """Raise what the device has to say."""
        if self.late and draw is not None and id(draw) not in self.doubtful:
            return
        error, self.pending = self.pending, None
        if error is not None:
            self.raised += not self.rebuilding
            raise error


@contextlib.contextmanager
def instruments() -> Iterator[Instruments]:
    """Patch `FullCache`, and find only `PARTS`, once: collecting plugins would cost more than the schedules."""
    tools = Instruments()
    found = [plugin for plugin in manager.discover() if plugin.info.name in PARTS]
    assert len(found) == len(PARTS)
    init, join, rebuild = FullCache.__init__, FullCache.join, Rebuild.run
    affords, close = Relief.affords, PlainDecoding.close
    read, draw, evaluate = PendingDraw.read, SamplerGroup.draw, mx.eval

    def seen(self, *given, **named):
        tools.caches.add(self)
        init(self, *given, **named)

    def joining(self, other, slots):
        if tools.on_join is not None:
            tools.on_join(self, other)
        join(self, other, slots)

    def reading(self):
        tools.check_device(self)
        return read(self)

    def evaluating(*given):
        tools.check_device()
        return evaluate(*given)

    def drawing(self, *given):
        made = draw(self, *given)
        tools.doubtful.add(id(made))
        return made

    def rebuilding(self, *given):
        tools.rebuilds += 1
        tools.rebuilding = True
        try:
            rebuild(self, *given)
        finally:
            tools.rebuilding = False

    def affording(self, *given):
        answer = affords(self, *given)
        if not answer and tools.on_wait is not None:
            tools.on_wait()
        return answer

    def closing(self):
        close(self)
        if tools.on_close is not None:
            tools.on_close()

    def logged(logger, level, event):
        tools.warnings[event["event"]] += 1
        raise structlog.DropEvent

    structlog.configure([logged], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "discover", lambda: found)
        patch.setattr(FullCache, "__init__", seen)
        patch.setattr(FullCache, "join", joining)
        patch.setattr(Rebuild, "run", rebuilding)
        patch.setattr(Relief, "affords", affording)
        patch.setattr(PlainDecoding, "close", closing)
        patch.setattr(PendingDraw, "read", reading)
        patch.setattr(SamplerGroup, "draw", drawing)
        patch.setattr(mx, "eval", evaluating)
        for module in (planes, slots):
            patch.setattr(module, "COLUMN_STEP", COLUMN_STEP)
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
