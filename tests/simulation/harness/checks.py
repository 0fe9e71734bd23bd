"""The invariants: after each step, for each stored state, and at the end of a schedule."""

from __future__ import annotations

import gc
import math
import weakref
from concurrent.futures import CancelledError

from harness.model import value
from harness.plan import REFUSED, SHIFTS, Fate, Plan, Planned, fate
from harness.world import Violation, World
from oarlock.core import FinishReason, Result
from oarlock.core.errors import EngineClosed, NonFiniteLogits, RecoveriesExhausted


def after_step(world: World) -> None:
    """Check what must hold between any two steps."""
    if world.violations:
        raise AssertionError(world.violations[0])
    driver = world.driver
    world.require(not world.tools.warnings["state_dropped"], "a state does not cover the tokens that are accounted")
    held = world.held_bytes()
    world.require(world.budget is None or held <= world.budget, f"{held} bytes are held of {world.budget}")
    world.require(world.lock.held or not (driver.active or driver.preparing), "rows are kept without the lock")
    for done in driver.group.log.forwards:
        late = world.barred & set(done.ids)
        world.require(not late, f"{late} were cancelled before they ran, and were forwarded")


def published(world: World, kept, key, tokens: tuple[int, ...], states) -> None:
    """Check one entry of the store. Requests may share their beginnings: one of them must have a right to it."""
    owners = {row.id: row for row in kept if tokens[: row.prompt_tokens] == row.prompt_ids[: len(tokens)]}
    wrong = []
    for row in owners.values():
        try:
            _check_entry(world, row, key, tokens, states)
        except Violation as violation:
            wrong.append(str(violation))
    world.require(len(wrong) < len(owners), "; ".join(wrong) or f"nobody has {tokens}")


def _check_entry(world: World, row, key, tokens: tuple[int, ...], states) -> None:
    """Check whose it is, under which key, and every number in it."""
    plan = world.of(row.id)
    require(row.error is None and row.reason is not FinishReason.CANCELLED, f"{row.id} failed and was stored")
    require(plan.reuse, f"{row.id} must not be stored")
    require(key["namespace"] == plan.namespace, f"{row.id} was stored under namespace {key['namespace']!r}")
    boundary = len(tokens) < len(plan.prompt)
    others = [other.prompt for other in world.plans.values() if other is not plan]
    shared = {min(_common(plan.prompt, prompt), len(prompt) - 1) for prompt in others}
    ends = not boundary or len(tokens) in {len(plan.prompt) - 1, *shared}
    require(ends, f"{row.id}: a boundary holds {len(tokens)} tokens")
    own = (*plan.prompt, *world.delivered[plan.index])
    tail = tokens[len(own) :]
    require(tokens[: len(own)] == own[: len(tokens)], f"{row.id} was stored under {tokens}, its tokens are {own}")
    require(not tail or (len(tail) == 1 and tail[0] in plan.eos), f"{row.id} was stored with {tail}")
    numbers = [value(token, position, SHIFTS[plan.adapter]) for position, token in enumerate(tokens)]
    for state in states:
        arrays = state.arrays()
        require(state.tokens == len(tokens), f"{row.id}: a layer holds {state.tokens} of {len(tokens)} tokens")
        require(arrays["keys"][0, 0, :, 0].tolist() == list(tokens), f"{row.id}: the keys are another row's")
        held = arrays["values"][0, 0, :, 0].tolist()
        # NaN shows when the scores are read: never for a token that ends its row.
        unseen = plan.fault == "nan" and not boundary
        same = [a == b or (unseen and math.isnan(a)) for a, b in zip(held, numbers, strict=True)]
        require(all(same), f"{row.id}: the values are another row's")


def _common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def require(ok: bool, message: str) -> None:
    if not ok:
        raise Violation(message)


def at_end(world: World) -> None:
    """Check every request's outcome and that nothing is left."""
    if world.violations:
        raise AssertionError(world.violations[0])
    told = {index: fate(plan, world.setting.layers) for index, plan in world.plans.items()}
    # What another row is looked up by: its prompt, and after a preemption its answer.
    known = [(*plan.prompt, *told[index].tokens) for index, plan in world.plans.items() if plan.reuse]
    for index, plan in world.plans.items():
        if index in world.handles:
            _check_request(world, plan, told[index], known)
    lost = [plan.id for plan in world.plans.values() if plan.index in world.handles and _not_stored(world, plan)]
    most = world.tools.raised * world.setting.scheduler["max_batch"]  # who ended in the step that failed
    world.require(len(lost) <= most, f"{lost} finished and were not stored")
    for raises, wait in world.tasks:
        world.require(wait not in world.given_up or isinstance(wait._error, CancelledError), "a task came back")
        try:
            world.require(wait.result(0) == 7 and not raises, "a task gave another value")
        except Planned:
            world.require(raises, "a task failed by itself")
        except EngineClosed:
            world.require(world.closed, "a task was refused by an open engine")
        except CancelledError:
            world.require(wait in world.given_up, "a task was cancelled by itself")
    stats = world.engine.stats()
    counts = {name: stats[name] for name in ("active_rows", "pending_rows", "preparing_rows", "kv_bytes")}
    world.require(not any(counts.values()), f"something is left: {counts}")
    each = 2 * math.ceil(math.log2(world.setting.scheduler["max_batch"])) + 1
    allowed = world.faults.transients + 2 * world.tools.rebuilds + len(world.faults.guilty) * each
    if world.budget is not None:  # it may have rows built again one by one
        allowed += world.tools.rebuilds * world.setting.scheduler["max_batch"]
    world.require(stats["retries"] <= allowed, f"{stats['retries']} retries, at most {allowed}")
    raised, rebuilds = world.tools.raised, world.tools.rebuilds
    answered = rebuilds <= raised <= rebuilds + world.closed  # who closes waits for states, and gives up what fails
    world.require(answered, f"{rebuilds} rebuilds after {raised} errors of the device")
    world.require(not world.lock.held, "the lock is still held")
    world.require(world.model.shift == 0, "an adapter is still entered")
    world.require(not world.store.leases, f"leases are left: {world.store.leases}")
    world.require(world.store.boundaries >= world.prepares, "a preparation advanced without a boundary")


