"""`oarlock new-plugin`: each kind of package is generated, installed, proved by the kit, and uninstalled without a trace."""

import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from oarlock.plugins.cli.app import cli
from oarlock.plugins.cli.new_plugin import KINDS, PLACEHOLDER

CLAUSES = {
    "layout": "is_owned or refuses_in_one_line",
    "method": "a_stop_token",
    "sampler": "says_what_it_is or densities",
    "processor": "says_what_it_is or company",
}
"""Some of each contract that take a second."""
OURS = "lint.isort.known-first-party = ['oarlock']"


def new(folder, *arguments):
    return CliRunner().invoke(cli, ["new-plugin", *arguments, "--into", str(folder)])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where a package of each kind was written."""
    folder = tmp_path_factory.mktemp("written")
    for kind in KINDS:
        done = new(folder, kind, f"my-{kind}")
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def house(written, house_of):
    """An environment with all of them installed."""
    return house_of(written / "venv", *(written / f"my-{kind}" for kind in KINDS))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_module_its_tests_a_project_and_a_readme_are_written(kind, written):
    folder, module = written / f"my-{kind}", f"my_{kind}"
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert paths == ["README.md", f"{module}.py", "pyproject.toml", f"tests/test_{module}.py"]
    assert not [path for path in paths if PLACEHOLDER in (folder / path).read_text().lower()]
    assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == f"oarlock-my-{kind}"


def test_they_are_found_and_gone_once_uninstalled(house, written):
    assert house.registered() == {f"my_{kind}": {kind: [f"my_{kind}"]} for kind in KINDS}
    house.pip("uninstall", "--yes", *(f"oarlock-my-{kind}" for kind in KINDS))
    assert house.registered() == {}
    house.install(*(written / f"my-{kind}" for kind in KINDS))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_they_keep_some_of_the_contract(kind, house, written):
    house.pytest("-k", CLAUSES[kind], str(written / f"my-{kind}" / "tests"))


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_they_keep_all_of_it(kind, house, written):
    house.pytest(str(written / f"my-{kind}" / "tests"), timeout=2300)


@pytest.mark.parametrize("name", ["My-kv", "kv_", "2kv", "a--b", "import", "example", "../kv", ""])
def test_a_name_that_can_be_no_module_is_refused(name, tmp_path):
    done = new(tmp_path, "layout", name)
    assert done.exit_code == 2
    assert repr(name) in done.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "kv").mkdir()
    done = new(tmp_path, "layout", "kv")
    assert (done.exit_code, list((tmp_path / "kv").iterdir())) == (2, [])
    assert "there already" in " ".join(done.output.split())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_written_reads_as_ours_does(kind, tmp_path, root):
    """Formatted and without anything that the linter minds."""
    assert new(tmp_path, kind, "my-own").exit_code == 0
    for check in (
        ["check", "--isolated", "--config", OURS],
        ["format", "--check", "--isolated", "--line-length", "120"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, str(tmp_path)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
