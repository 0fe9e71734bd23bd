"""What goes wrong below the engine: forwards, scores, samplers and merges fail here, as the plans say."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from harness.model import first_tokens, sides
from harness.plan import BY_POSITION, SHIFTS, Plan, Planned, Transient

if TYPE_CHECKING:
    from harness.world import World

QUIET = 12
"""Forwards after a poisoned one during which no transient error is added: it could be laid at an innocent door."""


class Faults:
    """Carries the faults of the plans out, and the transient errors of forwards by their number."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.forwards = 0
        self.transients = 0
        self.lost = 0
        """Transient errors of evaluation."""
        self.guilty: set[tuple[int, int]] = set()
        """Plans whose poison was met, with the number of the rebuild, and those over which the device failed."""
        self.join_failed: set[int] = set()
        self._joins: Counter[int] = Counter()
        self._half = self._raised = False
        self._quiet = 0
        self._transients = list(world.setting.transients)
        self._losses = list(world.setting.losses)
        self._suspects = {plan.prompt[0]: plan for plan in world.plans.values() if plan.fault in BY_POSITION}
        self._earliest: dict[str, int] = {}
        """The first position of each fault that any plan has."""
        for plan in self._suspects.values():
            self._earliest[plan.fault] = min(plan.at, self._earliest.get(plan.fault, plan.at))
        self._by_seed = {plan.seed: plan for plan in world.plans.values()}

    def install(self) -> None:
        """Give the model and the layout their hooks."""
        model = self.world.model
        model.before, model.between = self._before, self._between
        if "nan" in self._earliest:
            model.spoiled = self._spoiled
        if self._losses or "device" in self._earliest:
            model.lost = self._lost
        self.world.tools.on_join = self._joining
        self.world.tools.on_wait = lambda: self.world.count("waits for bytes")

    def check_sampler(self, params) -> None:
        """Raise where a row is to be failed by its sampler now."""
        for each in params:
            plan = self._by_seed.get(each.seed)
            if plan is None or plan.fault != "sampler" or plan.index not in self.world.handles:
                continue
            row = self.world.row(plan)
            if row.sampled >= plan.at and not row.over:
                self.world.count("sampler raises")
                raise Planned("sampler", plan.index)

    def _before(self, cache, ids) -> None:
        self.forwards += 1
        self._check_company()
        raised, self._raised = self._raised, False
        guilty = [plan for plan in self._guilty(cache, ids, "poison") if plan is not None]
        if guilty:
            self.world.count("poisoned row")
            self.guilty.add((guilty[0].index, self.world.tools.rebuilds))
            self._quiet = self.forwards + QUIET
            raise Planned("poison", guilty[0].index)
        due = self._transients and self.forwards >= self._transients[0][0]
        if due and not raised and self.forwards > self._quiet:
            _, self._half = self._transients.pop(0)
            self._raised = True
            self.transients += 1
            self.world.count("forward raises half way" if self._half else "forward raises")
            if not self._half:
                raise Transient

    def _between(self, cache, ids) -> None:
        if self._half:
            self._half = False
            raise Transient

    def _lost(self, cache, ids) -> bool:
        """Whether this forward fails when it is evaluated. Not by itself in a rebuild: who fails again there is guilty."""
        guilty = [plan for plan in self._guilty(cache, ids, "device") if plan is not None]
        due = self._losses and self.forwards >= self._losses[0] and not self.world.tools.rebuilding
        if guilty:
            self.world.count("device fails over a row")
            self.guilty.add((guilty[0].index, 0))
        elif due:
            self._losses.pop(0)
            self.lost += 1
            self.world.count("device fails")
        else:
            return False
        error = Planned("device", guilty[0].index) if guilty else Transient()
        self.world.tools.fail_device(error, late=self.forwards % 2 == 0)
        return True

    def _check_company(self) -> None:
        """A forward runs under the lock, with its rows' adapter entered, and for rows of one key."""
        world = self.world
        world.require(world.lock.held, "a forward ran without the lock")
        preparing = set(world.driver.preparing_ids)
        rows = [*world.driver.group.rows, *(world.row(p) for p in world.plans.values() if p.id in preparing)]
        world.require(len({row.key for row in rows}) <= 1, "rows of two keys share a group")
        world.require(len(rows) <= world.setting.scheduler["max_batch"], "more rows than max_batch")
        entered = all(SHIFTS[row.key.adapter] == world.model.shift for row in rows)
        world.require(entered, "another adapter is entered")

    def _guilty(self, cache, ids, fault: str) -> list[Plan | None]:
        """Return per line of ``ids`` the plan whose fault this forward reaches: a mixed one has a line for each token."""
        earliest = self._earliest.get(fault)
        reached = sides(cache, ids)
        if earliest is None or all(max(held.tokens) + part.shape[1] <= earliest for held, part in reached):
            return []  # nobody asks the arrays whose rows they hold: that takes longer than all the rest
        guilty = []
        for held, part in reached:
            width, lines = part.shape[1], part.size if part is not ids else len(part)
            for tag, start in zip(first_tokens(held, part), held.tokens, strict=True):
                plan = self._suspects.get(tag)
                meets = plan is not None and plan.fault == fault and start + width > plan.at
                guilty += [plan if meets else None] * (lines // len(part))
        return guilty

    def _spoiled(self, cache, ids) -> list[bool] | None:
        spoiled = [plan is not None for plan in self._guilty(cache, ids, "nan")]
        if any(spoiled):
            self.world.count("NaN row")
        return spoiled if any(spoiled) else None

    def _joining(self, cache, other) -> None:
        """Fail a merge on the last layer, so that the others must be undone."""
        world = self.world
        if not world.preparing_now or world.tools.rebuilding or other.keys is None or other.rows != 1:
            return
        plan = world.plans[int(other.keys[0, 0, 0, 0].item())]
        if plan.fault == "join":
            self._joins[plan.index] += 1
            if self._joins[plan.index] == world.setting.layers:
                self.join_failed.add(plan.index)
                world.count("merge raises")
                raise Planned("join", plan.index)
