"""A fresh virtual environment with wheels of third-party packages in it, made without network.

Wheels are written here, file by file, so that the test depends on no build tool; pip installs them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

THIRD_PARTY = Path(__file__).parent / "third_party"


def write_wheel(folder, name, version, entry_points, files):
    """Write a pure-Python wheel of ``files`` (path in the wheel -> text) and return its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    lines = ["[oarlock]", *(f"{key} = {value}" for key, value in entry_points.items()), ""]
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join(lines),
    }
    record = [f"{info}/RECORD,,"]
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for target, text in contents.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{target},sha256={digest},{len(text.encode())}")
            wheel.writestr(target, text)
        wheel.writestr(f"{info}/RECORD", "\n".join(record))
    return path


def wheel_of_source(folder, source):
    """Write the wheel of a source directory without its tests, from its own pyproject.toml."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    paths = [path.relative_to(source) for path in sorted(source.rglob("*.py"))]
    files = {str(path): (source / path).read_text() for path in paths if path.parts[0] != "tests"}
    return write_wheel(folder, project["name"], project["version"], project["entry-points"]["oarlock"], files)


def wheel_of_modules(folder, name, version, modules, *, attribute=""):
    """Write a wheel of single modules, each a plugin of its own name."""
    stem = name.replace("-", "_")
    entries = {key: f"{stem}_{key}{attribute}" for key in modules}
    files = {f"{stem}_{key}.py": textwrap.dedent(source) for key, source in modules.items()}
    return write_wheel(folder, name, version, entries, files)


class House:
    """The environment: run code in it, install into it."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        binaries = "Scripts" if sys.platform == "win32" else "bin"
        self.python = folder / binaries / "python"
        scheme = {"base": str(folder), "platbase": str(folder)}
        self.site = Path(sysconfig.get_path("purelib", "venv", scheme))
        # What these tests run with is visible in the new environment, editable installs included.
        ours = sysconfig.get_path("purelib")
        (self.site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def run(self, code, *arguments, check=True, timeout=550):
        """Run a snippet as a user would, isolated from this checkout, and return the finished process."""
        done = subprocess.run(
            [str(self.python), "-I", *(["-c", textwrap.dedent(code)] if code else []), *arguments],
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, done.stderr[-4000:]
        return done

    def answer(self, code):
        """Run a snippet that prints JSON last, and return it."""
        return json.loads(self.run(code).stdout.splitlines()[-1])

    def pytest(self, *arguments, timeout=550):
        """Run tests that must pass, and not be none."""
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *map(str, arguments))
        done = self.run("", *command, check=False, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:]
        assert " passed" in done.stdout

    def registered(self):
        """Return what third-party plugins register, by plugin; all of them must be active."""
        command = ("plugins", "--check", "--json", "--disable-plugin", "oarlock")
        done = self.run("from oarlock.plugins.cli import main; main()", *command)
        infos = [info for info in json.loads(done.stdout) if info["distribution"] != "oarlock"]
        assert {info["state"] for info in infos} <= {"active"}
        return {info["name"]: info["registered"] for info in infos}

    def install(self, *sources):
        """Install the packages of source directories."""
        wheels = [str(wheel_of_source(self.folder, source)) for source in sources]
        self.pip("install", "--no-index", "--no-deps", *wheels)

    def pip(self, *arguments):
        """Run pip on the environment, without network."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


GOOD = """
from oarlock.core import hookimpl
class Item:
    coalesce_s = 0.0
    def __init__(self, name): self.name = name
    def ends_after_preparation(self, counts): return False
    def admits_before_decode(self, counts): return False
    def choose(self, lanes): return 0
@hookimpl
def register_policies(register):
    for name in NAMES:
        register(Item(name))
"""

BROKEN = {
    "imports": "import a_library_that_is_not_installed",
    "syntax": "def f(:",
    "exits": "raise SystemExit('not today')",
    "hook": GOOD + "    raise RuntimeError('half way')\nNAMES = ['half']",
    "typo": "from oarlock.core import hookimpl\n@hookimpl\ndef request_finnished(request): ...",
    "api": GOOD + "NAMES = ['newer']\nOARLOCK_API = 99",
}


@pytest.fixture(scope="session")
def house(tmp_path_factory):
    """The environment with good, broken and quarrelling distributions in it."""
    folder = tmp_path_factory.mktemp("ecosystem")
    wheels = [
        wheel_of_modules(folder, "aaa-before", "1.0", {"before": GOOD + "NAMES = ['before']"}),
        wheel_of_source(folder, THIRD_PARTY / "driftwood"),
        wheel_of_modules(folder, "mmm-broken", "2.5", BROKEN),
        wheel_of_modules(folder, "nnn-attribute", "0.1", {"attribute": "x = 1"}, attribute=":nothing"),
        wheel_of_modules(folder, "twin-one", "1.1", {"one": GOOD + "NAMES = ['twin']"}),
        wheel_of_modules(folder, "twin-two", "2.2", {"two": GOOD + "NAMES = ['Twin']"}),
        wheel_of_modules(folder, "zzz-after", "1.0", {"after": GOOD + "NAMES = ['after']"}),
    ]
    house = House(folder / "venv")
    house.pip("install", "--no-index", "--no-deps", *map(str, wheels))
    return house


@pytest.fixture(scope="session")
def house_of():
    """Make an environment with the packages of source directories in it."""

    def make(folder, *sources):
        house = House(folder)
        if sources:
            house.install(*sources)
        return house

    return make


@pytest.fixture(scope="session")
def examples(tmp_path_factory, root, house_of):
    """An environment with the example packages in it."""
    sources = [path.parent for path in sorted((root / "examples").glob("*/pyproject.toml"))]
    return house_of(tmp_path_factory.mktemp("examples") / "venv", *sources)
