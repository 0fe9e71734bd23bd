"""Random schedules, each made from its number alone: the same number is the same schedule on any machine."""

from __future__ import annotations

import random
from collections import Counter

import attrs

from harness import checks
from harness.instruments import COLUMN_STEP, Instruments
from harness.model import VOCABULARY
from harness.plan import BY_POSITION, REFUSED, Plan, fate
from harness.world import Setting, World

FAULTS = ("callback", "callback", "false", "false", "sampler", "sampler", "poison", "poison", "nan", "nan", "device", "device", "join",
          "end", "end", *REFUSED)  # fmt: skip


@attrs.frozen
class Report:
    """What a schedule did: its requests, how often decode steps had how many rows, and the table of (event, phase).

    ``mixed``: forwards that decode and prefill shared.
    """

    requests: int
    occupancy: Counter
    table: Counter
    steps: Counter
    """Steps by (policy, phase)."""
    mixed: int


def setting(rng: random.Random) -> Setting:
    """Draw the engine of a schedule."""
    scheduler: dict = {
        "max_batch": rng.choice((1, 2, 3, 4, 4, 5, 5, 5)),
        "max_queued": rng.choice((2, 64, 64, 64)),
        "policy": rng.choice(("decode_first", "fifo", "prefill_first", "fair_share")),
        "stall_bound_ms": rng.choice((0, 0, 0, 60, 90)),
        "prefill_chunk": rng.choice((1, 4, 8, 16, 512, 512)),
        "prefill_batch_tokens": rng.choice((8, 64, 2048, 2048)),
        "tail_split": rng.random() < 0.7,
        "early_first_token": rng.random() < 0.6,
        "pipeline": rng.random() < 0.7,
        "vectorised_sampling": rng.random() < 0.7,
    }
    numbers = sorted(rng.sample(range(1, 80), rng.choice((0, 0, 1, 2, 4))))
    return Setting(
        scheduler=scheduler,
        publish_min_tokens=rng.choice((1, 4, 16, 64)),
        layers=rng.choice((1, 1, 2)),
        room=rng.choice((1, 2, 3, *[99] * 15)),
        broken_store=rng.getrandbits(30) if rng.random() < 0.25 else None,
        transients=tuple((number, rng.random() < 0.5) for number in numbers),
    )


