"""Tell observers what happened, each in isolation, and measure steps. It decides nothing and keeps no rows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import attrs
import pluggy
import structlog

from oarlock.core.hookspecs import OBSERVERS, hookimpl

log = structlog.get_logger(__name__)

Phase = Literal["idle", "prefill", "decode", "prefill+decode"]


@attrs.frozen(kw_only=True)
class StepRecord:
    """One iteration of an engine. Times are wall milliseconds; ids are those of the rows that took part.

    ``joined`` and ``left`` count rows of the running group. ``build_ms`` is the host's time to build the next step,
    ``read_ms`` its wait for the previous one, ``emit_ms`` that of limits, consumers and membership.
    """

    index: int
    phase: Phase = "idle"
    decode_ids: tuple[str, ...] = ()
    prefill_ids: tuple[str, ...] = ()
    prefill_tokens: int = 0
    joined: int = 0
    left: int = 0
    build_ms: float = 0.0
    read_ms: float = 0.0
    emit_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def decode_rows(self) -> int:
        """How many rows advanced by decoding."""
        return len(self.decode_ids)

    @property
    def prefill_rows(self) -> int:
        """How many rows advanced by prefill."""
        return len(self.prefill_ids)


@attrs.frozen
class _Observer:
    plugin: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]


@attrs.define(eq=False)
class Observers:
    """The observing hooks of one plugin manager, read once: plugins that are registered later are not seen."""

    manager: pluggy.PluginManager
    _hooks: dict[str, tuple[_Observer, ...]] = attrs.field(init=False)
    _logged: set[tuple[str, str]] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self._hooks = {hook: _observers(self.manager, hook) for hook in OBSERVERS}

    def wants(self, hook: str) -> bool:
        """Return whether anybody implements ``hook``, so that its record need not be made for nobody."""
        return bool(self._hooks[hook])

    def notify(self, hook: str, /, **facts: Any) -> None:
        """Call every implementation of ``hook``; one that raises is logged, once a plugin and hook, and passed over."""
        for observer in self._hooks[hook]:
            try:
                observer.function(*[facts[name] for name in observer.arguments])
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - SystemExit of an observer must not end the engine either
                self._failed(observer.plugin, hook, error)

    def _failed(self, plugin: str, hook: str, error: BaseException) -> None:
        if (plugin, hook) in self._logged:
            return
        self._logged.add((plugin, hook))
        # One line and no locals: a renderer that shows them would evaluate arrays of the step.
        *_, last = traceback.extract_tb(error.__traceback__)
        text = traceback.format_exception_only(error)[-1].strip()
        log.error("observer_failed", plugin=plugin, hook=hook, error=text, at=f"{last.filename}:{last.lineno}")


def _observers(manager: pluggy.PluginManager, hook: str) -> tuple[_Observer, ...]:
    # pluggy keeps implementations in the reverse of the order in which it calls them.
    found = reversed(getattr(manager.hook, hook).get_hookimpls())
    return tuple(_Observer(impl.plugin_name, impl.function, impl.argnames) for impl in found)


@attrs.frozen(kw_only=True)
class StepReport:
    """Mean milliseconds per step, over ``steps`` steps; ``gap_ms`` lies between the end of one and the next."""

    steps: int
    build_ms: float
    read_ms: float
    emit_ms: float
    gap_ms: float
    total_ms: float


@attrs.define(eq=False)
class StepTrace:
    """Accumulates step times for debugging: pass one as a plugin. Every step counts, with or without a read."""

    clock: Callable[[], float] = time.perf_counter
    _steps: int = attrs.field(default=0, init=False)
    _sums: dict[str, float] = attrs.field(factory=dict, init=False)
    _ended: float | None = attrs.field(default=None, init=False)

    @hookimpl
    def step_finished(self, step: StepRecord) -> None:
        """Count a step that has just ended."""
        now = self.clock()
        gap = 0.0 if self._ended is None else max(0.0, (now - self._ended) * 1e3 - step.total_ms)
        self._steps, self._ended = self._steps + 1, now
        times = {name: getattr(step, name) for name in ("build_ms", "read_ms", "emit_ms", "total_ms")}
        for name, value in {**times, "gap_ms": gap}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def report(self) -> StepReport:
        """Return the means and reset every counter."""
        names = ("build_ms", "read_ms", "emit_ms", "gap_ms", "total_ms")
        means = {name: self._sums.get(name, 0.0) / max(1, self._steps) for name in names}
        report = StepReport(steps=self._steps, **means)
        self._steps, self._sums, self._ended = 0, {}, None
        return report
