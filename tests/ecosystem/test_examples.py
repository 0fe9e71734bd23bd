"""The packages in examples/: each installable alone, proved by its own tests, and chosen by config."""

import pytest

LONGER = ("rotated-kv", "shared-drafts")
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


def test_a_layout_of_a_third_party_is_chosen_by_the_config(examples):
    (examples.folder / "oarlock.toml").write_text('[layouts]\nfull = { name = "rotated", bits = 4 }\n')
    chosen, equal, lengths, recoveries = examples.answer(CHOOSES)
    assert chosen == ["rotated"] * 3
    assert (equal, lengths, recoveries) == (True, [12] * 3, 0)


def test_options_out_of_range_are_one_line(examples):
    (examples.folder / "oarlock.toml").write_text('[layouts]\nfull = { name = "rotated", bits = 5 }\n')
    done = examples.run(CHOOSES, check=False)
    assert done.returncode
    assert "'bits' must be in (4, 8)" in done.stderr.splitlines()[-1]


def test_each_is_found(examples):
    assert examples.registered() == {
        "entropy_sampler": {"sampler": ["entropy"]},
        "rotated_kv": {"layout": ["rotated"]},
        "shared_drafts": {"proposer": ["shared"]},
    }


@pytest.mark.parametrize(
    "name", [pytest.param("entropy-sampler"), *(pytest.param(n, marks=pytest.mark.long) for n in LONGER)]
)
def test_their_own_tests_pass(name, examples, root):
    """The conformance kit among them, in an environment where they are installed."""
    examples.pytest(root / "examples" / name / "tests", timeout=2300)


def test_one_command_proves_it(examples):
    kit = [
        "--oarlock-layout",
        "rotated",
        "--oarlock-tolerance",
        "2.0",
        "-k",
        "join_together or is_owned or cut_anywhere",
    ]
    examples.pytest(*kit)
