"""Drafts against plain decoding: ``python benchmarks/speculation.py [repetitive] [free] [draft_model]``.

The same requests by the methods `plain` and `speculative`, in turns, from when all rows run until the last has ended.
Depths are chosen as they are by default. Tokens must be the same, and no answer may be a loop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import attrs
import models
import program
import texts
from sides import settings, top_two_gap

from oarlock.core import Request, hookimpl
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.plugins.cli.bench.pairs import MIN_PAIRS, Comparison, Report, equal_hash, ratio, spread

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Answered:
    """What came of some prompts: seconds in which they were answered, the answers, and what was counted meanwhile."""

    seconds: float
    answers: list[list[int]]
    counts: Mapping[str, int]


class Side:
    """An engine with one method, which goes on learning what pays from round to round."""

    def __init__(self, name: str, model: Any, rows: int, method: Mapping[str, Any], plugins: Sequence[Any]) -> None:
        self.name = name
        # All rows are prefilled before any goes on, so that every side begins at the same place.
        config = settings(rows, policy="prefill_first", mixed=False)
        self._engine = Engine(model, config={**config, "method": dict(method)}, plugins=plugins)

    def answer(self, prompts: Prompts, tokens: int) -> Answered:
        """Answer prompts together."""
        engine = self._engine
        handles = [engine.submit(Request(prompt_ids=prompt, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
        while engine.stats()["active_rows"] < len(prompts):
            engine.step()
        before, start, steps = engine.stats(), time.perf_counter(), 1
        while engine.step():
            steps += 1
        seconds, after = time.perf_counter() - start, engine.stats()
        counts = {"steps": steps, **{name: after[name] - before[name] for name in COUNTED}}
        return Answered(seconds, [list(handle.result().token_ids) for handle in handles], counts)

    def close(self) -> None:
        self._engine.close()


COUNTED = ("verified_forwards", "drafted_tokens", "accepted_tokens")


def compare(
    name: str,
    loaded: LoadedModel,
    asked: Mapping[str, Sequence[int]],
    rows: int,
    rounds: int,
    *,
    target: float | None = None,
    tokens: int = texts.TOKENS,
    proposer: Any = "ngram",
    plugins: Sequence[Any] = (),
) -> Report:
    """Answer what is ``asked`` in batches of ``rows``, each batch once a round by both methods."""
    drafting = {"name": "speculative", "proposer": proposer}
    sides = [Side(method["name"], loaded.model, rows, method, plugins) for method in (drafting, {"name": "plain"})]
    prompts = list(asked.values())
    batches = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    done: dict[str, list[Answered]] = {side.name: [] for side in sides}
    for side in sides:
        side.answer(batches[0], tokens)
    for number in range(rounds):
        for batch in batches:
            for side in (*sides[number % 2 :], *sides[: number % 2]):
                done[side.name].append(side.answer(batch, tokens))
    for side in sides:
        side.close()
    answers = {key: [a for each in some[: len(batches)] for a in each.answers] for key, some in done.items()}
    same = equal_hash(answers, lambda row, after: top_two_gap(loaded.model, [*prompts[row], *after]))
    loops = {key: period for key, said in zip(asked, answers["plain"], strict=True) if (period := texts.loop(said))}
    seconds = {key: [each.seconds for each in some] for key, some in done.items()}
    drafts = {what: sum(each.counts[what] for each in done["speculative"]) for what in ("steps", *COUNTED)}
    return Report(
        name=f"{name}, {rows} {'row' if rows == 1 else 'rows'}",
        facts={
            "texts": len(prompts),
            "tokens each": tokens,
            "hash": same,
            "loops": loops or "none",
            "accepted": f"{drafts['accepted_tokens'] / max(1, drafts['drafted_tokens']):.0%} of {drafts['drafted_tokens']}",
            "windows": f"{drafts['verified_forwards'] / drafts['steps']:.0%} of steps",
            "depth": round(drafts["drafted_tokens"] / max(1, drafts["verified_forwards"]) / rows, 1),
        },
        figures={f"{key}: s a batch": spread(each) for key, each in seconds.items()},
        comparisons=[
            Comparison(what="speed against plain", ratio=ratio(*(seconds[side.name] for side in sides)), target=target)
        ],
    )


def chat(loaded: LoadedModel, some: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the prompts of some questions."""
    assert loaded.tokenizer is not None
    template = loaded.tokenizer.apply_chat_template
    return {name: list(template([{"role": "user", "content": text}])) for name, text in some.items()}


@attrs.frozen(eq=False)
class Truncated:
    """A loader, and its plugin, of a loaded model's first layers: a smaller model of the same vocabulary, if a bad one."""

    loaded: LoadedModel
    layers: int
    name: str = "truncated"

    def accepts(self, source: str) -> bool:
        """Return whether it is this one that is meant."""
        return source == self.name

    def load(self, source: str, *, dtype: str = "auto") -> LoadedModel:
        """Load the model once more, and drop its upper layers."""
        smaller = models.smollm2()
        smaller.model.model.layers = smaller.model.model.layers[: self.layers]
        return attrs.evolve(smaller, identity=f"{smaller.identity}, {self.layers} layers")

    @hookimpl
    def register_loaders(self, register: Any) -> None:
        """Register it."""
        register(self)


LAYERS = 10
"""Of the draft model, of thirty. No smaller sibling of SmolLM2-135M is at hand: this shows what drafts cost, not what they gain."""


def run_repetitive(rounds: int) -> Iterator[Report]:
    loaded = models.smollm2()
    asked, name = chat(loaded, texts.REPETITIVE), "code and texts written again"
    for rows, target in ((1, 1.8), (4, 1.4), (8, 1.1)):
        yield compare(name, loaded, asked, rows, _rounds(rounds, len(asked) // rows), target=target)


def run_free(rounds: int) -> Iterator[Report]:
    loaded = models.smollm2()
    asked = chat(loaded, texts.FREE)
    for rows in (1, 8):
        yield compare("free texts", loaded, asked, rows, _rounds(rounds, len(asked) // rows), target=0.97)


def run_draft_model(rounds: int) -> Iterator[Report]:
    loaded = models.smollm2()
    drafts = {"name": "draft_model", "model": "truncated"}
    name = f"code and texts written again, drafted by the first {LAYERS} layers"
    asked = dict(list(chat(loaded, texts.REPETITIVE).items())[:4])
    for rows in (1, 4):
        yield compare(
            name,
            loaded,
            asked,
            rows,
            _rounds(rounds, len(asked) // rows),
            proposer=drafts,
            plugins=[Truncated(loaded, LAYERS)],
        )


def _rounds(rounds: int, batches: int) -> int:
    """Return how many rounds of so many batches give enough pairs: a third of ``rounds``, or what that takes."""
    return max(rounds // 3, -(-MIN_PAIRS // batches))


WORKLOADS = {"repetitive": run_repetitive, "free": run_free, "draft_model": run_draft_model}

if __name__ == "__main__":
    sys.exit(program.main("Compare speculative with plain decoding.", WORKLOADS))
