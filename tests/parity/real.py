"""Real weights in one storage, beside mlx-lm alone in the same one: `python tests/parity/real.py MODEL STORAGE`, in any BLAS.

A model is ``smollm2`` or the path of a file. Prints one line of JSON, `Outcome`'s fields.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model
from oarlock.core.testing import models, storages
from oarlock.core.testing.drive import arrive

TEXT = Path(__file__).parents[2] / "LICENSE"
GROUP, START = 64, 16
SHORT, PAST_A_WINDOW = (40, 10, 25, 14), (520, 20, 40, 12)


def _choice(name: str, bits: int, **more: int) -> dict[str, Any]:
    return {"name": name, "bits": bits, "group_size": GROUP, **more}


LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "own": {},
    "paged": {"full": {"name": "paged"}},
    "8 bits": dict.fromkeys(("full", "rotating"), _choice("quantized", 8)),
    "4 bits": dict.fromkeys(("full", "rotating"), _choice("quantized", 4)),
    "delayed": {"full": _choice("delayed", 8, start=START)},
}


class PlainWindow(RotatingKVCache):
    """A window that stays as it is where mlx-lm would quantize it, which it cannot."""

    def to_quantized(self, **_: int) -> PlainWindow:
        """Return itself."""
        return self


@attrs.frozen
class Outcome:
    """Rows compared and excused, and the most by which a score moved, rows that decoded together, and the least gap.

    The gap is the distance between the two best scores of a step, alone.
    """

    rows: int
    excused: int
    moved: float
    together: int
    gap: float

    def __str__(self) -> str:
        """Say all of it."""
        said = f"{models.Comparison(self.rows, self.excused)}, scores moved by at most {self.moved:.2g}"
        return f"{said}, the two best at least {self.gap:.2g} apart, up to {self.together} rows in a step"


class Company:
    """Remembers how many rows decoded together at most."""

    most = 0

    @hookimpl
    def step_finished(self, step: Any) -> None:
        """Look at one step."""
        self.most = max(self.most, step.decode_rows)


class Weights:
    """A model in float32, prompts cut out of a real text, and what mlx-lm gives each alone, computed once a storage."""

    def __init__(self, source: str, lengths: Sequence[int]) -> None:
        """Load it and cut one prompt of each length, each from another place."""
        config = EngineConfig.load({"model": {"dtype": "float32"}})
        loaded = load_model(source, config, build(config))
        self.model = loaded.model
        ids = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        self.prompts = [tuple(ids[150 * place : 150 * place + length]) for place, length in enumerate(lengths)]
        assert [len(prompt) for prompt in self.prompts] == list(lengths)

    @functools.cache  # noqa: B019 - the weights live as long as their process or module
    def serial(self, storage: str, tokens: int) -> list[models.Serial]:
        """Generate from each prompt alone, with caches of its own: plain ones, quantized at once, or where it turns.

        mlx-lm looks between chunks whether to quantize: they end where it should.
        """

        def options() -> dict[str, Any]:
            if storage == "delayed":
                caches = make_prompt_cache(self.model)
                for cache in caches:
                    if type(cache) is RotatingKVCache:
                        cache.__class__ = PlainWindow
                turning = {"kv_bits": 8, "kv_group_size": GROUP, "quantized_kv_start": START}
                return {"prompt_cache": caches, "prefill_step_size": START, **turning}
            if storage == "own":
                return {}
            return {"prompt_cache": storages.quantized(self.model, int(storage[0]), GROUP)}

        return [models.serial(self.model, prompt, tokens, **options()) for prompt in self.prompts]

    def outcome(self, storage: str, tokens: int, **settings: Any) -> Outcome:
        """Run all prompts in company, one arriving every three steps. Raises `TokensDiffer`."""
        score = SamplingParams(logprobs=0)
        requests = [Request(prompt_ids=prompt, max_tokens=tokens, sampling=score) for prompt in self.prompts]
        company = Company()
        with Engine(
            self.model, config={"layouts": LAYOUTS[storage], "scheduler": settings}, plugins=[company]
        ) as engine:
            results = arrive(engine, requests, 3)
            assert engine.stats()["recoveries"] == 0
        serial = self.serial("own" if storage == "paged" else storage, tokens)
        gaps = [row.gaps for row in serial]
        said = models.compare([result.token_ids for result in results], [row.tokens for row in serial], gaps)
        moved = max(
            abs(entry.logprob - wanted)
            for result, row in zip(results, serial, strict=True)
            for entry, wanted, token in zip(result.logprobs, row.logprobs, row.tokens, strict=True)
            if entry.token == token
        )
        return Outcome(said.rows, said.excused, moved, company.most, min(map(min, gaps)))


def main(source: str, storage: str) -> None:
    """Print the outcome of short prompts on the CPU; where windows are packed, one prompt is longer than they are."""

    mx.set_default_device(mx.cpu)
    windows = source != "smollm2" and "rotating" in LAYOUTS[storage]
    weights = Weights(source, PAST_A_WINDOW if windows else SHORT)
    outcome = weights.outcome(storage, 16, prefill_chunk=256 if windows else 16, verify=False)
    print(json.dumps(attrs.asdict(outcome)))


if __name__ == "__main__":
    main(*sys.argv[1:])
