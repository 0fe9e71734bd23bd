"""Check that an installed example package is listed, and that rows get what it registers when the config or a request asks for it.

Run with the Python of the environment that it is installed in: ``python -I chosen.py examples/NAME``.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.testing import models

ASKED = {
    "rotated-kv": ({"layouts": {"full": {"name": "rotated", "bits": 4}}}, {}),
    "shared-drafts": ({"method": {"name": "speculative", "proposer": {"name": "shared", "match": 3}}}, {}),
    "entropy-sampler": ({}, {"warmth": 0.8}),
}
"""By name of the example: the config that chooses it, and the ``extra`` of the requests that do."""


def main(example: Path) -> None:
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    program = Path(sys.executable).with_name("oarlock")
    said = subprocess.run([program, "plugins", "--check", "--json"], check=True, capture_output=True, text=True).stdout
    (info,) = [info for info in json.loads(said) if info["distribution"] == project["name"]]
    assert info["state"] == "active", info
    ((kind, (name,)),) = info["registered"].items()
    config, extra = ASKED[example.name]
    sampling = SamplingParams(temperature=1.0 if extra else 0.0, seed=1, extra=extra)
    requests = [Request(prompt_ids=[5, 6, 7, 8, n], max_tokens=24, sampling=sampling) for n in range(3)]
    with Engine(models.build("tiny-full", hidden_size=128), config=config) as engine:
        together = [result.token_ids for result in engine.generate(requests)]
        alone = [engine.generate([request])[0] for request in requests]
        assert together == [result.token_ids for result in alone]
        uses = {
            "layout": lambda: {layer.layout.name for layer in engine.bound.layers} == {name},
            "proposer": lambda: all(result.usage.accepted_tokens for result in alone),  # they were said before
            "sampler": lambda: together != [result.token_ids for result in engine.generate(plain(requests))],
        }
        assert uses[kind](), f"{kind} {name!r} was not used"
    print(
        f"{info['distribution']} {info['version']}: {kind} {name!r} listed, chosen and used; 3 rows together as alone"
    )


def plain(requests: list[Request]) -> list[Request]:
    """Return the same requests without the sampler."""
    sampling = SamplingParams(temperature=1.0, seed=1)
    return [Request(prompt_ids=r.prompt_ids, max_tokens=r.max_tokens, sampling=sampling) for r in requests]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
