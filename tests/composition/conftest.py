"""The program that writes the page, and what rows say alone, once a process."""

from pathlib import Path

import pytest

from oarlock.core.testing.composition import Shared


@pytest.fixture(scope="session")
def page(imported):
    return imported(Path(__file__).with_name("page.py"))


@pytest.fixture(scope="session")
def text(page):
    """The page as it stands."""
    return page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return Shared(tmp_path_factory.mktemp("shared"))
