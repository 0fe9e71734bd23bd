"""Real weights in every storage: SmolLM2, and Gemma 3 past its window of 512, say what mlx-lm says of each prompt alone.

What `equal` means where numbers are packed: docs/decisions/quantized-reads.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("real.py")
PACKED = ("8 bits", "4 bits", "delayed")

pytestmark = [pytest.mark.long, pytest.mark.weights, pytest.mark.timeout(2400)]


def load():
    spec = importlib.util.spec_from_file_location("parity_real", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


real = load()


def check(outcome, moved):
    print(outcome)
    assert outcome.rows == outcome.together == 4
    assert outcome.excused == 0
    assert outcome.moved <= moved


def check_without_blas(source, storage, moved):
    """In MLX's own BLAS, which sums each row of a product in one order, whatever rows stand beside it."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, str(PATH), source, storage]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2300, check=False)
    assert done.returncode == 0, done.stderr
    check(real.Outcome(**json.loads(done.stdout.splitlines()[-1])), moved)


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    return real.Weights(str(gemma3_path), (700, 1500, 1100, 900))


def test_smollm2_in_blocks():
    """Its own layout is `full`: tests/parity/test_smollm2.py."""
    weights = real.Weights("smollm2", (400, 100, 250, 128))
    check(weights.outcome("paged", 24, prefill_chunk=128), 1e-3)


@pytest.mark.parametrize("storage", PACKED)
def test_smollm2_packed(storage):
    """Not one bit of one score differs."""
    check_without_blas("smollm2", storage, 0.0)


@pytest.mark.parametrize(("storage", "chunk"), [("own", 640), ("paged", 256)])
def test_gemma3_past_its_window(gemma3, storage, chunk):
    """Every prompt is longer than the window; chunks are longer than it, and shorter."""
    check(gemma3.outcome(storage, 32, prefill_chunk=chunk), 1e-3)


@pytest.mark.parametrize("storage", PACKED)
def test_gemma3_packed(gemma3_path, storage):
    """A row past its window is summed in the order of its ring, which is not mlx-lm's: its last bits may differ."""
    check_without_blas(str(gemma3_path), storage, 1e-3)
