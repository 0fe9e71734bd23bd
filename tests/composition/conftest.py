"""The program that writes the page, and what rows say alone, once a process."""

import importlib.util
import sys
from pathlib import Path

import pytest

from oarlock.core.testing.composition import Shared


@pytest.fixture(scope="session")
def page():
    spec = importlib.util.spec_from_file_location("composition_page", Path(__file__).with_name("page.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="session")
def text(page):
    """The page as it stands."""
    return page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return Shared(tmp_path_factory.mktemp("shared"))