def troubled(rng: random.Random, setting: Setting, plans: list[Plan]) -> Setting:
    """Add what concerns memory, the device and the end; a budget may be too small for half of the requests."""
    scheduler = {"max_recoveries": rng.choice((8, 8, 8, 8, 8, 8, 8, 0, 1, 2))}
    if rng.random() < 0.5:
        sizes = sorted(column_bytes(setting.layers, len(plan.prompt) + plan.max_tokens) for plan in plans)
        size = sizes[-1] if rng.random() < 0.8 else sizes[len(sizes) // 2]
        scheduler |= {
            "kv_budget": int(size * rng.choice((1, 1.3, 2, 3))),
            "overcommit": rng.choice((1.0, 1.5, 3.0, 5.0)),
        }
    losses = rng.sample(range(1, 80), rng.choice((0, 0, 0, 0, 1, 1, 2, 4)))
    ends = frozenset(what for what in ("lock", "method", "adapter") if rng.random() < 0.3)
    return attrs.evolve(setting, scheduler=setting.scheduler | scheduler, losses=tuple(sorted(losses)), ends=ends)


def stressed(rng: random.Random, setting: Setting) -> Setting:
    """Let the device fail often, and every end raise: what happens in a rebuild would be too seldom to be counted on."""
    losses = tuple(sorted(rng.sample(range(1, 60), 6)))
    return attrs.evolve(setting, losses=losses, ends=frozenset(("lock", "method", "adapter")))


def crowded(rng: random.Random, setting: Setting, plans: list[Plan]) -> Setting:
    """Let short requests outgrow a budget that took them on credit, beside two that never fit."""
    for plan in plans:
        plan.prompt, plan.max_tokens = plan.prompt[:4], 25
    for plan in rng.sample(plans, 2):
        plan.prompt += tuple(rng.randrange(VOCABULARY) for _ in range(45))
    budget = {"kv_budget": column_bytes(setting.layers, 64), "overcommit": 5.0}
    return attrs.evolve(setting, scheduler=setting.scheduler | budget)


def column_bytes(layers: int, tokens: int) -> int:
    """Return what a row of the stub's takes: a float32 for a key and one for a value, in whole steps of columns."""
    return 8 * layers * -(-tokens // COLUMN_STEP) * COLUMN_STEP


def mixed(setting: Setting, number: int) -> Setting:
    """Let every second schedule mix its steps, with budgets from one token on."""
    chosen = {"mixed": number % 2 == 0, "mixed_token_budget": (1, 9, 30, 256)[number // 2 % 4]}
    return attrs.evolve(setting, scheduler=setting.scheduler | chosen)


def plans(rng: random.Random, layers: int) -> list[Plan]:
    """Draw the requests of a schedule."""
    adapters = ("", "", "red", "blue") if rng.random() < 0.12 else ("",)
    methods = (None, None, "other") if rng.random() < 0.12 else (None,)
    drawn: list[Plan] = []
    for index in range(rng.randint(4, 12)):
        plan = Plan(
            index=index,
            prompt=(index, *(rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 2, 5, 9, 14, 20, 39))))),
            max_tokens=rng.choice((1, 2, 4, 8, 14, 25)),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.getrandbits(60),
            priority=rng.choice((0, 0, 0, 1, 5)),
            chunk=rng.choice((None, None, None, None, 1, 4, 7, 20)),
            reuse=rng.random() < 0.85,
            namespace=rng.choice(("", "", "n")),
            lazy_namespace=rng.random() < 0.3,
            adapter=rng.choice(adapters),
            method=rng.choice(methods),
            acts_at=rng.choice((None, None, None, None, 0, 1, 3)),
            answer=rng.choice((None, None, 0, "", True)),
        )
        _add_fault(rng, plan)
        _add_family(rng, plan, drawn, layers)
        if rng.random() < 0.2:  # an end token that the row really meets
            plan.eos = frozenset(rng.sample(fate(plan, layers).tokens, 1)) if fate(plan, layers).tokens else plan.eos
        drawn.append(plan)
    return drawn


def _add_fault(rng: random.Random, plan: Plan) -> None:
    if rng.random() < 0.6:
        return
    plan.fault = rng.choice(FAULTS)
    plan.at = rng.randrange(plan.max_tokens)
    if plan.fault in BY_POSITION:
        plan.at = rng.randrange(len(plan.prompt) + plan.max_tokens)
    if plan.fault in ("callback", "false"):
        plan.lag = (0, 0, 1, 2)[plan.seed % 4]
    if plan.fault == "sampler":
        plan.temperature = 0.8  # so that it takes the stub's sampler


def _add_family(rng: random.Random, plan: Plan, others: list[Plan], layers: int) -> None:
    """Let a prompt go on where an earlier one, or its answer, ended: prefix reuse."""
    told_apart = (*BY_POSITION, "join")  # by their first token
    parents = [other for other in others if other.fault not in told_apart and other.prompt[0] == other.index]
    if plan.fault not in told_apart and parents and rng.random() < 0.35:
        parent = rng.choice(parents)
        known = (*parent.prompt, *fate(parent, layers).tokens)
        plan.prompt = (*known[: rng.randint(1, len(known))], *plan.prompt[:3])
        plan.namespace, plan.adapter = parent.namespace, rng.choice((parent.adapter, plan.adapter))


def act(rng: random.Random, world: World) -> None:
    """Do one thing to the engine, or nothing."""
    known = [plan for plan in world.plans.values() if plan.index in world.handles]
    things = ("submit", "cancel", "hold", "release", "task", "cancel task", "close", "")
    weights = (50, 5, 1.5, 40 if world.driver.held else 1, 6, 1.5, 0.3, 15)
    if world.tools.rebuilding:
        weights = (25, 15, 8, 60 if world.driver.held else 8, 8, 4, 3, 5)
    thing = rng.choices(things, weights)[0]
    if thing in world.without:
        return
    if thing == "submit" and world.waiting:
        world.submit()
    elif thing == "cancel" and known and world.cancels:
        world.cancels -= 1
        living = [plan for plan in known if world.where(plan) != "ended"]
        alive = 0.5 if world.tools.rebuilding else 0.8
        world.cancel(rng.choice(living if living and rng.random() < alive else known))
    elif thing == "hold":
        world.hold()
    elif thing == "release":
        world.release()
    elif thing == "task":
        world.task(raises=rng.random() < 0.4)
    elif thing == "cancel task" and world.tasks:
        world.cancel_task(rng.choice(world.tasks[-3:])[1])
    elif thing == "close":
        world.close()


@attrs.frozen(kw_only=True)
class Script:
    """A whole schedule: the engine, its requests, and the seed of what is done to it. ``without`` is never done."""

    setting: Setting
    plans: tuple[Plan, ...]
    seed: int = 0
    cancels: int = 0
    without: frozenset[str] = frozenset()


def script(number: int) -> Script:
    """Make a schedule from its number."""
    rng = random.Random(number)
    chosen = mixed(setting(rng), number)
    drawn = plans(rng, chosen.layers)
    chosen = troubled(rng, chosen, drawn)
    if number % 4 == 3:
        chosen = stressed(rng, chosen)
    if number % 8 in (1, 5, 7):
        chosen = crowded(rng, chosen, drawn)
    seed, cancels = rng.getrandbits(30), rng.choice((0, 1, 2, 3, 6))
    return Script(setting=chosen, plans=tuple(drawn), seed=seed, cancels=cancels)


def run(number: int, tools: Instruments) -> Report:
    """Make and run one schedule; raise `AssertionError` with its number where an invariant does not hold."""
    try:
        return play(script(number), tools)
    except Exception as error:
        msg = f"schedule {number}: {type(error).__name__}: {error}"
        raise AssertionError(msg) from error


def play(script: Script, tools: Instruments) -> Report:
    """Run a schedule; whatever it raises breaks an invariant."""
    rng = random.Random(script.seed)
    tools.restart()
    world = World(script.setting, list(script.plans), tools, checks.published)
    world.consumer_acts = lambda _: act(rng, world)
    world.cancels, world.without = script.cancels, script.without
    try:
        _drive(rng, world)
        checks.at_end(world)
        checks.nothing_lives(world)
        _one_more(world)
    finally:
        tools.restart()
    shared = world.engine.stats()["mixed_forwards"]
    return Report(len(world.delivered), world.occupancy, world.table, world.steps, shared)


def _drive(rng: random.Random, world: World) -> None:
    limit = 200 + 4 * sum(len(plan.prompt) + plan.max_tokens for plan in world.plans.values())
    hurry = rng.choice(((0, 1), (0, 1, 3), (0, 0, 0, 0, 12), (4, 0, 1)))
    for _ in range(rng.choice((0, 3, 12))):
        act(rng, world)
    for step in range(limit):
        for _ in range(rng.choice(hurry)):
            act(rng, world)
        if (step > limit // 2 or not world.waiting) and world.driver.held and rng.random() < 0.2:
            world.release()
        busy = world.step()
        checks.after_step(world)
        if not busy and not world.waiting and not world.driver.held and not world.driver.queued:
            world.step()  # an idle engine gives the lock back
            if not world.driver.busy:
                return
        if world.closed and not busy:
            return
    stats = {name: value for name, value in world.engine.stats().items() if value}
    msg = f"not done after {limit} steps: {stats}"
    raise AssertionError(msg)


def _one_more(world: World) -> None:
    """The engine is as good as new: one more request, unless it is closed."""
    if world.closed:
        return
    plan = Plan(index=max(world.plans) + 1, prompt=(60, 7, 7), max_tokens=3)
    world.tools.pending = None  # what nobody reads any more
    world.consumer_acts = lambda _: None
    world.plans[plan.index] = plan
    world.waiting.append(plan)
    world.submit()
    while world.step():
        checks.after_step(world)
    world.step()
    checks.at_end(world)
    world.close()
    checks.nothing_lives(world)
    world.require(not world.lock.held and not world.method.open_now, "something was not closed")
