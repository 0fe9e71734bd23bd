"""The step trace program runs, and its rows are the phases that the load has. No test asserts a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "trace.py"
SMALL = ["--requests", "5", "--rows", "3", "--longest", "40", "--tokens", "6", "--chunk", "8"]
TIMES = ("build_ms", "read_ms", "emit_ms", "gap_ms", "total_ms")


def run(*arguments):
    return subprocess.run([sys.executable, PROGRAM, *SMALL, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("more", [(), ("--attribution",), ("--stall-bound-ms", "0.001", "--policy", "fair_share")])
def test_every_step_is_in_a_phase_and_has_all_its_times(more):
    """19.5: every step counts, means stand beside the median and the 99th percentile, and the gap is one of them."""
    done = run("--json", *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["load"] == {"requests": 5, "prompt tokens": 8 + 40 + 2 + 24 + 8, "tokens": 30}
    steps, times = found["report"]["steps"], found["report"]["times"]
    assert set(steps) == set(times) == {"all", "prefill", "decode", "prefill+decode"}
    assert steps["all"] == sum(steps.values()) - steps["all"] > 20
    for summaries in times.values():
        assert set(summaries) == set(TIMES)
        assert all(0 <= each["p50"] <= each["p99"] for each in summaries.values())
    parts = sum(times["all"][name]["mean"] for name in ("build_ms", "read_ms", "emit_ms"))
    assert 0 < parts <= times["all"]["total_ms"]["mean"]
    assert times["all"]["gap_ms"]["mean"] > 0
    assert found["memory"]["peak_bytes"] >= found["memory"]["active_bytes"] > 0


def test_the_table_has_a_line_for_each(capsys):
    printed = run().stdout
    for phase in ("all", "prefill", "decode", "prefill+decode"):
        assert f"\n{phase:16}" in printed
    for name in TIMES:
        assert printed.count(f"  {name.removesuffix('_ms'):8}") == 4


def test_bad_arguments_are_refused_in_one_line():
    done = run("--rows", "0")
    assert done.returncode == 2
    assert "--rows is 0; at least 1 is allowed" in done.stderr
