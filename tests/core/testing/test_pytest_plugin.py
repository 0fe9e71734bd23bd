"""The kit from the command line, in a directory that holds other tests."""

import subprocess
import sys

import pytest


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run pytest in a directory whose own test fails."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert False\n")

    def call(*arguments):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return call


def test_the_contract_runs_on_an_installed_layout_and_on_nothing_else(run):
    code, out = run("--oarlock-layout", "recurrent", "-k", "stored or random or wrong")
    assert code == 0, out
    assert " passed" in out
    assert "failed" not in out


def test_files_that_are_named_run_as_well(run):
    code, out = run("--oarlock-sampler", "greedy", "test_own.py")
    assert code == 1
    assert "1 failed" in out
    assert " passed" in out


def test_methods_have_a_contract_too(run):
    code, out = run("--oarlock-method", "plain", "-k", "idle and full")
    assert code == 0, out


def test_processors_have_a_contract_too(run):
    code, out = run("--oarlock-processor", "no_repeat_ngram", "--oarlock-options", '{"no_repeat_ngram": 2}')
    assert code == 0, out
    assert " passed" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--oarlock-layout", "recurent"), "unknown layout 'recurent' (did you mean 'recurrent'?)"),
        (("--oarlock-layout", "quantized", "--oarlock-options", '{"bits": 5}'), "'bits' must be in (2, 3, 4, 6, 8)"),
        (("--oarlock-layout", "quantized", "--oarlock-options", "bits=5"), "give a JSON object"),
        (("--oarlock-layout", "quantized", "--oarlock-options", "[5]"), "give a JSON object"),
        (("--oarlock-method", "plan"), "did you mean 'plain'?"),
    ],
)
def test_what_cannot_begin_is_one_line(run, arguments, message):
    code, out = run(*arguments)
    assert code == pytest.ExitCode.USAGE_ERROR, out
    (line,) = [line for line in out.splitlines() if line.startswith("ERROR")]
    assert message in line
    assert "Traceback" not in out


def test_it_fails_on_a_layout_that_is_wrong(tmp_path):
    """As an author runs it: a subclass in a test file of their own."""
    (tmp_path / "test_mine.py").write_text(
        "from oarlock.core.testing.layouts import LayoutContract\n"
        "from oarlock.layouts.full import FullCache, FullLayout\n\n"
        "class Sorted(FullCache):\n"
        "    def keep(self, indices):\n"
        "        super().keep(sorted(indices))\n\n"
        "class Mine(FullLayout):\n"
        "    def open(self, layer, options, *, slots, window):\n"
        "        return Sorted(slots)\n\n"
        "class TestMine(LayoutContract):\n"
        "    layout = Mine(name='mine')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-k", "kept_in_any_order", "--tb=short"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "test_rows_are_kept_in_any_order[432" in done.stdout.replace("full-", "")
    assert "after open(slots=1, window=5)" in done.stdout
