"""`oarlock plugins`, and what a broken third-party plugin does to the other commands: nothing but be named."""

import json

import pytest

BROKEN = "import pathlib\npathlib.Path('imported').touch()\nimport a_library_that_is_not_installed"
GOOD = """
from oarlock.core import hookimpl
OARLOCK_API = 1
class Policy:
    name = "patient"
    coalesce_s = 0.0
    def ends_after_preparation(self, counts): return False
    def admits_before_decode(self, counts): return False
    def choose(self, lanes): return 0
@hookimpl
def register_policies(register): register(Policy())
"""


@pytest.fixture
def third_party(distribution):
    distribution("acme-layouts", "2.5", {"acme": BROKEN})
    return distribution("zen-policies", "0.3", {"zen": GOOD})


def test_listing_reads_metadata_and_imports_nothing(run, third_party, tmp_path):
    """Name, distribution, version and state; a broken plugin is not noticed, since it is not imported."""
    done = run("plugins", "--json", path=third_party)
    infos = {info["name"]: info for info in json.loads(done.out)}
    assert (infos["acme"]["distribution"], infos["acme"]["version"]) == ("acme-layouts", "2.5")
    assert {info["state"] for info in infos.values()} == {"installed"}
    assert not (tmp_path / "imported").exists()
    assert done.err == ""


def test_check_says_what_each_registers_and_why_one_is_broken(run, third_party):
    """In child processes; the exit code stays 0."""
    done = run("plugins", "--check", "--json", "--disable-plugin", "oarlock", path=third_party)
    infos = {info["name"]: info for info in json.loads(done.out)}
    assert infos["acme"]["state"] == "broken"
    assert "a_library_that_is_not_installed" in infos["acme"]["reason"]
    assert (infos["zen"]["state"], infos["zen"]["api"]) == ("active", 1)
    assert infos["zen"]["registered"] == {"policy": ["patient"]}
    assert infos["full"]["state"] == "blocked"


def test_the_table_shows_the_same(run, third_party):
    done = run("plugins", "--check", "--disable-plugin", "oarlock", path=third_party, COLUMNS="200")
    assert "policy patient" in done.out
    assert "acme-layouts 2.5 (acme) is broken: ModuleNotFoundError" in done.out


@pytest.mark.parametrize("name", ["acme", "acme-layouts", "ACME_Layouts"])
def test_a_blocked_plugin_is_listed_as_blocked(run, third_party, name):
    done = run("plugins", "--json", path=third_party, OARLOCK_PLUGINS=name)
    assert {i["name"]: i["state"] for i in json.loads(done.out)}["acme"] == "blocked"


def test_doctor_names_the_broken_plugin_and_the_blocked_one(run, third_party):
    """With the reason and what to do, in text and in JSON; exit 0."""
    flags = ("--disable-plugin", "oarlock", "--disable-plugin", "zen")
    report = json.loads(run("doctor", "--json", *flags, path=third_party).out)
    (advice,) = [line for line in report["advice"] if "acme" in line]
    assert "acme-layouts 2.5 (acme) is broken: ModuleNotFoundError" in advice
    assert "OARLOCK_PLUGINS=acme" in advice
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["plugin zen"]["value"] == "blocked"


@pytest.mark.fault("Q-01")
def test_generate_works_beside_a_broken_plugin(run, third_party, tiny, solo):
    """It is one line on stderr, and nothing on stdout."""
    done = run("generate", tiny, "fox", "--raw", "--max-tokens", 8, path=third_party)
    assert done.out == solo(prompt="fox", max_tokens=8).text + "\n"
    (line,) = [line for line in done.err.splitlines() if "acme" in line]
    assert line.startswith("warning: plugin broken")
    assert "a_library_that_is_not_installed" in line


@pytest.mark.parametrize("setting", ["layouts.full=acme", "plugins.enable=['acme']"])
def test_naming_the_broken_plugin_is_an_error_with_its_distribution(run, third_party, tiny, setting):
    """One line with name, version and reason; exit 1."""
    done = run("generate", tiny, "fox", "--set", setting, path=third_party, code=1)
    (line,) = [line for line in done.err.splitlines() if line.startswith("Error")]
    assert "plugin 'acme' of acme-layouts 2.5 is broken: ModuleNotFoundError" in line
    assert done.out == ""


def test_naming_a_blocked_plugin_is_an_error_too(invoke, tiny):
    """A flag never silently takes a part away."""
    done = invoke("generate", tiny, "fox", "--set", "layouts.full=full", "--disable-plugin", "full", code=1)
    assert "plugin 'full' of oarlock" in done.stderr


def test_a_log_plugin_writes_to_stderr(run, tiny):
    """stdout is for answers, whatever a plugin logs."""
    done = run("generate", tiny, "fox", "--json", "--max-tokens", 4, "--set", "plugins.enable=['log']")
    assert json.loads(done.out)["id"] == "1"
    assert "request finished" in done.err
