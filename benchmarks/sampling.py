"""What choosing tokens costs: ``python benchmarks/sampling.py [parameters] [grammar]``.

Sixteen rows with sixteen sets of parameters, against the same rows all greedy and against mlx-lm's samplers and processors,
which it calls row by row (its penalties look at the last twenty tokens, ours at all); and rows whose answers follow a JSON
schema, beside rows that are free, against free rows alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import decode
import models
import program
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from sides import MlxLm, Oarlock, settings

from oarlock.core import Request, SamplingParams
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.plugins.cli.bench.pairs import Block, Comparison, Report, Stopwatch, in_turns, ratio, spread

STEPS, ROWS, LENGTH = 8, 16, 64
SLOWDOWN, AGAINST_MLX_LM = 1.15, 1.5
"""The most that a step of such rows may take, by one of greedy rows; and how often it must go into mlx-lm's."""


def parameters(row: int) -> dict[str, Any]:
    """Return what row ``row`` of sixteen samples with: no two are the same."""
    return {
        "temperature": round(0.5 + 0.05 * row, 2),
        "top_p": round(0.98 - 0.01 * row, 2),
        "top_k": 20 + 10 * row if row % 3 == 0 else 0,
        "min_p": 0.01 * row if row % 4 == 1 else 0.0,
        "repetition_penalty": 1.05 + 0.01 * row if row % 2 == 0 else 1.0,
        "presence_penalty": 0.1 * row if row % 5 == 2 else 0.0,
        "frequency_penalty": 0.05 * row if row % 3 == 1 else 0.0,
    }


def ours(row: int) -> SamplingParams:
    """Return them as we take them."""
    bias = {100 + row: 2.0} if row % 4 == 3 else None
    return SamplingParams(seed=row, logit_bias=bias, **parameters(row))


def theirs(row: int) -> tuple[Callable[..., Any], list[Callable[..., Any]]]:
    """Return them as mlx-lm takes them: a sampler, and processors."""
    given = parameters(row)
    names = ("temperature", "top_p", "min_p", "top_k")
    temperature, top_p, min_p, top_k = (given[name] for name in names)
    penalties = {name: given[name] for name in given if name not in names}
    penalties["repetition_penalty"] = given["repetition_penalty"] if given["repetition_penalty"] != 1 else None
    bias = {100 + row: 2.0} if row % 4 == 3 else None
    processors = make_logits_processors(bias, **{name: value or None for name, value in penalties.items()})
    return make_sampler(temp=temperature, top_p=top_p, min_p=min_p, top_k=top_k), processors


def measure_parameters(name: str, model: Any, prompts: Sequence[Sequence[int]], rounds: int, *, judged: bool) -> Report:
    """Step rows with a set of parameters each, the same rows greedily, and mlx-lm's with the same parameters."""
    mixed = Oarlock(model, prompts, [ours(row) for row in range(len(prompts))])
    greedy = Oarlock(model, prompts)
    greedy.name = "all greedy"
    samplers, processors = zip(*(theirs(row) for row in range(len(prompts))), strict=True)
    beside = MlxLm(model, prompts, samplers, processors)
    blocks = in_turns([mixed, greedy, beside], STEPS, rounds)
    for side in (mixed, greedy, beside):
        side.close()
    seconds = {side: decode.seconds(each) for side, each in blocks.items()}
    targets = (1 / SLOWDOWN, AGAINST_MLX_LM) if judged else (None, None)
    return Report(
        name=f"{len(prompts)} rows with a set of parameters each, {name}",
        facts=decode.facts(prompts, blocks[mixed.name]),
        figures={f"{side}: ms a step": spread([1e3 * s / STEPS for s in each]) for side, each in seconds.items()},
        comparisons=[
            Comparison(what=f"speed against {side}", ratio=ratio(seconds[mixed.name], seconds[side]), target=target)
            for side, target in zip((greedy.name, beside.name), targets, strict=True)
        ],
    )


SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "entries": {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                    "kind": {"enum": ["single", "double", "eight"]},
                },
                "required": ["name", "seats", "kind"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["entries"],
    "additionalProperties": False,
}
"""A list so long that no row ends while it is measured."""
CONSTRAINED = 4
"""Of eight rows."""


class Chats:
    """Ours, on questions; the first ``constrained`` of them are answered by `SCHEMA`."""

    def __init__(self, name: str, loaded: LoadedModel, questions: Sequence[str], constrained: int) -> None:
        self.name, self._tokens = name, 0
        self._engine = Engine(loaded.model, loaded.tokenizer, config=settings(len(questions)))
        for place, question in enumerate(questions):
            constraint = {"json_schema": SCHEMA} if place < constrained else None
            messages = [{"role": "user", "content": question}]
            request = Request(messages=messages, max_tokens=4096, ignore_eos=True, constraint=constraint)
            self._engine.submit(request, events=self._take)
        while self._engine.stats()["active_rows"] < len(questions):
            self._engine.step()

    def block(self, steps: int) -> Block:
        """Do ``steps`` iterations."""
        before, step, watch = self._tokens, self._engine.step, Stopwatch()
        for _ in range(steps):
            step()
        return watch.block(steps, self._tokens - before)

    def close(self) -> None:
        self._engine.close()

    def _take(self, event: Any) -> None:
        self._tokens += event.token is not None


def measure_grammar(loaded: LoadedModel, rounds: int) -> Report:
    """Step eight rows, four of them constrained, and the same eight free."""
    questions = [f"List many boats of the club, from the {place} boathouse on." for place in range(8)]
    sides = [
        Chats(f"{CONSTRAINED} of 8 rows constrained", loaded, questions, CONSTRAINED),
        Chats("all free", loaded, questions, 0),
    ]
    blocks = in_turns(sides, STEPS, rounds)
    for side in sides:
        side.close()
    a_step = {name: [block.seconds / block.steps for block in each] for name, each in blocks.items()}
    a_token = {name: [block.seconds / block.tokens for block in each] for name, each in blocks.items()}
    first, second = (side.name for side in sides)
    return Report(
        name="JSON schemas beside free rows",
        facts={f"tokens a step, {n}": round(sum(b.tokens for b in e) / (STEPS * rounds), 2) for n, e in blocks.items()},
        figures={f"{name}: ms a step": spread([1e3 * s for s in each]) for name, each in a_step.items()},
        comparisons=[
            Comparison(what="speed of a step", ratio=ratio(a_step[first], a_step[second]), target=1 / SLOWDOWN),
            Comparison(what="speed of a token", ratio=ratio(a_token[first], a_token[second])),
        ],
    )


@functools.cache
def smollm2() -> LoadedModel:
    """Load it once."""
    return models.smollm2()


def run_parameters(rounds: int) -> Iterator[Report]:
    prompts = models.prompts(smollm2(), [LENGTH] * ROWS)
    yield measure_parameters("SmolLM2", smollm2().model, prompts, 3 * rounds, judged=True)


def run_grammar(rounds: int) -> Iterator[Report]:
    yield measure_grammar(smollm2(), 3 * rounds)


WORKLOADS = {"parameters": run_parameters, "grammar": run_grammar}

if __name__ == "__main__":
    sys.exit(program.main("Measure what choosing tokens costs.", WORKLOADS))
