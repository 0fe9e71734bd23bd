"""Random schedules, each made from its number alone: the same number is the same schedule on any machine."""

from __future__ import annotations

import random
from collections import Counter

import attrs

from harness import checks
from harness.instruments import Instruments
from harness.model import VOCABULARY
from harness.plan import BY_POSITION, REFUSED, Plan, fate
from harness.world import Setting, World

FAULTS = ("callback", "callback", "false", "false", "sampler", "sampler", "poison", "poison", "nan", "nan", "join",
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
    scheduler = {
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
        broken_store=random.Random(rng.random()) if rng.random() < 0.25 else None,
        transients=tuple((number, rng.random() < 0.5) for number in numbers),
    )


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
    known = [plan for plan in world.plans if plan.index in world.handles]
    things = ("submit", "cancel", "hold", "release", "task", "cancel task", "close", "")
    thing = rng.choices(things, (50, 5, 1.5, 40 if world.driver.held else 1, 6, 1.5, 0.3, 15))[0]
    if thing == "submit" and world.waiting:
        world.submit()
    elif thing == "cancel" and known and world.cancels:
        world.cancels -= 1
        living = [plan for plan in known if world.where(plan) != "ended"]
        world.cancel(rng.choice(living if living and rng.random() < 0.8 else known))
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


def run(number: int, tools: Instruments) -> Report:
    """Make and run one schedule; raise `AssertionError` with its number where an invariant does not hold."""
    rng = random.Random(number)
    tools.warnings.clear()
    world = None
    try:
        chosen = mixed(setting(rng), number)
        world = World(chosen, plans(rng, chosen.layers), tools, checks.published)
        world.consumer_acts = lambda _: act(rng, world)
        world.cancels = rng.choice((0, 1, 2, 3, 6))
        _drive(rng, world)
        checks.at_end(world)
        checks.nothing_lives(world)
        _one_more(world)
    except Exception as error:
        msg = f"schedule {number}: {type(error).__name__}: {error}"
        raise AssertionError(msg) from error
    finally:
        tools.on_join = None
    shared = world.engine.stats()["mixed_forwards"]
    return Report(len(world.delivered), world.occupancy, world.table, world.steps, shared)


def _drive(rng: random.Random, world: World) -> None:
    limit = 200 + 4 * sum(len(plan.prompt) + plan.max_tokens for plan in world.plans)
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
    plan = Plan(index=len(world.plans), prompt=(60, 7, 7), max_tokens=3)
    world.plans.append(plan)
    world.waiting.append(plan)
    world.submit()
    while world.step():
        checks.after_step(world)
    world.step()
    checks.at_end(world)
    world.engine.close()
    checks.nothing_lives(world)
