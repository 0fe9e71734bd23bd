"""What .ci/check_dist.py and .ci/extras.py find: a good release, and each way in which one can be bad."""

import io
import tarfile
import zipfile

import pytest

PROJECT = """
[project]
name = "oarlock"
version = "1.0"
dependencies = ["click>=8.1"]
[project.optional-dependencies]
cpu = ["mlx[cpu]"]
[project.scripts]
oarlock = "oarlock.core:main"
"""
METADATA = """\
Metadata-Version: 2.4
Name: oarlock
Version: 1.0
Summary: An engine.
Keywords: mlx
Classifier: Programming Language :: Python :: 3
Requires-Python: >=3.11
Description-Content-Type: text/markdown
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: click>=8.1
Provides-Extra: cpu
Requires-Dist: mlx[cpu]; extra == "cpu"

# oarlock
"""
POINTS = "[console_scripts]\noarlock = oarlock.core:main\n"
BANKS = {"core/__init__.py": "", "core/a.py": "x = 1\n", "core/testing/tiny.json": "{}"}
BESIDE = {"LICENSE": "Apache", "README.md": "# oarlock\n", "pyproject.toml": PROJECT}
SDIST = {
    **{f"oarlock-1.0/{name}": text for name, text in {**BANKS, **BESIDE}.items()},
    "oarlock-1.0/PKG-INFO": METADATA,
    "oarlock-1.0/oarlock.egg-info/SOURCES.txt": "",
}
WHEEL = {
    **{f"oarlock/{name}": text for name, text in BANKS.items()},
    "oarlock-1.0.dist-info/METADATA": METADATA,
    "oarlock-1.0.dist-info/entry_points.txt": POINTS,
    "oarlock-1.0.dist-info/licenses/LICENSE": "Apache",
}
INFO = "oarlock-1.0.dist-info/METADATA"


@pytest.fixture(scope="module")
def programs(root, imported):
    """The two programs, by name."""
    return {name: imported(root / ".ci" / f"{name}.py") for name in ("check_dist", "extras")}


@pytest.fixture
def found(tmp_path, programs):
    """Say what is found in an sdist and a wheel with these files, beside a checkout that holds ``BANKS`` and ``BESIDE``."""

    def run(sdist=SDIST, wheel=WHEEL):
        for name, text in {**BANKS, **BESIDE}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        paths = tmp_path / "oarlock-1.0.tar.gz", tmp_path / "oarlock-1.0-py3-none-any.whl"
        with tarfile.open(paths[0], "w:gz") as packed:
            for name, text in sdist.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                packed.addfile(member, io.BytesIO(text.encode()))
        with zipfile.ZipFile(paths[1], "w") as made:
            for name, text in wheel.items():
                made.writestr(name, text)
        return list(programs["check_dist"].faults(*paths, tmp_path))

    return run


def without(files, name):
    return {key: text for key, text in files.items() if key != name}


def test_nothing_is_found_in_a_good_release(found):
    assert found() == []


@pytest.mark.parametrize(
    ("sdist", "wheel", "said"),
    [
        (without(SDIST, "oarlock-1.0/core/a.py"), WHEEL, "has no oarlock-1.0/core/a.py"),
        (SDIST | {"oarlock-1.0/tests/test_a.py": ""}, WHEEL, "brings oarlock-1.0/tests/test_a.py"),
        (SDIST, without(WHEEL, "oarlock/core/testing/tiny.json"), "has no oarlock/core/testing/tiny.json"),
        (SDIST, WHEEL | {"core/a.py": "x = 1\n"}, "brings core/a.py"),
        (SDIST, WHEEL | {"oarlock/core/a.py": "x = 2\n"}, "another oarlock/core/a.py"),
        (
            SDIST,
            without(WHEEL, "oarlock-1.0.dist-info/licenses/LICENSE"),
            "has no oarlock-1.0.dist-info/licenses/LICENSE",
        ),
        (SDIST, WHEEL | {INFO: METADATA.replace("Summary: An engine.\n", "")}, "no summary"),
        (SDIST, WHEEL | {INFO: METADATA.replace("Apache-2.0", "Apache 2")}, "Apache 2"),
        (SDIST, WHEEL | {INFO: METADATA.replace("Summary", "Sumary")}, "sumary"),
        (SDIST, WHEEL | {INFO: METADATA.replace("click>=8.1", "click")}, "does not require click>=8.1"),
        (SDIST, WHEEL | {INFO: METADATA.replace("Provides-Extra: cpu\n", "")}, "extras"),
        (SDIST | {"oarlock-1.0/PKG-INFO": METADATA + "Old.\n"}, WHEEL, "not README.md"),
        (SDIST, WHEEL | {"oarlock-1.0.dist-info/entry_points.txt": ""}, "entry points"),
    ],
)
def test_what_is_wrong_is_named(found, sdist, wheel, said):
    lines = found(sdist, wheel)
    assert len([line for line in lines if said in line]) == 1, lines


@pytest.mark.parametrize(
    ("names", "extra", "title", "wrong"),
    [
        ({"mlx-cpu"}, "cpu", "Linux arm64", False),
        ({"mlx-metal"}, "cpu", "macOS 14 arm64", False),
        (set(), "gguf", "Linux x86-64", False),
        (set(), "cpu", "Linux x86-64", True),
        ({"mlx-metal", "mlx-cpu"}, "cpu", "macOS 14 arm64", True),
        (set(), "", "macOS 14 arm64", True),
    ],
)
def test_an_extra_brings_its_backend_and_no_other(programs, names, extra, title, wrong):
    assert bool(list(programs["extras"].misses({"oarlock", "mlx", "mlx-lm"} | names, extra, title))) is wrong
