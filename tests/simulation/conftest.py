"""Makes the package `harness` beside this file importable, and a set of instruments a module: what they patch is everyone's."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest


def load_harness() -> None:
    """Import the directory ``harness`` under its own name: tests are not on the path."""
    if "harness" not in sys.modules:
        init = Path(__file__).with_name("harness") / "__init__.py"
        spec = importlib.util.spec_from_file_location("harness", init, submodule_search_locations=[str(init.parent)])
        sys.modules["harness"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["harness"])


load_harness()


@pytest.fixture(scope="module")
def tools():
    from harness.instruments import instruments

    gc.collect()
    gc.freeze()  # what lives now is not looked through again after each schedule
    with instruments() as tools:
        yield tools
