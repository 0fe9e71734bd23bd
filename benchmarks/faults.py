"""One poisoned row among sixteen: ``python benchmarks/faults.py``. What the same fault does to mlx-lm's batch generator.

The model is wrapped: a forward in which some row goes past `Poisoned.after` tokens fails, while it is built, on the
device, or with scores that are no numbers. Only one row comes that far.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import models
from mlx import nn
from mlx_lm.generate import BatchGenerator

from oarlock.core import Request, Result
from oarlock.core.engine import Engine

KINDS = ("while it is built", "on the device", "as NaN", "on the device, the step after")
LENGTHS = [12 + row for row in range(15)] + [60]
TOKENS = 20
GIVES_UP = 300  # steps


class Poisoned(nn.Module):
    """A model that fails for a row as soon as it goes past ``after`` tokens; ``kind`` is one of `KINDS`, or None."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model, model.layers
        self.kind: str | None = None
        self.after = 10**9

    def make_cache(self) -> list[Any]:
        """Return the model's own caches."""
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model)
        return caches

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return logits, unless it is time to fail."""
        starts = cache[0].offset
        after = self.after + (self.kind == KINDS[3])
        late = mx.broadcast_to(mx.array(starts) + ids.shape[1] > after, (ids.shape[0],))  # (B,)
        if self.kind == KINDS[0] and mx.any(late).item():
            raise RuntimeError("the poisoned row")
        logits: mx.array = self.model(ids, cache=cache)
        if self.kind in (KINDS[1], KINDS[3]):
            singular = mx.where(mx.any(late), 0.0, mx.eye(2))
            logits = logits + 0.0 * mx.linalg.inv(singular, stream=mx.cpu)[0, 0]
        elif self.kind == KINDS[2]:
            logits = mx.where(late[:, None, None], float("nan"), logits)
        return logits


def ours(model: Poisoned, prompts: Sequence[Sequence[int]], **scheduler: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the outcome of every request, an error in the failed one's place, and the engine's counts."""
    config = {"scheduler": {"max_batch": len(prompts), "verify": False, **scheduler}}
    with Engine(model, config=config) as engine:
        requests = [Request(prompt_ids=prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in prompts]
        return engine.generate(requests, return_errors=True), engine.stats()


def theirs(model: Poisoned, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], str]:
    """Return what each row got from mlx-lm's batch generator, and how it ended."""
    generator = BatchGenerator(model)
    places = dict(
        zip(generator.insert(list(map(list, prompts)), max_tokens=[TOKENS] * len(prompts)), itertools.count())
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    left = set(places)
    for _ in range(GIVES_UP):
        try:
            _, responses = generator.next()
        except RuntimeError as error:
            return tokens, f"raised: {str(error)[:40]}"
        for response in responses:
            tokens[places[response.uid]].append(response.token)
            if response.finish_reason is not None:
                left.discard(response.uid)
        if not left:
            return tokens, "ended"
    return tokens, f"not ended after {GIVES_UP} steps"


def run(model: Any, prompts: Sequence[Sequence[int]], kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """Return one line a fault: how many of the others finished with their solo tokens, on either side."""
    poisoned = Poisoned(model)
    alone = [ours(poisoned, [prompt])[0][0].token_ids for prompt in prompts]
    lines = []
    for kind in kinds:
        poisoned.kind, poisoned.after = kind, max(map(len, prompts)) + 3
        outcomes, stats = ours(poisoned, prompts)
        bad = max(range(len(prompts)), key=lambda row: len(prompts[row]))
        others = [row for row in range(len(prompts)) if row != bad]
        good = sum(isinstance(outcomes[row], Result) and outcomes[row].token_ids == alone[row] for row in others)
        tokens, ended = theirs(poisoned, prompts)
        theirs_good = sum(tuple(tokens[row]) == alone[row] for row in others)
        error = outcomes[bad]
        lines.append(
            {
                "fault": kind,
                "others": len(others),
                "ours": good,
                "error": f"{type(error).__name__}: {error}"[:70],
                "recoveries": stats["recoveries"],
                "retries": stats["retries"],
                "mlx-lm": theirs_good,
                "mlx-lm ended": ended,
                "last": tokens[bad][-3:],
            }
        )
    return lines


def main() -> None:
    loaded = models.smollm2()
    failed = False
    for line in run(loaded.model, models.prompts(loaded, LENGTHS)):
        failed = failed or line["ours"] != line["others"]
        print(f"a row fails {line['fault']}")
        print(
            f"  oarlock: {line['ours']} of {line['others']} others end with their solo tokens; the row: {line['error']}"
        )
        print(f"           {line['recoveries']} recoveries, {line['retries']} retries")
        print(f"  mlx-lm:  {line['mlx-lm']} of {line['others']}; the generator {line['mlx-lm ended']}; ", end="")
        print(f"the row's last tokens {line['last']}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
