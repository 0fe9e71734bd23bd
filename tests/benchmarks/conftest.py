"""The benchmarks are programs beside the package: found by path, not installed."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(monkeypatch):
    """Import one file of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def harness():
    """Pairs, quartiles and hashes, which the command line shares."""
    return importlib.import_module("oarlock.plugins.cli.bench.pairs")
