"""JournaledEngine: an engine to which things happen between steps only, as its journal says. So ranks run one schedule."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import attrs

from oarlock.core import manager
from oarlock.core.agreed import AgreedStateCache
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.method import MeasuringMethod
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.engine import Config, Engine
from oarlock.core.errors import (
    EngineClosed,
    InvalidConfigValue,
    OarlockError,
    QueueFull,
    ScheduleDiverged,
    UnsupportedFeature,
)
from oarlock.core.handle import Handle, Task
from oarlock.core.journal import Journal, fixed
from oarlock.core.logged import LoggedHandle, consumer, fail_together
from oarlock.core.models import load_model
from oarlock.core.request import Request
from oarlock.core.result import TokenEvent
from oarlock.core.row import Row

HEARTBEAT = 2.0
"""Seconds after which a leading engine without work asks whether the others are still there."""


class JournaledEngine(Engine):
    """An `Engine` whose events come from a journal. Where the journal does not lead, `follow` runs what it says.

    The clock stands still within a step, so nothing that measures time may decide: what does is refused. An error of the
    device, or of another rank, ends the engine: the others cannot know of a retry.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, journal: Journal, config: Config = None, **options: Any
    ) -> None:
        """Bind ``model``; ``options`` are those of `Engine`. Raises `errors.InvalidConfigValue` for what measures time."""
        self._prepare(journal)
        super().__init__(model, tokenizer, config=self._settled(config), **options)

    @classmethod
    def open(
        cls,
        source: str | PathLike[str],
        *,
        journal: Journal,
        prepare: Callable[[Any], None] | None = None,
        config: Config = None,
        plugins: Sequence[Any] = (),
    ) -> JournaledEngine:
        """Load and bind as `Engine.load` does; ``prepare`` changes the model before its weights are evaluated."""
        self = cls.__new__(cls)
        self._prepare(journal)
        settings = self._settled(config)
        found = manager.build(settings, plugins=plugins)
        self._take(load_model(str(source), settings, found, prepare), settings, found, None)
        return self

    def _prepare(self, journal: Journal) -> None:
        self._journal = journal
        self._time = time.monotonic()
        self._outbox: deque[tuple[Mapping[str, Any], Row | BaseException | None]] = deque()
        self._rows: dict[str, Row] = {}
        self._digest = b""

    def _settled(self, config: Config) -> EngineConfig:
        """Return the configuration, refusing what ranks cannot agree on. Directories are the leader's."""
        settings = EngineConfig.load(config)
        scheduler, disk, adapters = settings.scheduler, settings.state_cache.disk, dict(settings.adapters.named)
        budget = scheduler.kv_budget
        for key, got, wrong, allowed in (
            (
                "scheduler.stall_bound_ms",
                scheduler.stall_bound_ms,
                scheduler.stall_bound_ms != 0,
                "0: it measures time",
            ),
            ("scheduler.kv_budget", budget, isinstance(budget, float), "bytes: memories differ"),
            ("state_cache.disk", disk, disk != "", '"": ranks would read at other times'),
            ("adapters", adapters, bool(adapters), "none"),
        ):
            if wrong:
                raise InvalidConfigValue(key, got, f"where a journal drives, {allowed}")
        return settings if self._journal.leads else settings.updated({"state_cache": {"checkpoints": ""}})

    def _start(self, *given: Any, **facts: Any) -> None:
        super()._start(*given, **facts)
        self._driver.contain_by(fail_together)
        self._refuse_measuring(self.bound.method)

    def _clock(self) -> float:
        return self._time

    def _open_store(self) -> StateCache:
        return AgreedStateCache(super()._open_store(), self._journal)

    def _refuse_measuring(self, name: str) -> None:
        method, options = self.bound.method_of(name)
        if isinstance(method, MeasuringMethod) and method.measures(options):
            key = f"method {name!r}"
            raise UnsupportedFeature(
                key, "it decides by how long steps take, on which ranks cannot agree: adaptive = false"
            )

    # --- what is asked, from any thread ------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        events: Callable[[TokenEvent], None] | None = None,
        ended: Callable[[BaseException | None], None] | None = None,
    ) -> Handle:
        """Log a request and return its handle; raises what `Engine.submit` raises, and for what is not logged."""
        if not self._journal.leads:
            raise UnsupportedFeature("submit", "this rank follows; requests go to the one that leads")
        self._refuse_measuring(request.method or self.bound.method)
        row = self._admit(attrs.evolve(request, on_token=None, on_admitted=None, trace=None))
        told = fixed(request, row)
        handle = LoggedHandle(self, row, self.post)
        row.events, row.ended = consumer(request, events, handle), ended
        limit = self.bound.config.scheduler.max_queued
        with self._driver.mutex:
            if self._driver.closed:
                raise EngineClosed
            if row.id in self._rows:
                raise UnsupportedFeature("id", f"a request {row.id!r} is on its way, and the journal tells them by id")
            if self._waiting() >= limit:
                raise QueueFull(self._waiting(), limit)
            self._rows[row.id] = row
            self.post({"submit": told}, row)
        return handle

    def post(self, event: Mapping[str, Any], mine: Row | BaseException | None = None) -> None:
        """Let ``event`` happen before the next step; ``mine`` stands for it here. Legal from any thread."""
        with self._driver.mutex:
            self._outbox.append((event, mine))
            self._driver.signal()

    def hold(self) -> None:
        """Admit nothing more until `release`, from the next step on."""
        self.post({"hold": True})

    def release(self) -> None:
        """End a hold, from the next step on."""
        self.post({"hold": False})

    def run_at_boundary(self, task: Callable[[], Any]) -> Task:
        """Raise: a task is not logged."""
        raise UnsupportedFeature("run_at_boundary", "a task is not logged, and other ranks would not do it")

    def close(self) -> None:
        """Close all ranks' engines before the next step; see `Engine.close`."""
        if not self._driver.closed:
            self.post({"close": True})
            if self._drives() and not self._stepping:
                with contextlib.suppress(OarlockError):  # who is lost needs no closing
                    self.step()

    def stats(self) -> dict[str, Any]:
        """Return gauges and counters, and the digest of all that was done."""
        return {**super().stats(), "schedule_hash": self._digest.hex()}

    def _waiting(self) -> int:
        with self._driver.mutex:
            return super()._waiting() + sum("submit" in event for event, _ in self._outbox)

    # --- what is done, on the driving thread -------------------------------------------------------------

    def follow(self) -> None:
        """Do what the journal says until the engine is closed. Raises what ended it."""
        while not self.closed:
            self.step()
        super().step()

    def step(self) -> bool:
        """Apply what the journal has for this step, then do it. An error ends the engine and is raised."""
        self._claim()
        if self.lost is not None:
            return super().step()
        try:
            if not self._journal.leads or self._outbox or self._driver.busy or self._silent > HEARTBEAT:
                self._exchange()
            busy = super().step()
        except OarlockError as error:
            self._end(error)
            raise
        self._note()
        return busy

    @property
    def _silent(self) -> float:
        """Seconds since ranks last spoke."""
        return time.monotonic() - self._time

    def _advance(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        super()._advance(done, HEARTBEAT if timeout is None else min(timeout, HEARTBEAT))

    def _end(self, error: OarlockError) -> None:
        self.lost = error
        self._driver.closed = True
        self._driver.fail_all(error, queued=True)

    def _exchange(self) -> None:
        with self._driver.mutex:
            sent, self._outbox = list(self._outbox), deque()
        mine = {"time": time.monotonic(), "events": [event for event, _ in sent]} if self._journal.leads else None
        told = self._journal.exchange(mine, self._digest)
        self._time = told["time"]
        local = iter([mine for _, mine in sent])
        for event in told["events"]:
            self._apply(event, next(local, None))

    def _apply(self, event: Mapping[str, Any], mine: Row | BaseException | None) -> None:
        ((kind, value),) = [(key, value) for key, value in event.items() if key not in ("stop_at", "fault")]
        if kind == "submit":
            self._push(mine if isinstance(mine, Row) else self._follow_row(value))
        elif kind == "cancel" and (row := self._rows.get(value)) is not None:
            if event.get("fault") is not None and row.fault is None:
                row.fault = mine if isinstance(mine, BaseException) else RuntimeError(event["fault"])
            row.stop_at = event.get("stop_at") if row.stop_at is None else row.stop_at
            row.cancelled = True
        elif kind == "hold":
            self._driver.held = value
        elif kind == "close":
            super().close()

    def _follow_row(self, told: Mapping[str, Any]) -> Row:
        try:
            row = self._admit(Request.from_mapping(told))
        except OarlockError as error:
            msg = f"request {told['id']!r} was taken by the leading rank and is refused here: {error}"
            raise ScheduleDiverged(msg) from error
        self._rows[row.id] = row
        return row

    def _note(self) -> None:
        """Put what the step did into the digest."""
        group, emitter = self._driver.group, self._driver.emitter
        facts = [[done.ids, done.width, done.prefill, done.mixed] for done in group.log.forwards]
        rows = [[row.id, len(row.token_ids), row.current] for row in group.rows]
        counts = [group.log.joined, group.log.left, emitter.delivered, emitter.completed, self._driver.queued]
        if facts or rows or group.log.left:
            text = json.dumps([facts, rows, counts])
            self._digest = hashlib.blake2b(self._digest + text.encode(), digest_size=16).digest()
        with self._driver.mutex:  # other threads submit meanwhile
            for name in [name for name, row in self._rows.items() if row.outcome is not None]:
                del self._rows[name]
