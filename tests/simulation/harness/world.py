"""One engine, its plans, and everything that happens to it. `checks` says what is allowed, `schedule` what is tried."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import attrs

from harness.faults import Faults
from harness.instruments import Instruments, Lock
from harness.model import StubModel
from harness.plan import SHIFTS, Plan, Planned, causes
from harness.plugins import Adapter, OtherMethod, Plugin, Store, StubSampler
from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.errors import EngineClosed, NeverFits, QueueFull


class Violation(AssertionError):
    """An invariant does not hold."""


@attrs.frozen(kw_only=True)
class Setting:
    """How the engine of a schedule is built, and what happens to it that no plan says."""

    scheduler: dict
    publish_min_tokens: int = 64
    layers: int = 1
    room: int = 99
    broken_store: int | None = None
    """A seed: one in ten of the store's answers is an error."""
    ends: frozenset[str] = frozenset()
    """What raises while the engine is closed: "lock", "method", "adapter"."""
    losses: tuple[int, ...] = ()
    """Forward numbers: the next one from each on fails when it is evaluated, once."""
    transients: tuple[tuple[int, bool], ...] = ()
    """(forward number, whether half way): the next forward from that number on raises once."""


class World:
    """Builds the engine, does things to it, lets it do things to its consumers, and counts (event, phase)."""

    def __init__(self, setting: Setting, plans: list[Plan], tools: Instruments, published) -> None:
        self.setting, self.tools = setting, tools
        self.plans = {plan.index: plan for plan in plans}
        self.table: Counter[tuple[str, str]] = Counter()
        self.steps: Counter[tuple[str, str]] = Counter()
        self.violations: list[str] = []
        self.waiting = list(plans)
        self.handles: dict[int, Any] = {}
        self.delivered: dict[int, list[int]] = {}
        self.settled: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[int] = Counter()
        self.cancelled: dict[int, tuple[str, int]] = {}
        """By plan: where its row was, and how many tokens it had, when it was first cancelled."""
        self.barred: set[str] = set()
        """Ids of rows that were cancelled between two steps before they ran."""
        self.tasks: list[tuple[bool, Any]] = []
        self.given_up: list[Any] = []
        """Tasks that were cancelled before they started."""
        self.stalled: Counter[str] = Counter()
        self.occupancy: Counter[int] = Counter()
        self.prepares = 0
        self.closed = False
        self.ended_badly: set[str] = set()
        self.stepping = self.preparing_now = False
        self.closing = ""
        """The phase in which the engine was closed."""
        self.end_errors: list[Planned] = []
        """What the ends raised meanwhile."""
        self.consumer_acts = lambda plan: None
        self.cancels = 0
        self.without: frozenset[str] = frozenset()
        self.model = StubModel(setting.layers)
        broken = random.Random(setting.broken_store) if setting.broken_store is not None else None
        self.store = Store(lambda *entry: published(self, *entry), room=setting.room, broken=broken)
        self.method = OtherMethod()
        self.lock = Lock(self._lock_released)
        self.budget = setting.scheduler.get("kv_budget")
        self.faults = Faults(self)
        self._start()

    def _start(self) -> None:
        plugin = Plugin(
            sampler=StubSampler(self.faults.check_sampler),
            store=self.store,
            method=self.method,
            adapters=tuple(Adapter(name, lambda: self._end("adapter")) for name in SHIFTS if name),
            seen=self._seen,
        )
        config = {
            "scheduler": {"verify": False, **self.setting.scheduler},
            "state_cache": {"name": "recording", "publish_min_tokens": self.setting.publish_min_tokens},
        }
        self.engine = Engine(self.model, config=config, plugins=[plugin], lock=self.lock)
        self.driver = self.engine._driver
        ticks = itertools.count()
        self.engine._scheduler.clock = self.driver.group.pace.clock = lambda: next(ticks) * 0.01
        self.faults.install()
        self.tools.on_close = lambda: self._end("method")
        self.store.failed = lambda: self.count("state cache raises")
        self.store.refuses = self._refuse
        prepare, decode = self.driver.prepare, self.driver.decode
        self.driver.prepare = lambda work=None: self._prepare(lambda: prepare(work))
        self.driver.decode = lambda work=None: self._decode(lambda: decode(work))

    # --- what is going on ---------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        if self.tools.rebuilding:
            return "rebuilding"
        names = {(False, False): "idle", (True, False): "preparing", (False, True): "running"}
        return names.get((self.driver.preparing, self.driver.active > 0), "both")

    def count(self, event: str) -> None:
        self.table[event, self.phase] += 1

    def require(self, ok: bool, message: str) -> None:
        """Note a violation, and raise it: inside a callback the engine would keep it for itself."""
        if not ok:
            self.violations.append(message)
            raise Violation(message)

    def row(self, plan: Plan) -> Any:
        return self.handles[plan.index]._row

    def where(self, plan: Plan) -> str:
        row = self.row(plan)
        if row.over or row.outcome is not None:
            return "ended"
        if row in self.driver.group.rows:
            return "running"
        if plan.id in self.driver.preparing_ids:
            return "preparing"
        return (
            "rebuilding" if self.tools.rebuilding and not any(other is row for other in self.driver.queue) else "queued"
        )

    def held_bytes(self) -> int:
        """Return the bytes of the arrays that hold running and preparing rows."""
        method, preparation = self.driver.group._method, self.driver._preparation
        caches = [*(method.caches() if method is not None else ())]
        caches += preparation._caches if preparation is not None else []
        return sum(array.nbytes for cache in caches for array in cache.arrays())

    # --- what is done to the engine -------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit the next plan; a full queue puts it off."""
        plan = self.waiting.pop(0)
        self.delivered.setdefault(plan.index, [])
        try:
            self.handles[plan.index] = self.engine.submit(
                self._request(plan), events=lambda event: self._event(plan, event), ended=lambda _: self._ended(plan)
            )
        except QueueFull as full:
            self.require(full.queued >= full.limit, "a queue with room turned a request away")
            self.waiting.insert(0, plan)
        except NeverFits as refusal:
            self.count("never fits")
            most = self.engine.bound.bytes_at(len(plan.prompt) + plan.max_tokens)
            self.require(refusal.needed == most > refusal.available == self.budget, f"{plan.id} was refused: {refusal}")
        except EngineClosed:
            self.require(self.closed, "an open engine says that it is closed")
        else:
            self.require(not self.closed, "a closed engine took a request")
            self.count("submit")

    def _request(self, plan: Plan) -> Request:
        lazy = plan.lazy_namespace or plan.fault == "namespace"
        return Request(
            id=plan.id,
            prompt_ids=plan.prompt,
            max_tokens=plan.max_tokens,
            stop_token_ids=sorted(plan.eos),
            sampling=SamplingParams(temperature=plan.temperature, seed=plan.seed),
            priority=plan.priority,
            prefill_chunk=plan.chunk,
            reuse_prefix=plan.reuse,
            namespace=(lambda: self._fail_or(plan, "namespace", plan.namespace)) if lazy else plan.namespace,
            adapter=plan.adapter or None,
            method=plan.method,
            on_token=lambda event: self._token(plan, event),
            on_admitted=lambda: self._fail_or(plan, "admitted", None),
        )

    def cancel(self, plan: Plan) -> None:
        where = self.where(plan)
        self.count(f"cancel {where}")
        if where != "ended":
            self.cancelled.setdefault(plan.index, (where, len(self.delivered[plan.index])))
            if where in ("queued", "preparing") and not self.stepping:
                self.barred.add(plan.id)
        self.handles[plan.index].cancel()

    def hold(self) -> None:
        self.count("hold")
        self.engine.hold()

    def release(self) -> None:
        self.count("release")
        self.engine.release()

    def task(self, raises: bool) -> None:
        """Queue a task, which may raise."""
        self.count("task raises" if raises else "task")

        def work() -> int:
            self.require(self.lock.held, "a task ran without the lock")
            self.require(not self.driver.held, "a task ran while held")
            if raises:
                raise Planned("task", -1)
            return 7

        try:
            self.tasks.append((raises, self.engine.run_at_boundary(work)))
        except EngineClosed:
            self.require(self.closed, "an open engine refused a task")

    def cancel_task(self, task: Any) -> None:
        self.count("cancel task")
        if task.cancel():
            self.given_up.append(task)

    def close(self) -> None:
        self.count("close")
        self.closing = self.closing or self.phase
        self.closed = True
        self._closes(self.engine.close)

    def step(self) -> bool:
        """Do one iteration; it raises nothing but what the ends do, whatever the schedule does."""
        self.stepping = True
        self.steps[self.setting.scheduler["policy"], self.phase] += 1
        try:
            return bool(self._closes(self.engine.step))
        finally:
            self.stepping = False

    def _closes(self, call: Any) -> Any:
        """Call what may close the engine, and check that it raises every error of the ends, and nothing else."""
        told: list[BaseException] = []
        try:
            return call()
        except (Planned, BaseExceptionGroup) as error:
            told = causes(error)
        finally:
            self.require(told == self.end_errors, f"the ends raised {self.end_errors}, the engine {told}")
            self.end_errors.clear()
            told.clear()  # a kept error of a task keeps this frame, and these would keep the rows

    def _end(self, what: str) -> None:
        """Raise at an end, once each."""
        if self.closing and what in self.setting.ends - self.ended_badly:
            self.ended_badly.add(what)
            self.table["end raises", self.closing] += 1
            self.end_errors.append(Planned(what, -1))
            raise self.end_errors[-1]

    # --- what the engine does to others ---------------------------------------------------------------------

    def _fail_or(self, plan: Plan, fault: str, answer: Any) -> Any:
        self.require(self.lock.held, f"{fault}: asked for without the lock")
        if plan.fault == fault:
            self.count("admission raises")
            raise Planned(fault, plan.index)
        return answer

    def of(self, request_id: str) -> Plan:
        """Return the plan of a request."""
        return self.plans[int(request_id[1:])]

    def _refuse(self, row) -> None:
        plan = self.of(row.id)
        if plan.fault == "admit":
            self.count("admission raises")
            raise Planned("admit", plan.index)

    def _token(self, plan: Plan, event) -> Any:
        got = self.delivered[plan.index]
        self.require(event.index == len(got), f"{plan.id} got token {event.index} after {len(got)} others")
        got.append(event.token)
        if plan.acts_at == event.index or self.tools.rebuilding:
            self.consumer_acts(plan)
        if event.index == plan.at + plan.lag and plan.fault in ("callback", "false"):
            return self._verdict(plan)
        return plan.answer  # None, 0 and "" go on like anything else

    def _verdict(self, plan: Plan) -> bool:
        """End the row as a consumer does: where it lags, by what was its verdict on a token before."""
        if plan.lag:
            if self.phase != "preparing":  # only a row that was preempted gets there: too seldom to be counted on
                self.count("consumer lags")
            fault = Planned("callback", plan.index) if plan.fault == "callback" else None
            self.handles[plan.index].interrupt(fault=fault, stop_at=None if fault else plan.at + 1)
            return True
        if plan.fault == "callback":
            self.count("callback raises")
            raise Planned("callback", plan.index)
        self.count("callback stops")
        return False

    def _event(self, plan: Plan, event) -> None:
        if event.finish_reason is not None and plan.fault == "end":
            self.count("end callback raises")
            raise Planned("end", plan.index)

    def _ended(self, plan: Plan) -> None:
        self.ended[plan.index] += 1
        if plan.fault == "end":
            raise Planned("end", plan.index)

    def _seen(self, hook: str, request: Request) -> None:
        self.settled[hook, request.id] += 1
        if hook == "preempted":
            self.count("preempted")
        if hook != "admitted":
            return
        self.require(not self.driver.held, f"{request.id} was admitted while held")
        mine = (-request.priority, int(request.id[1:]))  # plans are submitted in the order of their numbers
        for row in [row for row in self.driver.queue if not row.preempted]:
            other = (-row.request.priority, int(row.id[1:]))
            apart = self.setting.scheduler["policy"] == "fair_share" and other[0] != mine[0]
            self.require(apart or mine < other, f"{request.id} overtook {row.id}")

    def _lock_released(self) -> None:
        self.require(not self.driver.active and not self.driver.preparing, "the lock was given back between steps")
        self.require(self.model.shift == 0, "an adapter is entered without the lock")
        self._end("lock")

    def _prepare(self, prepare) -> None:
        preempted = self.driver.relief.preemptions
        for row in self.driver.group.rows:
            self.stalled[row.id] += 1
            if self.setting.scheduler["policy"] in ("decode_first", "fair_share"):
                self.require(self.stalled[row.id] <= 1, f"{row.id} waited for two preparation advances")
        self.preparing_now = True
        rebuilds = self.tools.rebuilds
        try:
            prepare()
        finally:
            self.preparing_now = False
        if self.tools.rebuilds > rebuilds:
            self.stalled.clear()  # whoever runs was built again, and took steps
        self.prepares += preempted == self.driver.relief.preemptions  # else nothing may have been left to advance

    def _decode(self, decode) -> None:
        self.stalled.clear()
        self.occupancy[self.driver.active] += 1
        decode()
