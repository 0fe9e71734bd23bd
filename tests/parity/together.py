"""Six rows on SmolLM2 in which everything is asked for at once: `python tests/parity/together.py DIRECTORY` runs them.

It prints a line a delivered token: the row's id, and how many tokens were reused, drafted and accepted by then. Checkpoints
are in the directory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core import Request, SamplingParams
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model

SYSTEM = """You are a careful assistant of a rowing club. You answer in short, plain sentences, and where somebody asks
for data you answer with JSON and nothing else. The club has three boats: the Heron with eight seats, the Kingfisher
with four seats and the Grebe with two seats. Boats are on the water from Monday to Saturday, from seven to nine."""
CODE = """def area(width, height):
    result = width * height
    print("area", width, height, result)
    return result

def volume(width, height, depth):
    result = width * height * depth
    print("volume", width, height, depth, result)
    return result
"""
BOAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "seats": {"type": "integer", "minimum": 1, "maximum": 8},
        "days": {"type": "array", "items": {"enum": ["Monday", "Friday", "Saturday"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "seats", "days"],
    "additionalProperties": False,
}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
INTERVAL, TOKENS = 8, 64


def load() -> LoadedModel:
    """Return the model in float32."""
    config = EngineConfig.load({"model": {"dtype": "float32"}})
    return load_model("smollm2", config, build(config))


def chat(text: str, **fields: Any) -> Request:
    """Return a request behind the messages that all have in common."""
    return Request(messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], **fields)


def first() -> Request:
    """Return what computes the prefix that the others adopt."""
    return chat("Hello.", max_tokens=2, id="first")


def requests(**changes: Any) -> list[Request]:
    """Return copied code, seeded and penalised text, JSON greedy and seeded, copied text that is biased, and a pattern."""
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=11, **PENALTIES)
    rows: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("code", f"Repeat this code:\n{CODE}", {}),
        ("seeded", "Tell me about the boats and when they are on the water.", {"sampling": seeded}),
        ("json", "Describe the Heron as JSON.", {"constraint": {"json_schema": BOAT}}),
        (
            "seeded json",
            "Describe the Grebe as JSON.",
            {
                "constraint": {"json_schema": {"type": "array", "items": BOAT, "minItems": 2, "maxItems": 2}},
                "sampling": SamplingParams(temperature=0.9, seed=12, frequency_penalty=0.1),
                "max_tokens": 200,
            },
        ),
        (
            "biased",
            f"Repeat these sentences: {SYSTEM}",
            {"sampling": SamplingParams(logit_bias={0: -5.0}, logprobs=2), "min_tokens": 24, "stop": ["Saturday"]},
        ),
        (
            "pattern",
            "When are boats on the water? Answer with two hours each.",
            {
                "constraint": {"regex": "((Monday|Tuesday|Friday): [0-9]{2} to [0-9]{2} o'clock\\.\n){6}"},
                "sampling": SamplingParams(temperature=0.7, seed=13, **PENALTIES),
                "max_tokens": 120,
            },
        ),
    )
    return [chat(text, id=name, **{"max_tokens": TOKENS, **fields, **changes}) for name, text, fields in rows]


def opened(loaded: LoadedModel, directory: str, *plugins: object, **scheduler: Any) -> Engine:
    """Return an engine that drafts from the text, keeps prefixes in memory, and checkpoints in a directory."""
    method = {"name": "speculative", "proposer": "ngram", "depth": 4, "adaptive": False}
    kept = {"name": "memory", "checkpoints": directory}
    config = {"scheduler": {"verify": False, **scheduler}, "state_cache": kept, "method": method}
    return Engine(loaded.model, loaded.tokenizer, config=config, identity=loaded.identity, plugins=plugins)


def main(directory: str) -> None:
    """Run the rows, the prefix first, and say what is delivered and what came of the drafts."""
    mx.set_default_device(mx.cpu)
    loaded = load()
    with opened(loaded, directory) as engine:

        def tell(event: Any) -> None:
            stats = engine.stats()
            counts = stats["state_cache"]["reused_tokens"], stats["drafted_tokens"], stats["accepted_tokens"]
            print(event.request_id, *counts, sep="\t", flush=True)

        engine.generate([first()])
        for request in requests(checkpoint_interval=INTERVAL):
            engine.submit(attrs.evolve(request, on_token=tell))
        while engine.step():
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
