"""Tell observers what happened, each in isolation, and measure steps. It decides nothing and keeps no rows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
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

    ``mixed_tokens`` are those of the forward that decode and prefill shared, 0 without one. ``joined`` and ``left``
    count rows of the running group. ``build_ms`` is the host's time to build forwards, ``read_ms`` its wait for the
    device, ``emit_ms`` that of limits, consumers and membership; ``gap_ms`` lies between the step before and this one,
    0 where the engine was idle between them. Bytes are the allocator's, at the end.
    """

    index: int
    phase: Phase = "idle"
    decode_ids: tuple[str, ...] = ()
    prefill_ids: tuple[str, ...] = ()
    prefill_tokens: int = 0
    mixed_tokens: int = 0
    joined: int = 0
    left: int = 0
    build_ms: float = 0.0
    read_ms: float = 0.0
    emit_ms: float = 0.0
    gap_ms: float = 0.0
    total_ms: float = 0.0
    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0

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
    attribution: bool = attrs.field(default=False, init=False)
    """Whether the engine waits for the device after each phase, so that a phase's time is its own."""

    def __attrs_post_init__(self) -> None:
        self._hooks = {hook: _observers(self.manager, hook) for hook in OBSERVERS}
        traces = [plugin for plugin in self.manager.get_plugins() if isinstance(plugin, StepTrace)]
        self.attribution = any(trace.attribution for trace in traces)

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


TIMES = ("build_ms", "read_ms", "emit_ms", "gap_ms", "total_ms")
"""What a `StepReport` says of each phase, by the names of `StepRecord`."""


@attrs.frozen(kw_only=True)
class Summary:
    """Mean, median and 99th percentile of one kind of time, in milliseconds."""

    mean: float
    p50: float
    p99: float


@attrs.frozen(kw_only=True)
class StepReport:
    """Steps and their times by phase; the phase "all" holds every step, and is missing where there was none."""

    steps: Mapping[str, int]
    times: Mapping[str, Mapping[str, Summary]]


@attrs.define(eq=False)
class StepTrace:
    """Collects step times for debugging: pass one as a plugin. Every step counts, with or without a read.

    With ``attribution`` the engine waits for the device after each phase: times are then those of the phase they stand
    in, and longer, since nothing overlaps.
    """

    attribution: bool = False
    _records: list[StepRecord] = attrs.field(factory=list, init=False)

    @hookimpl
    def step_finished(self, step: StepRecord) -> None:
        """Count a step that has just ended."""
        self._records.append(step)

    def report(self) -> StepReport:
        """Return what was counted and start again from nothing."""
        records, self._records = self._records, []
        phases: dict[str, list[StepRecord]] = {}
        for step in records:
            phases.setdefault("all", []).append(step)
            phases.setdefault(step.phase, []).append(step)
        return StepReport(
            steps={phase: len(some) for phase, some in phases.items()},
            times={
                phase: {name: _summary([getattr(step, name) for step in some]) for name in TIMES}
                for phase, some in phases.items()
            },
        )


def _summary(values: Sequence[float]) -> Summary:
    ordered, last = sorted(values), len(values) - 1
    return Summary(mean=sum(ordered) / len(ordered), p50=ordered[round(0.5 * last)], p99=ordered[round(0.99 * last)])
