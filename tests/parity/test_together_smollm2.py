"""Real weights: six rows with everything at once, of which a killed process began the answers that the next one ends."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from oarlock.core import hookimpl
from oarlock.core.engine import Engine

pytestmark = [pytest.mark.weights, pytest.mark.long]
PATH = Path(__file__).with_name("together.py")


def load():
    spec = importlib.util.spec_from_file_location("parity_together", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


together = load()


@pytest.fixture(scope="module")
def loaded():
    return together.load()


@pytest.fixture(scope="module")
def alone(loaded):
    """Each row in an engine of its own kind: no drafts, no company, nothing kept."""
    config = {"scheduler": {"verify": False, "max_batch": 1}, "state_cache": {"name": "none"}}
    with Engine(loaded.model, loaded.tokenizer, config=config) as engine:
        return {request.id: engine.generate([request])[0] for request in together.requests()}


class Steps:
    """Counts tokens of prompts that were forwarded, and the most rows that decoded in one step."""

    def __init__(self):
        self.prefilled = self.most = 0

    @hookimpl
    def step_finished(self, step):
        self.prefilled += step.prefill_tokens
        self.most = max(self.most, len(step.decode_ids))


def killed(directory, tokens):
    """Let a process run until it has delivered so many tokens, and kill it; return those of each row, and its counts."""
    process = subprocess.Popen([sys.executable, str(PATH), str(directory)], stdout=subprocess.PIPE, text=True)
    told, counts = Counter(), None
    for line in process.stdout:
        name, *counts = line.split("\t")
        told[name] += 1
        if told.total() >= tokens:
            break
    process.kill()
    rest, _ = process.communicate()
    told.update(line.split("\t")[0] for line in rest.splitlines() if line.count("\t") == 3)
    assert process.returncode == -9
    return told, [int(count) for count in counts]


@pytest.mark.parametrize("tokens", [60, 180])
def test_six_rows_that_a_killed_process_began(loaded, alone, tokens, tmp_path):
    told, (reused, drafted, accepted) = killed(tmp_path, tokens)
    assert len(told) == 6
    assert reused > 0
    assert 0 < accepted < drafted
    steps = Steps()
    with together.opened(loaded, str(tmp_path), steps) as second:
        results = second.generate(together.requests(checkpoint_interval=together.INTERVAL))
        stats = second.stats()
    assert stats["recoveries"] == 0
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    for result in results:
        want = alone[result.id]
        assert (result.token_ids, result.finish_reason) == (want.token_ids, want.finish_reason), result.id
        assert result.text == want.text
    going = [result for result in results if 6 < told[result.id] < len(alone[result.id].token_ids)]
    assert len(going) >= 4
    assert all(result.usage.cached_tokens >= 64 for result in going), "the prefix that all have in common"
    anew = sum(result.usage.prompt_tokens for result in results if result not in going)
    assert steps.prefilled <= anew + len(going) * (2 * together.INTERVAL + 5)
    assert steps.most >= 4
    check_structure({result.id: result.text for result in results})


def check_structure(texts):
    """JSON parses and validates, and the pattern is matched."""
    jsonschema.validate(json.loads(texts["json"]), together.BOAT)
    for boat in json.loads(texts["seeded json"]):
        jsonschema.validate(boat, together.BOAT)
    assert re.fullmatch(r"((Monday|Tuesday|Friday): \d\d to \d\d o'clock\.\n){6}", texts["pattern"])