def nothing_lives(world: World) -> None:
    """Check that no cache outlives the rows, though their outcomes are kept, and that rows die with their handles."""
    if len(world.tools.caches):
        gc.collect()
    world.require(not len(world.tools.caches), f"{len(world.tools.caches)} caches are still alive")
    rows = [weakref.ref(handle._row) for handle in world.handles.values()]
    world.handles.clear()
    world.store.kept.clear()
    if any(row() is not None for row in rows):
        gc.collect()
    world.require(all(row() is None for row in rows), "rows outlive their handles")


def _check_request(world: World, plan: Plan, told: Fate, known: list[tuple[int, ...]]) -> None:
    require, handle = world.require, world.handles[plan.index]
    outcome = handle.outcome
    require(handle.done and outcome is not None, f"{plan.id} never settled")
    finished, failed = world.settled["finished", plan.id], world.settled["failed", plan.id]
    require((finished, failed) == ((1, 0) if isinstance(outcome, Result) else (0, 1)), f"{plan.id} settled twice")
    require(world.ended[plan.index] == 1, f"{plan.id} ended {world.ended[plan.index]} times")
    admitted, released = world.store.admitted[plan.id], world.store.released[plan.id]
    left = world.settled["preempted", plan.id]
    require(left <= admitted <= left + 1, f"{plan.id} was admitted {admitted} times and left {left} times")
    once = released == left + 1 or (not admitted and not released)
    require(once, f"{plan.id} gave its lease back {released} times and left {left} times")
    row, got = world.row(plan), tuple(world.delivered[plan.index])
    require(row.sampled <= row.max_tokens, f"{plan.id} was sampled {row.sampled} times")
    length = len(plan.prompt)
    wanted = any(length <= len(ids) and ids[:length] == plan.prompt for ids in known)
    require(wanted or plan.prompt not in world.store.looked_up, f"{plan.id} must not be looked up")
    require(got == told.tokens[: len(got)], f"{plan.id} got {got}; alone it gets {told.tokens}")
    if isinstance(outcome, Result):
        kept = len(got) - told.taken_back if outcome.finish_reason == told.end else len(got)
        require(outcome.token_ids == got[:kept], f"{plan.id} has {outcome.token_ids} and was given {got}")
    if _natural(world, plan, told, got, outcome):
        return
    if isinstance(outcome, EngineClosed):
        require(world.closed, f"{plan.id} was closed by an open engine")
        return
    require(plan.index in world.cancelled, f"{plan.id} ended as {outcome!r}; alone: {told}, got {len(got)} tokens")
    require(getattr(outcome, "finish_reason", None) is FinishReason.CANCELLED, f"{plan.id} ended as {outcome!r}")
    _, before = world.cancelled[plan.index]
    require(len(got) == before, f"{plan.id} had {before} tokens when it was cancelled and got {len(got)}")


def _not_stored(world: World, plan: Plan) -> bool:
    """A row that finished is stored, unless it asked not to be or shared a batch with too short a prompt."""
    row, outcome = world.row(plan), world.handles[plan.index].outcome
    short = row.merged and len(plan.prompt) < world.setting.publish_min_tokens
    unwanted = (
        not plan.reuse or plan.lag or short or world.store.broken is not None or row.reason is FinishReason.CANCELLED
    )
    if unwanted or not isinstance(outcome, Result):
        return False
    return not any(tokens[: len(plan.prompt)] == plan.prompt for _, tokens, _ in world.store.entries)


def _natural(world: World, plan: Plan, told: Fate, got: tuple[int, ...], outcome) -> bool:
    """Say whether a request ended as it does alone."""
    again = world.settled["preempted", plan.id] > 0
    if isinstance(outcome, Planned) and outcome.kind == "join":
        return outcome.index == plan.index and plan.index in world.faults.join_failed and (len(got) <= 1 or again)
    if isinstance(outcome, RecoveriesExhausted):
        limit = world.engine.bound.config.scheduler.max_recoveries
        return outcome.limit == limit < world.tools.rebuilds
    if isinstance(outcome, Planned) and outcome.kind == "device":
        # Its first token is read with the step behind it where nothing else is: that step's failure costs it.
        scheduler = world.engine.bound.config.scheduler
        deferred = scheduler.pipeline and not scheduler.early_first_token
        return outcome.index == plan.index and told.end == "device" and len(told.tokens) - len(got) <= deferred
    if got != told.tokens:
        return False
    if isinstance(outcome, Result):
        usage = outcome.usage
        world.require(usage.prompt_tokens == len(plan.prompt), f"{plan.id}: {usage}")
        same = told.end == outcome.finish_reason
        world.require(not same or usage.generated_tokens == told.generated, f"{plan.id}: {usage}, alone {told}")
        return same and plan.index not in world.faults.join_failed
    if isinstance(outcome, NonFiniteLogits):
        return told.end == "nan" and outcome.request_id == plan.id
    known = isinstance(outcome, Planned) and (outcome.kind, outcome.index) == (told.end, plan.index)
    return known and (told.end in (*REFUSED, "callback", "sampler", "poison"))
