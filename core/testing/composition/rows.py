"""The rows of a cell, and what each of them says alone: under the plain method, with nothing kept, mixed or compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from oarlock.core.engine import Engine
from oarlock.core.request import Request, SamplingParams
from oarlock.core.testing import models
from oarlock.core.testing.composition import loras
from oarlock.core.testing.composition.drafts import spoiled
from oarlock.core.testing.composition.storages import WORDS, Storage
from oarlock.core.testing.composition.templates import TURNS, Templates

SHARED = 8
"""Tokens that all prompts begin with."""
LENGTHS, LIMITS = (5, 1, 9, 3, 7), (24, 9, 18, 1, 20)
ADAPTERS = ("alice", "bob", None, "alice", "bob")
PENALTIES: Mapping[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
PLAIN: Mapping[str, Any] = {"name": "plain"}
SCHEDULER: Mapping[str, Any] = {
    "mixed": False,
    "mixed_token_budget": 64,
    "compiled": False,
    "pipeline": True,
    "prefill_chunk": 5,
}
"""What every cell begins with, the same on every device."""
GREEDY, SEEDS, LOGPROBS, PENALISED, ADAPTED, BOUND = "greedy", "seeds", "logprobs", "penalties", "adapter", "bound"
"""Kinds of rows."""
UNASKED = 2
"""The row that asks for no log-probabilities and no penalties: one whose scores are looked at draws what it knows."""


def _sampling(kind: str, row: int) -> SamplingParams:
    if kind == SEEDS:
        return SamplingParams(temperature=0.9, top_p=0.95, seed=20 + row)
    if kind == LOGPROBS and row != UNASKED:
        return SamplingParams(logprobs=3)
    if kind == PENALISED and row != UNASKED:
        return SamplingParams(**PENALTIES)
    return SamplingParams()


def text(kind: str, row: int, templates: Sequence[int]) -> int | None:
    """Return which text a row follows, if any."""
    if kind == BOUND:
        return {0: 0, 2: 2, 4: TURNS}.get(row)
    return row if row in templates else None


def prompts(storage: Storage) -> list[tuple[int, ...]]:
    """Return prompts of different lengths that begin alike."""
    start, *rest = models.prompts((SHARED, *LENGTHS), WORDS, storage.seed)
    return [(*start, *prompt) for prompt in rest]


def requests(storage: Storage, kind: str, templates: Sequence[int] = (), **changes: Any) -> list[Request]:
    """Return five requests of a kind; those whose numbers are ``templates`` follow one."""
    found = []
    for row, (prompt, limit) in enumerate(zip(prompts(storage), LIMITS, strict=True)):
        followed = text(kind, row, templates)
        asked: dict[str, Any] = {
            "prompt_ids": prompt,
            "max_tokens": limit,
            "sampling": _sampling(kind, row),
            "id": f"row {row}",
            "adapter": ADAPTERS[row] if kind == ADAPTED else None,
            "constraint": None if followed is None else {"template": followed},
        }
        found.append(Request(**{**asked, **changes}))
    return found


@attrs.define(eq=False)
class Shared:
    """What the cells of a process share, by storage: models, adapters written to ``scratch``, and what rows say alone."""

    scratch: Path
    _models: dict[str, Any] = attrs.field(factory=dict, init=False)
    _drafts: dict[str, Any] = attrs.field(factory=dict, init=False)
    _adapters: dict[str, dict[str, str]] = attrs.field(factory=dict, init=False)
    _alone: dict[tuple[str, str, Sequence[int]], list[Any]] = attrs.field(factory=dict, init=False)

    def model(self, storage: Storage) -> Any:
        """Return the model, built once."""
        if storage.name not in self._models:
            self._models[storage.name] = storage.build()
        return self._models[storage.name]

    def draft(self, storage: Storage) -> Any:
        """Return the draft model, built once: the model itself, a little off."""
        if storage.name not in self._drafts:
            self._drafts[storage.name] = spoiled(storage.build())
        return self._drafts[storage.name]

    def alone(self, storage: Storage, kind: str, templates: Sequence[int] = ()) -> list[Any]:
        """Return the results of `requests`, each of which ran by itself."""
        key = (storage.name, kind, templates)
        if key not in self._alone:
            config = settings(storage, PLAIN, adapters=self.adapters(storage) if kind == ADAPTED else {}, max_batch=1)
            plugins = [Templates(WORDS, says=False), *storage.plugins]
            with Engine(self.model(storage), config=config, plugins=plugins) as engine:
                self._alone[key] = [engine.generate([request])[0] for request in requests(storage, kind, templates)]
        return self._alone[key]

    def adapters(self, storage: Storage) -> dict[str, str]:
        """Return the directories of two adapters of a storage's model: of every linear layer, and of some of them."""
        if storage.name not in self._adapters:
            keys = loras.linear_layers(self.model(storage))
            folder = self.scratch / storage.name.replace(" ", "-")
            folder.mkdir()
            alice = loras.save(folder / "alice", storage.build(), keys=keys)
            bob = loras.save(folder / "bob", storage.build(), keys=keys[:1], rank=2, scale=10.0, seed=2, size=4.0)
            self._adapters[storage.name] = {"alice": str(alice), "bob": str(bob)}
        return self._adapters[storage.name]


def settings(
    storage: Storage,
    method: Mapping[str, Any],
    *,
    adapters: Mapping[str, str] | None = None,
    state_cache: Mapping[str, Any] | None = None,
    **scheduler: Any,
) -> dict[str, Any]:
    """Return a config: a storage, a method, and what is named; nothing else is kept, mixed or compiled."""
    return {
        "layouts": storage.layouts,
        "method": method,
        "adapters": adapters or {},
        "state_cache": state_cache or {"name": "none"},
        "scheduler": {**SCHEDULER, **scheduler},
        "plugins": {"disable": storage.disabled},
    }
