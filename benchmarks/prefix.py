"""What prompts have in common: ``python benchmarks/prefix.py [shared] [turns]``.

Sixteen requests with one long beginning that come together, and second turns of conversations, with and without a state
cache, on every kind of storage; mlx-lm's `LRUPromptCache` beside them. Counted are prompt tokens that were computed; timed is
the way to the first tokens. Every round begins with nothing stored.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import models
import program
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from sides import settings

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.testing import models as tiny
from oarlock.plugins.cli.bench.pairs import MIN_PAIRS, Comparison, Report, equal_hash, ratio, spread

TOKENS = 8
"""Of every answer."""


@dataclass
class Served:
    """What came of some prompts: seconds until all had a first token, tokens computed for them, and their answers."""

    seconds: float
    computed: int
    answers: list[list[int]]


class Ours:
    """An engine; ``cache`` names its state cache."""

    def __init__(self, name: str, model: Any, layouts: Mapping[str, Any], cache: str) -> None:
        self.name, self._model = name, model
        self._config = {**settings(16), "layouts": dict(layouts), "state_cache": {"name": cache}}
        self.bytes_per_entry = 0

    def begin(self) -> None:
        """Have nothing stored."""
        self._engine = Engine(self._model, config=self._config)

    def serve(self, prompts: Sequence[Sequence[int]]) -> Served:
        """Answer prompts that come together."""
        firsts: dict[str, float] = {}

        def told(event: Any) -> None:
            firsts.setdefault(event.request_id, time.perf_counter())

        start = time.perf_counter()
        requests = [Request(prompt_ids=ids, max_tokens=TOKENS, ignore_eos=True) for ids in prompts]
        handles = [self._engine.submit(request, events=told) for request in requests]
        results = [handle.result() for handle in handles]
        computed = sum(len(ids) - r.usage.cached_tokens for ids, r in zip(prompts, results, strict=True))
        stats = self._engine.stats()["state_cache"]
        self.bytes_per_entry = stats.get("bytes", 0) // max(1, stats.get("entries", 0))
        return Served(max(firsts.values()) - start, computed, [list(r.token_ids) for r in results])

    def end(self) -> None:
        self._engine.close()


class Theirs:
    """mlx-lm's server cache in front of its serial generation, one prompt after the other as its trie is made for."""

    name = "mlx-lm's LRUPromptCache"

    def __init__(self, model: Any) -> None:
        self._model = model
        self.bytes_per_entry = 0

    def begin(self) -> None:
        """Have nothing stored."""
        self._stored = LRUPromptCache(max_size=100)

    def serve(self, prompts: Sequence[Sequence[int]]) -> Served:
        """Answer prompts in their order."""
        start, computed, answers, first = time.perf_counter(), 0, [], 0.0
        for ids in prompts:
            cache, rest = self._stored.fetch_nearest_cache("model", list(ids))
            if cache is None:
                cache, rest = make_prompt_cache(self._model), list(ids)
            if not rest:  # a whole hit: the last token has to be fed again, or everything where it cannot be taken back
                if can_trim_prompt_cache(cache):
                    trim_prompt_cache(cache, 1)
                    rest = [ids[-1]]
                else:
                    cache, rest = make_prompt_cache(self._model), list(ids)
            computed += len(rest)
            answer: list[int] = []
            while len(answer) < TOKENS:
                part, rest = rest[:512], rest[512:]
                logits = self._model(mx.array([part], dtype=mx.uint32), cache=cache)
                if rest:
                    mx.eval([each.state for each in cache])
                    continue
                answer.append(int(mx.argmax(logits[0, -1]).item()))
                first = time.perf_counter() if len(answer) == 1 else first
                rest = [answer[-1]]
            answers.append(answer)
            self._stored.insert_cache("model", [*ids, *answer[:-1]], cache)
        self.bytes_per_entry = self._stored.nbytes // max(1, len(self._stored))
        return Served(first - start, computed, answers)

    def end(self) -> None:
        """Keep nothing."""
        del self._stored


