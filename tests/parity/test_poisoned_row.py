"""One poisoned row among sixteen on SmolLM2: the benchmark that shows it, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.long
@pytest.mark.weights
@pytest.mark.fault("I-03")
@pytest.mark.timeout(1500)
def test_fifteen_rows_end_as_they_would_alone_and_one_with_its_own_error():
    """While the graph is built, in evaluation, as NaN, and in the pipelined step after."""
    for _ in range(3):  # MLX may block for ever after a failed evaluation: see tests/core/conftest
        try:
            done = subprocess.run(
                [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False, timeout=450
            )
        except subprocess.TimeoutExpired:
            continue
        break
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("15 of 15 others end with their solo tokens") == 4
    assert done.stdout.count("the row: RuntimeError") == 3
    assert done.stdout.count("the row: NonFiniteLogits") == 1
