"""The skip policy of tests/conftest.py, run on small test files in a directory of their own."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib\nmarkers = weights: real weights\n")
    return pytester


@pytest.mark.parametrize("where", ["test", "module"])
def test_an_unlisted_skip_fails_the_run(suite, where):
    skip = "import pytest; pytest.skip('cannot be bothered', allow_module_level=True)"
    suite.makepyfile(skip if where == "module" else f"def test_it():\n    {skip}")
    result = suite.runpytest_subprocess()
    assert result.ret != 0
    result.stdout.fnmatch_lines("*does not list: *cannot be bothered*")


def test_a_listed_skip_is_counted_with_its_reason(suite):
    suite.makepyfile("import pytest\ndef test_it():\n    pytest.skip('needs macOS')\ndef test_that():\n    pass")
    result = suite.runpytest_subprocess()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["BLAS: *", "tests run: 1 (1 passed, 0 failed)", "*1 x needs macOS*"])


def test_workers_of_xdist_count_the_same(suite):
    suite.makeconftest(
        CONFTEST.read_text() + "\ndef pytest_collection_modifyitems(config, items):\n"
        "    config.hook.pytest_deselected(items=[items.pop()])\n"
    )
    suite.makepyfile(
        "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_it(n):\n    n or pytest.skip('needs macOS')"
    )
    result = suite.runpytest_subprocess("-n", "2")
    result.stdout.fnmatch_lines(
        ["tests run: 7 (7 passed, 0 failed)", "*by a marker: 1", "tests skipped: 1", "*1 x needs macOS*"]
    )


def test_an_expected_failure_is_no_skip(suite):
    suite.makepyfile("import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert False")
    assert suite.runpytest_subprocess().ret == 0
