"""One cell as it runs: an engine of its storage and its method, five rows, and what they say alone. It knows no feature."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from oarlock.core import hookimpl
from oarlock.core.engine import Engine
from oarlock.core.request import Request
from oarlock.core.testing.composition import rows
from oarlock.core.testing.composition.drafts import Drafts
from oarlock.core.testing.composition.methods import DRAFT, Method
from oarlock.core.testing.composition.rows import Alone
from oarlock.core.testing.composition.storages import WORDS, Storage, draft, model
from oarlock.core.testing.composition.templates import Templates
from oarlock.core.testing.drive import arrive


class Watch:
    """Counts from records of steps: tokens of prompts that were forwarded, and rows that decoded beside each other."""

    def __init__(self) -> None:
        self.prefilled = 0
        self.together: set[tuple[str, ...]] = set()

    @hookimpl
    def step_finished(self, step: Any) -> None:
        """Count."""
        self.prefilled += step.prefill_tokens
        self.together.add(step.decode_ids)


@attrs.frozen(kw_only=True)
class Case:
    """One cell as it runs: what it composes, and where its rows' own results are known."""

    storage: Storage
    method: Method
    alone: Alone
    scratch: Path
    templates: Templates = attrs.field(factory=lambda: Templates(WORDS))

    def engine(self, *plugins: object, **changes: Any) -> Engine:
        """Open an engine of the storage and the method; ``changes`` are those of `rows.settings`."""
        config, name = rows.settings(self.storage, self.method.config, **changes), self.storage.name
        drafts = Drafts({DRAFT: functools.partial(draft, name)})
        return Engine(model(name), config=config, identity=name, plugins=[self.templates, drafts, *plugins])

    def requests(self, kind: str = rows.GREEDY, **changes: Any) -> list[Request]:
        """Return the five rows, some with a template where the method wants that."""
        return rows.requests(self.storage, kind, self.method.templates, **changes)

    def wanted(self, kind: str = rows.GREEDY) -> list[Any]:
        """Return what they say alone."""
        return self.alone.results(self.storage, kind, self.method.templates)

    def check(self, results: Sequence[Any], wanted: Sequence[Any], *stats: Mapping[str, Any]) -> None:
        """Raise AssertionError where a row says another thing than alone, or something had to be recovered."""
        for got, want in zip(results, wanted, strict=True):
            mine, theirs = list(got.token_ids), list(want.token_ids)
            step = next((i for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs)) if a != b), None)
            assert step is None, f"{got.id} differs from step {step} on: {mine[step:]}, alone {theirs[step:]}"
            assert got.finish_reason == want.finish_reason, f"{got.id} ends by {got.finish_reason}"
            assert got.usage.generated_tokens == len(mine), f"{got.id} counts {got.usage.generated_tokens} tokens"
        for each in stats:
            assert each["recoveries"] == 0, f"{each['recoveries']} recoveries"

    def company(self, kind: str = rows.GREEDY, **changes: Any) -> tuple[Any, ...]:
        """Let rows come one by one and check them; return their results, the counts, what was watched, and what was shown."""
        watch = Watch()
        with self.engine(watch, **changes) as engine:
            results = arrive(engine, self.requests(kind), 2)
            stats = engine.stats()
        self.check(results, self.wanted(kind), stats)
        shown = self.method.evidence(stats, results)
        shown["companies of several rows"] = sum(len(ids) > 1 for ids in watch.together)
        return results, stats, watch, shown

    def changed(self, kind: str) -> int:
        """Return how many tokens rows of a kind say otherwise than greedy ones."""
        pairs = zip(self.wanted(kind), self.wanted(), strict=True)
        return sum(a != b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=True))


def cut(want: Any, request: Request) -> Any:
    """Return what a row says alone that is asked for less."""
    return attrs.evolve(want, token_ids=want.token_ids[: request.max_tokens])
