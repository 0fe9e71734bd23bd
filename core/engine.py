"""Engine: submit, stream, generate, step, close. One thread drives it; the order of work is the scheduler's."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any

import mlx.core as mx
import structlog

from oarlock.core import manager
from oarlock.core.bind import BoundModel, bind
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import LoadedModel, Tokenizer
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.driven import Driven
from oarlock.core.driver import Driver
from oarlock.core.errors import EngineClosed
from oarlock.core.gauges import gauges
from oarlock.core.guarded import SafeStateCache
from oarlock.core.handle import Handle, Task
from oarlock.core.intake import admit_request, check_checkpoints
from oarlock.core.models import load_model
from oarlock.core.observe import Observers
from oarlock.core.request import Request
from oarlock.core.result import TokenEvent
from oarlock.core.row import Row
from oarlock.core.scheduler import Scheduler, Turn
from oarlock.core.submissions import Submissions

_log = structlog.get_logger(__name__)
Config = EngineConfig | Mapping[str, Any] | str | PathLike[str] | None


class Engine(Driven):
    """A model bound to layouts, a method and samplers, and the rows that run on it.

    ``advised`` are fields of `SamplingParams` that the model's makers advise; what a request leaves out does not follow them.
    ``submit``, ``cancel``, ``stats``, ``hold`` and ``release`` are legal from any thread; the first thread that steps
    drives it from then on, since MLX arrays belong to threads. ``lock`` is an exclusive lock shared with other users
    of the device: it is held from the first admission until the engine is idle.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        config: Config = None,
        plugins: Sequence[Any] = (),
        lock: AbstractContextManager[Any] | None = None,
        positions: int | None = None,
        identity: str = "",
    ) -> None:
        """Bind ``model``, an mlx-lm model with its weights in place. Raises what `bind.bind` raises."""
        settings = EngineConfig.load(config)
        found = manager.build(settings, plugins=plugins)
        self.advised: Mapping[str, Any] = {}
        self._start(model, tokenizer, settings, found, lock, positions=positions, identity=identity)

    @classmethod
    def load(
        cls,
        source: str | PathLike[str],
        *,
        config: Config = None,
        plugins: Sequence[Any] = (),
        lock: AbstractContextManager[Any] | None = None,
    ) -> Engine:
        """Load a model by path or name through the registered loaders, then bind it. Raises `errors.LoadError`."""
        settings = EngineConfig.load(config)
        found = manager.build(settings, plugins=plugins)
        loaded = load_model(str(source), settings, found)
        self = cls.__new__(cls)
        self._take(loaded, settings, found, lock)
        return self

    def _take(
        self,
        loaded: LoadedModel,
        settings: EngineConfig,
        found: manager.PluginSet,
        lock: AbstractContextManager[Any] | None,
    ) -> None:
        facts = {"positions": loaded.positions, "identity": loaded.identity, "model_type": loaded.model_type}
        self._start(loaded.model, loaded.tokenizer, settings, found, lock, **facts)
        self.advised = loaded.sampling

    def _start(
        self,
        model: Any,
        tokenizer: Tokenizer | None,
        settings: EngineConfig,
        found: manager.PluginSet,
        lock: AbstractContextManager[Any] | None,
        **facts: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.bound: BoundModel = bind(model, settings, found, tokenizer=tokenizer, **facts)
        self._observers = Observers(found.manager)
        self._store = SafeStateCache(self._open_store())
        self._driver = Driver(self.bound, self._store, self._observers, self._clock, lock)
        scheduler = settings.scheduler
        self._scheduler = Scheduler(
            policy=self.bound.policy,
            max_batch=scheduler.max_batch,
            prefill_batch_tokens=scheduler.prefill_batch_tokens,
            early_first_token=scheduler.early_first_token,
            clock=self._clock,
        )
        self._names = itertools.count(1)
        self._observers.notify("model_bound", plan=self.bound)

    # --- requests --------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        events: Callable[[TokenEvent], None] | None = None,
        ended: Callable[[BaseException | None], None] | None = None,
    ) -> Handle:
        """Queue a request and return its handle. Nothing is queued when it raises.

        ``events`` gets every `TokenEvent` on the driving thread, ``ended`` the error or None once the outcome stands.
        """
        row = self._admit(request)
        row.events, row.ended = events, ended
        self._push(row)
        return Handle(self, row)

    def _admit(self, request: Request) -> Row:
        """Return the row of a request; raises what makes it impossible."""
        if self._driver.closed:
            raise EngineClosed
        row = admit_request(request, self.bound, self.tokenizer, f"request-{next(self._names)}")
        check_checkpoints(request, self.bound, self._store)
        self._driver.relief.budget.check(row)
        return row

    def _push(self, row: Row) -> None:
        """Queue a row."""
        row.submitted_at = self._clock()
        with self._driver.mutex:
            if self._driver.closed:
                raise EngineClosed
            self._driver.queue.push(row)
            self._driver.signal()

    def generate(self, requests: Sequence[Request], *, return_errors: bool = False) -> list[Any]:
        """Run requests to their end and return their results in the order given.

        More of them than the queue takes are submitted as it empties. The first failed row's error is raised after
        all are done; with ``return_errors`` the exception stands in the result's place.
        """
        given = Submissions(requests, self.submit)
        while not given.done:
            given.feed(self._takes)
            self._advance(lambda: given.done)
        outcomes = given.outcomes
        for outcome in () if return_errors else outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def stream(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Run requests and yield their events as they come; each ends with one that has a finish reason.

        A failed row raises its error after the other rows' events; leaving the iterator cancels what still runs.
        """
        events: deque[TokenEvent] = deque()
        given = Submissions(requests, lambda request: self.submit(request, events=events.append))
        try:
            while not given.done:
                given.feed(self._takes)
                self._advance(lambda: bool(events) or given.done)
                while events:
                    yield events.popleft()
        finally:
            given.cancel()
            while not given.done:
                self.step()
        for handle in given.handles:
            handle.result()

    # --- driving ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one iteration on this thread and return whether anything is left to do.

        An error of the driver itself rejects every row and is raised; the engine stays usable.
        """
        self._claim()
        driver, log = self._driver, self._driver.group.log
        self._stepping = True
        driver.group.states.checkpoints.discard()
        log.start()
        try:
            turn = self._scheduler.iterate(driver)
            if turn is Turn.YIELDED and self._observers.wants("step_finished"):
                self._observers.notify("step_finished", step=log.record(busy=driver.busy))
            if driver.closed:
                driver.fail_all(EngineClosed(), queued=True)
        except BaseException as error:
            _log.exception("driver_failed")
            driver.fail_all(error, queued=True)
            raise
        finally:
            self._stepping = False
            driver.emitter.let_go()
        return driver.busy

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._driver.closed

    def step_or_sleep(self) -> None:
        """Step, then sleep until there is something to do."""
        self._advance(lambda: self._driver.closed)

    def kick(self) -> None:
        """Wake whoever waits for work."""
        self._driver.signal()

    def hold(self) -> None:
        """Admit nothing more: what runs and prepares is finished, then the engine is idle until `release`."""
        self._driver.held = True

    def release(self) -> None:
        """End a hold."""
        self._driver.held = False
        self.kick()

    def run_at_boundary(self, task: Callable[[], Any]) -> Task:
        """Run ``task`` on the driving thread between steps, one per iteration, under the lock, not while held."""
        queued = Task(self, task)
        self._driver.add_task(queued)
        return queued

    def stats(self) -> dict[str, Any]:
        """Return gauges and counters (see `gauges.gauges`), and the state cache's own."""
        return {**gauges(self._driver), "state_cache": dict(self._store.stats())}

    def close(self) -> None:
        """Reject what is left with `errors.EngineClosed` and release everything. Idempotent; legal from any thread.

        Where another thread drives, it does so at its next step; inside a step, at its end; else at once.
        """
        with self._driver.mutex:
            self._driver.closed = True
            self._driver.signal()
        if self._drives() and not self._stepping:
            self._driver.fail_all(EngineClosed(), queued=True)
            mx.clear_cache()

    def __enter__(self) -> Engine:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # --- inside ----------------------------------------------------------------------------------------------

    def _takes(self) -> bool:
        """Whether the queue takes one more."""
        return self._waiting() < self.bound.config.scheduler.max_queued

    def _clock(self) -> float:
        """Return seconds, as everything that decides by time sees them."""
        return time.monotonic()

    def _open_store(self) -> StateCache:
        return self.bound.open_state_cache()

    def _waiting(self) -> int:
        """Return how many requests wait."""
        return self._driver.queued
