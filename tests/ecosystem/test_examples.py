"""The packages in examples/: each installable alone, proved by its own tests, and chosen by config."""

import pytest

CHOOSES = """
import json
import mlx.core as mx
mx.set_default_device(mx.cpu)
from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.testing import models
model = models.build("tiny-full", hidden_size=128)
prompts = models.prompts((12, 3, 7), 97)
requests = [Request(prompt_ids=prompt, max_tokens=12) for prompt in prompts]
with Engine(model, config="oarlock.toml") as engine:
    chosen = [layer.layout.name for layer in engine.bound.layers]
    together = [list(result.token_ids) for result in engine.generate(requests)]
    recoveries = engine.stats()["recoveries"]
alone = []
for request in requests:
    with Engine(model, config="oarlock.toml") as engine:
        alone += [list(result.token_ids) for result in engine.generate([request])]
print(json.dumps([chosen, together == alone, [len(row) for row in together], recoveries]))
"""


def test_a_layout_of_a_third_party_is_chosen_by_the_config(rotated_kv):
    (rotated_kv.folder / "oarlock.toml").write_text('[layouts]\nfull = { name = "rotated", bits = 4 }\n')
    chosen, equal, lengths, recoveries = rotated_kv.answer(CHOOSES)
    assert chosen == ["rotated"] * 3
    assert (equal, lengths, recoveries) == (True, [12] * 3, 0)


def test_options_out_of_range_are_one_line(rotated_kv):
    (rotated_kv.folder / "oarlock.toml").write_text('[layouts]\nfull = { name = "rotated", bits = 5 }\n')
    done = rotated_kv.run(CHOOSES, check=False)
    assert done.returncode
    assert "'bits' must be in (4, 8)" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_its_own_tests_pass(rotated_kv, root):
    """The conformance kit among them, in an environment where it is rotated_kv."""
    tests = root / "examples" / "rotated-kv" / "tests"
    done = rotated_kv.run(
        "", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(tests), check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


def test_one_command_proves_it(rotated_kv):
    kit = [
        "--oarlock-layout",
        "rotated",
        "--oarlock-tolerance",
        "0.8",
        "-k",
        "join_together or is_owned or cut_anywhere",
    ]
    done = rotated_kv.run("", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *kit, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
