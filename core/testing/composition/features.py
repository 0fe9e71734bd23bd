"""What each feature of the table does with the rows of a cell, and the counts that prove that it was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from oarlock.core.engine import Engine
from oarlock.core.request import Request
from oarlock.core.testing.composition import rows
from oarlock.core.testing.composition.case import Case, cut
from oarlock.core.testing.composition.methods import Evidence
from oarlock.core.testing.drive import arrive


def seeds(case: Case) -> Evidence:
    """Rows draw by seeds of their own."""
    *_, shown = case.company(rows.SEEDS)
    return {**shown, "tokens that are not the best": case.changed(rows.SEEDS)}


def logprobs(case: Case) -> Evidence:
    """Rows record the log-probability of each token and of the three best, beside one that does not."""
    results, *_, shown = case.company(rows.LOGPROBS)
    entries = 0
    for got, want in zip(results, case.wanted(rows.LOGPROBS), strict=True):
        for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
            pairs = [(mine.logprob, theirs.logprob)]
            pairs += [(a[1], b[1]) for a, b in zip(mine.top, theirs.top, strict=True)]
            off = max(abs(a - b) for a, b in pairs)
            assert mine.token == theirs.token, f"{got.id} records another token"
            assert off <= case.storage.tolerance, f"log-probabilities of {got.id} are {off:.2g} off"
            entries += 1
    return {**shown, "entries": entries}


def grammar(case: Case) -> Evidence:
    """Three rows follow a constraint beside two free ones: two know what comes, of one nobody does."""
    *_, shown = case.company(rows.BOUND)
    if case.method.drafts:
        shown["tokens that constraints took back"] = case.templates.taken_back
    return {**shown, "tokens that constraints chose": case.changed(rows.BOUND)}


def penalties(case: Case) -> Evidence:
    """Rows are penalised for what they said, beside one that is not."""
    *_, shown = case.company(rows.PENALISED)
    return {**shown, "tokens that penalties changed": case.changed(rows.PENALISED)}


def prefix_reuse(case: Case) -> Evidence:
    """Rows begin with what a request before them computed, and with what each other does."""
    with case.engine(state_cache={"name": "memory", "publish_min_tokens": 4}) as engine:
        start = rows.prompts(case.storage)[0][: rows.SHARED]
        engine.generate([Request(prompt_ids=(*start, 0, 1), max_tokens=2)])
        results = arrive(engine, case.requests(), 2)
        stats = engine.stats()
    case.check(results, case.wanted(), stats)
    cached = sum(result.usage.cached_tokens for result in results)
    return {**case.shown(results, stats), "cached tokens": cached}


def checkpoint(case: Case) -> Evidence:
    """An engine is left in the middle of the rows, and another one ends them."""
    kept = {"name": "memory", "prefix_bytes": 0, "checkpoints": str(case.scratch)}
    asked = case.requests(checkpoint_interval=3)
    with case.engine(state_cache=kept) as first:
        handles = [first.submit(request) for request in asked]
        while min(len(handle._row.token_ids) for handle in handles if not handle.done) < 7:
            first.step()
        before, begun = first.stats(), case.watch.prefilled
    with case.engine(state_cache=kept) as second:
        results = second.generate(asked)
        after = second.stats()
    case.check(results, case.wanted(), before, after)
    both = {name: before[name] + after[name] for name in ("accepted_tokens", "drafted_tokens")}
    saved = sum(len(request.prompt_ids or ()) for request in asked) - (case.watch.prefilled - begun)
    return {**case.shown(results, both), "tokens of prompts that were not forwarded again": saved}


def adapter(case: Case) -> Evidence:
    """Rows of two adapters and of none decode together."""
    *_, shown = case.company(rows.ADAPTED, adapters=case.shared.adapters(case.storage))
    of = {f"row {row}": name for row, name in enumerate(rows.ADAPTERS)}
    several = sum(len({of[name] for name in ids}) > 1 for ids in case.watch.together)
    return {
        **shown,
        "tokens that adapters changed": case.changed(rows.ADAPTED),
        "companies of several adapters": several,
    }


def budget(case: Case) -> Evidence:
    """A budget of bytes holds some of the rows at a time; those that run never have more allocated."""
    limit, asked, waited = _limit(case), case.requests(), 0
    asked += [attrs.evolve(request, id=f"{request.id} again") for request in asked]
    with case.engine(kv_budget=limit) as engine:
        handles = [engine.submit(request) for request in asked]
        while not all(handle.done for handle in handles):
            engine.step()
            stats = engine.stats()
            assert stats["kv_bytes"] <= limit, f"{stats['kv_bytes']} bytes of {limit}"
            waited += stats["active_rows"] > 0 and stats["pending_rows"] > stats["preparing_rows"]
        results = [handle.result() for handle in handles]
    case.check(results, case.wanted() * 2, stats)
    return {**case.shown(results, stats), "steps in which rows waited": waited}


def _limit(case: Case) -> int:
    """Return the bytes of a joiner and three running rows, and of what the method may hold beside two of them."""
    with case.engine(verify=False) as engine:
        engine._driver.group.use_method(case.method.config["name"])
        return int(4.2 * _largest(case, engine)) + 2 * engine._driver.group.beside([_longest(case)])


def _longest(case: Case) -> int:
    return max(len(request.prompt_ids or ()) + (request.max_tokens or 0) for request in case.requests())


def _largest(case: Case, engine: Engine) -> int:
    """Return the bytes that the longest row comes to."""
    caches = engine.bound.open_caches(slots=1, window=engine.bound.window(case.method.config["name"]))
    return sum(cache.projected([_longest(case)], exact=True) for cache in caches)


def preemption(case: Case) -> Evidence:
    """The budget shrinks to less than running rows hold: the newest leave, and are computed again later."""
    with case.engine(kv_budget=1 << 30) as engine:
        handles = [engine.submit(request) for request in case.requests()]
        while min(len(handle._row.token_ids) for handle in handles) < 1 or engine.stats()["preparing_rows"]:
            engine.step()
        held, relief = engine._driver.group.holding(), engine._driver.relief
        needed = sum(cache.projected(held.tokens, exact=True) for cache in held.caches)
        limit = max(int(0.6 * needed), _largest(case, engine))
        relief.budget = attrs.evolve(relief.budget, limit=limit)
        while not all(handle.done for handle in handles):
            engine.step()
            stats = engine.stats()
            assert stats["kv_bytes"] <= limit, f"{stats['kv_bytes']} bytes of {limit}"
        results = [handle.result() for handle in handles]
    case.check(results, case.wanted(), stats)
    return {**case.shown(results, stats), "preempted rows that had begun": case.watch.preempted}


def mixed(case: Case) -> Evidence:
    """Decode steps take chunks of prompts along, and so do windows of several tokens a row."""
    _, stats, shown = case.company(mixed=True)
    if case.method.drafts or case.method.templates:
        shown["mixed windows"] = case.watch.windows
    return {**shown, "mixed forwards": stats["mixed_forwards"]}


def compiled(case: Case) -> Evidence:
    """Two rows run one after the other, and three together; steps are traced once and replayed.

    Rows of two tokens have a step without drafts for certain.
    """
    asked, wanted = case.requests(), case.wanted()
    short = [attrs.evolve(request, max_tokens=2, id=f"{request.id} again") for request in asked[:3]]
    with case.engine(compiled=True) as engine:
        begun = [engine.generate([request])[0] for request in short]
        results = [*engine.generate(asked[:1]), *engine.generate(asked[1:2]), *engine.generate(asked[2:])]
        stats = engine.stats()
    case.check([*begun, *results], [*map(cut, wanted, short), *wanted], stats)
    replayed = stats["compiled_steps"] - stats["compiled_traces"]
    return {**case.shown(results, stats), "replayed steps": replayed}


FEATURES: Mapping[str, Callable[[Case], Evidence]] = MappingProxyType(
    {
        "seeds": seeds,
        "logprobs": logprobs,
        "grammar": grammar,
        "penalties": penalties,
        "prefix reuse": prefix_reuse,
        "checkpoint": checkpoint,
        "adapter": adapter,
        "budget": budget,
        "mixed": mixed,
        "compiled": compiled,
        "preemption": preemption,
    }
)