def shared(name: str, model: Any, prompts: Sequence[Sequence[int]], rounds: int, target: float | None) -> Report:
    """Serve prompts that begin alike and come together, with and without a state cache."""
    sides = [Ours("with reuse", model, {}, "memory"), Ours("without", model, {}, "none")]
    served: dict[str, list[Served]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in (*sides[number % 2 :], *sides[: number % 2]):
            side.begin()
            served[side.name].append(side.serve(prompts))
            side.end()
    warm, cold = served["with reuse"], served["without"]
    common = _common(prompts)
    return Report(
        name=f"{len(prompts)} prompts that begin with the same {common} tokens, {name}",
        facts={
            "prompts": len(prompts),
            "prompt tokens": sum(map(len, prompts)),
            "computed": warm[0].computed,
            "one beginning and all tails": common + sum(len(ids) - common for ids in prompts),
            "bytes an entry": sides[0].bytes_per_entry,
            "hash": equal_hash({key: each[0].answers for key, each in served.items()}),
        },
        figures={
            f"{side.name}: s to the last first token": spread([each.seconds for each in served[side.name]])
            for side in sides
        },
        comparisons=[
            Comparison(
                what="s to the last first token, against no reuse",
                ratio=ratio([each.seconds for each in warm], [each.seconds for each in cold]),
                target=target,
            )
        ],
    )


def turns(
    name: str, model: Any, layouts: Mapping[str, Any], firsts: Sequence[Sequence[int]], rounds: int, *, beside: bool
) -> Report:
    """Serve a second turn of each conversation: the first, its answer and some tokens more; mlx-lm ``beside`` it."""
    sides: list[Any] = [Ours("with reuse", model, layouts, "memory"), Ours("without", model, layouts, "none")]
    sides += [Theirs(model)] if beside else []
    served: dict[str, list[Served]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            side.begin()
            answers = [side.serve([first]).answers[0] for first in firsts]
            seconds = [[*first, *answer, *first[:20]] for first, answer in zip(firsts, answers, strict=True)]
            each = [side.serve([second]) for second in seconds]
            served[side.name].append(
                Served(sum(s.seconds for s in each), sum(s.computed for s in each), [s.answers[0] for s in each])
            )
            side.end()
    ours = [each.seconds for each in served["with reuse"]]
    facts: dict[str, Any] = {"conversations": len(firsts), "prompt tokens": sum(len(f) + TOKENS + 20 for f in firsts)}
    facts |= {f"computed {side.name}": served[side.name][0].computed for side in sides}
    facts |= {f"bytes an entry, {side.name}": side.bytes_per_entry for side in sides if side.name != "without"}
    return Report(
        name=f"second turns, {name}",
        facts={**facts, "hash": equal_hash({key: each[0].answers for key, each in served.items()})},
        figures={f"{key}: s to the first tokens": spread([s.seconds for s in each]) for key, each in served.items()},
        comparisons=[
            Comparison(what=f"s to the first tokens, against {side.name}", ratio=ratio(ours, theirs))
            for side in sides[1:]
            for theirs in [[each.seconds for each in served[side.name]]]
        ],
    )


def _common(prompts: Sequence[Sequence[int]]) -> int:
    return next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)


def _alike(ids: Sequence[int], common: int, tail: int, count: int) -> list[list[int]]:
    """Return prompts that share ``common`` tokens, each with a tail of its own."""
    tails = [[ids[(31 * row + i) % len(ids)] for i in range(tail)] for row in range(count)]
    return [[*ids[:common], row, *rest[1:]] for row, rest in enumerate(tails)]


HYBRID = ("qwen3_next", 1000, 20)
STORAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "a window of 16 that has turned, tiny": ("tiny-ring", {}),
    "recurrent, tiny": ("mamba2", {}),
    "hybrid, tiny": ("qwen3_next", {}),
}


def run_shared(rounds: int) -> Iterator[Report]:
    loaded, rounds = models.smollm2(), max(MIN_PAIRS, rounds - 2)
    (text,) = models.prompts(loaded, [1000])
    name, common, tail = HYBRID
    ids = [token % 97 for token in text]
    yield shared(f"{name}, tiny", tiny.build(name), _alike(ids, common, tail, 16), rounds, 5.0)
    yield shared("SmolLM2", loaded.model, _alike(text, 1000, 20, 16), rounds, 5.0)


def run_turns(rounds: int) -> Iterator[Report]:
    loaded, rounds = models.smollm2(), max(MIN_PAIRS, rounds - 2)
    firsts = models.prompts(loaded, [300, 200])
    packed = {"full": {"name": "quantized", "bits": 8, "group_size": 64}}
    yield turns("SmolLM2, full", loaded.model, {}, firsts, rounds, beside=True)
    yield turns("SmolLM2, paged", loaded.model, {"full": "paged"}, firsts, rounds, beside=False)
    yield turns("SmolLM2, quantized in 8 bits", loaded.model, packed, firsts, rounds, beside=False)
    for what, (name, layouts) in STORAGES.items():
        ids = [[token % 97 for token in first] for first in firsts]
        yield turns(f"{what}", tiny.build(name), layouts, ids, rounds, beside=True)


WORKLOADS = {"shared": run_shared, "turns": run_turns}

if __name__ == "__main__":
    sys.exit(program.main("Serve prompts that begin alike.", WORKLOADS))
