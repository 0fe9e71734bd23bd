"""One cell as it runs: an engine of its storage and its method, five rows, and what they say alone. It knows no feature."""

from __future__ import annotations

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
from oarlock.core.testing.composition.methods import DRAFT, Evidence, Method
from oarlock.core.testing.composition.rows import Shared
from oarlock.core.testing.composition.storages import WORDS, Storage
from oarlock.core.testing.composition.templates import Templates
from oarlock.core.testing.drive import arrive


@attrs.define(eq=False)
class Watch:
    """Counts from records of steps, and is the plugin that gets them.

    ``prefilled`` are the tokens of prompts that were forwarded, ``together`` the rows that decoded beside each other,
    ``windows`` the mixed forwards in which rows had more than a token, ``preempted`` the rows that gave up their states
    when they had decoded.
    """

    prefilled: int = 0
    windows: int = 0
    preempted: int = 0
    together: set[tuple[str, ...]] = attrs.field(factory=set)

    @hookimpl
    def step_finished(self, step: Any) -> None:
        """Count."""
        self.prefilled += step.prefill_tokens
        self.windows += step.mixed_tokens - step.prefill_tokens > step.decode_rows
        self.together.add(step.decode_ids)

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """Count it where it decoded before."""
        self.preempted += any(request.id in ids for ids in self.together)


@attrs.frozen(kw_only=True)
class Case:
    """One cell as it runs: what it composes, and where its rows' own results are known."""

    storage: Storage
    method: Method
    shared: Shared
    scratch: Path
    templates: Templates = attrs.field(factory=lambda: Templates(WORDS))
    watch: Watch = attrs.field(factory=Watch)

    def engine(self, **changes: Any) -> Engine:
        """Open an engine of the storage and the method; ``changes`` are those of `rows.settings`."""
        model, config = self.shared.model(self.storage), rows.settings(self.storage, self.method.config, **changes)
        drafts = Drafts({DRAFT: lambda: self.shared.draft(self.storage)})
        plugins = [self.templates, drafts, self.watch, *self.storage.plugins]
        return Engine(model, config=config, identity=self.storage.name, plugins=plugins)

    def requests(self, kind: str = rows.GREEDY, **changes: Any) -> list[Request]:
        """Return the five rows, some with a template where the method wants that."""
        return rows.requests(self.storage, kind, self.method.templates, **changes)

    def wanted(self, kind: str = rows.GREEDY) -> list[Any]:
        """Return what they say alone."""
        return self.shared.alone(self.storage, kind, self.method.templates)

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

    def company(self, kind: str = rows.GREEDY, **changes: Any) -> tuple[list[Any], Mapping[str, Any], Evidence]:
        """Let rows come one by one and check them; return their results, the engine's counts, and what was shown."""
        with self.engine(**changes) as engine:
            results = arrive(engine, self.requests(kind), 2)
            stats = engine.stats()
        self.check(results, self.wanted(kind), stats)
        return results, stats, self.shown(results, stats)

    def shown(self, results: Sequence[Any], stats: Mapping[str, Any]) -> Evidence:
        """Return what proves that the method did what it is for, and that rows ran beside each other."""
        several = sum(len(ids) > 1 for ids in self.watch.together)
        return {"companies of several rows": several, **self.method.evidence(stats, results)}

    def changed(self, kind: str) -> int:
        """Return how many tokens rows of a kind say otherwise than greedy ones."""
        pairs = zip(self.wanted(kind), self.wanted(), strict=True)
        return sum(a != b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=True))


def cut(want: Any, request: Request) -> Any:
    """Return what a row says alone that is asked for less."""
    return attrs.evolve(want, token_ids=want.token_ids[: request.max_tokens])
