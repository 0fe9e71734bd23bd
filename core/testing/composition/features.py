"""What each feature of the table does with the rows of a cell, and the counts that prove that it was done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from oarlock.core.request import Request
from oarlock.core.testing.composition import rows
from oarlock.core.testing.composition.case import Case, Watch, cut
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
    return {**case.method.evidence(stats, results), "cached tokens": cached}


def checkpoint(case: Case) -> Evidence:
    """An engine is left in the middle of the rows, and another one ends them."""
    kept = {"name": "memory", "prefix_bytes": 0, "checkpoints": str(case.scratch)}
    asked = case.requests(checkpoint_interval=3)
    watch = Watch()
    with case.engine(state_cache=kept) as first:
        handles = [first.submit(request) for request in asked]
        while min(len(handle._row.token_ids) for handle in handles if not handle.done) < 7:
            first.step()
        before = first.stats()
    with case.engine(watch, state_cache=kept) as second:
        results = second.generate(asked)
        after = second.stats()
    case.check(results, case.wanted(), before, after)
    both = {name: before[name] + after[name] for name in ("accepted_tokens", "drafted_tokens")}
    saved = sum(len(request.prompt_ids or ()) for request in asked) - watch.prefilled
    return {**case.method.evidence(both, results), "tokens of prompts that were not forwarded again": saved}


def adapter(case: Case) -> Evidence:
    """Rows of two adapters and of none decode together."""
    *_, watch, shown = case.company(rows.ADAPTED, adapters=case.alone.adapters(case.storage))
    of = {f"row {row}": name for row, name in enumerate(rows.ADAPTERS)}
    several = sum(len({of[name] for name in ids}) > 1 for ids in watch.together)
    return {
        **shown,
        "tokens that adapters changed": case.changed(rows.ADAPTED),
        "companies of several adapters": several,
    }


def _budgeted(case: Case, share: float, overcommit: float, most: float) -> tuple[Mapping[str, Any], Evidence, int]:
    """Let rows come all at once, within the bytes of a ``share`` of the largest and what the method holds beside one.

    They come several times, each time with shorter answers, so that all of them would be ``most`` times the budget; the
    last one comes alone.
    """
    limit, total = _sizes(case, share)
    times = max(1, math.ceil(most * limit / total))
    asked = [
        attrs.evolve(request, id=f"{request.id}, {n}", max_tokens=max(1, (request.max_tokens or 0) - 4 * n))
        for n in range(times)
        for request in case.requests()
    ]
    waited = 0
    with case.engine(kv_budget=limit, overcommit=overcommit, max_batch=len(asked)) as engine:
        last = [attrs.evolve(case.requests()[0], id="the last")]
        handles = [engine.submit(request) for request in asked]
        while not all(handle.done for handle in handles):
            engine.step()
            stats = engine.stats()
            assert stats["kv_bytes"] <= limit, f"{stats['kv_bytes']} bytes of {limit}"
            waited += stats["active_rows"] > 0 and stats["pending_rows"] > stats["preparing_rows"]
        results = [*(handle.result() for handle in handles), *engine.generate(last)]
        stats = engine.stats()
    wanted = [*case.wanted() * times, case.wanted()[0]]
    case.check(results, [*map(cut, wanted, [*asked, *last])], stats)
    return stats, case.method.evidence(stats, results), waited


def _sizes(case: Case, share: float) -> tuple[int, int]:
    """Return the bytes of a ``share`` of the largest row and of what the method holds beside one; and of all rows."""
    with case.engine(verify=False) as engine:
        name = case.method.config["name"]
        final = [len(request.prompt_ids or ()) + (request.max_tokens or 0) for request in case.requests()]
        engine._driver.group.use_method(name)
        sizes = [engine.bound.bytes_at(n, engine.bound.window(name)) for n in final]
        return int(share * max(sizes)) + engine._driver.group.beside([max(final)]), sum(sizes)


def budget(case: Case) -> Evidence:
    """A budget of bytes holds some of the rows at a time, and never less than what is allocated."""
    _, shown, waited = _budgeted(case, share=2.5, overcommit=1.0, most=0)
    return {**shown, "steps in which rows waited": waited}


def preemption(case: Case) -> Evidence:
    """Rows that were taken on credit leave and are computed again; drafts leave before them."""
    stats, shown, _ = _budgeted(case, share=1.2, overcommit=100.0, most=2)
    return {**shown, "preemptions": stats["preemptions"]}


def mixed(case: Case) -> Evidence:
    """Decode steps take chunks of prompts along."""
    _, stats, _, shown = case.company(mixed=True)
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
    return {**case.method.evidence(stats, results), "replayed steps": replayed}


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
