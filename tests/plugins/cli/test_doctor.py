"""`oarlock doctor`: what it sees of the machine, and what it advises."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from oarlock.core import manager
from oarlock.plugins.cli import doctor as command
from oarlock.plugins.cli import machine, options, versions
from oarlock.plugins.cli.versions import Version

MAPS = """\
55d0c0000000-55d0c0001000 r-xp 00000000 08:01 131 /usr/bin/python3.11
7f0000000000-7f0000001000 r-xp 00000000 08:01 132                /opt/a b/lib/libblas.so.3
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00000000 08:01 133 /usr/lib/libold.so (deleted)
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0 [vdso]
"""


@pytest.fixture
def alone(monkeypatch):
    """No plugins to check: that is slow, and tested where they are listed."""
    monkeypatch.setattr(manager, "check_plugins", lambda disable: [])


def report(invoke):
    found = json.loads(invoke("doctor", "--json").stdout)
    return {check["name"]: check for check in found["checks"]}, found["advice"]


def test_the_report_covers_the_machine(invoke, alone):
    """It needs no model."""
    checks, _ = report(invoke)
    assert {"oarlock", "python", "mlx", "mlx-lm", "device", "rows", "plugins"} <= set(checks)
    assert checks["mlx"]["value"].startswith("0.32")
    assert checks["mlx"]["detail"] == "tested: >=0.32,<0.33"
    assert checks["device"]["value"].startswith("cpu")
    assert checks["rows"]["value"] > 0


def test_the_table_holds_the_same(invoke, alone):
    shown = invoke("doctor", env={"COLUMNS": "200"}).stdout
    assert "mlx-lm" in shown
    assert "16 rows beside 1" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_blas_is_the_library_whose_products_mlx_calls():
    """It is one of the libraries mapped here, and the preloaded one where there is one."""
    mx.eval(mx.ones((4, 4)) @ mx.ones((4, 4)))
    library = machine.blas_library()
    assert library in {path for _, _, path in machine.mapped(machine.MAPS.read_text())}
    preloaded = [path for path in Path("/proc/self/maps").read_text().split() if "/libopenblas" in path]
    assert machine.family(library) == ("OpenBLAS" if preloaded else machine.REFERENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_slow_blas_is_advised_against_with_a_line_to_type(invoke, alone, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "blas_library", lambda: "/x/mlx_cpu.libs/libblas-1.so.3")
    monkeypatch.setattr(machine, "openblas", lambda: "/somewhere/libopenblas.so.0")
    checks, (advice,) = report(invoke)
    assert checks["blas"]["value"] == machine.REFERENCE
    assert "LD_PRELOAD=/somewhere/libopenblas.so.0 oarlock" in advice
    monkeypatch.setattr(machine, "openblas", lambda: None)
    _, (advice,) = report(invoke)
    assert "libopenblas0-pthread" in advice


def test_rows_that_cost_too_much_are_said(invoke, alone, monkeypatch):
    monkeypatch.setattr(machine, "rows_ratio", lambda: (40.0, 15.5))
    monkeypatch.setattr(machine, "blas_library", lambda: "/x/libopenblas.so.0")
    _, advice = report(invoke)
    assert "16 rows cost 15.5 times one" in advice[0]


def test_an_untested_version_is_said(invoke, alone, monkeypatch):
    """By doctor, and on stderr whenever an engine is opened."""
    newer = [Version("mlx", "0.40.0", ">=0.32,<0.33", in_range=False)]
    monkeypatch.setattr(command, "versions", lambda: newer)
    _, advice = report(invoke)
    assert advice[0] == "mlx 0.40.0 is untested: pip install 'mlx>=0.32,<0.33'"
    monkeypatch.setattr(versions, "versions", lambda: newer)
    assert "mlx 0.40.0 is untested" in options.untested()[0]


def test_the_tested_range_is_that_of_the_metadata():
    found = {version.distribution: version for version in versions.versions()}
    assert set(found) == {"mlx", "mlx-lm"}
    assert all(version.in_range for version in found.values())


def test_maps_are_read_line_by_line():
    """Paths with spaces, anonymous ranges, deleted files."""
    assert list(machine.mapped(MAPS)) == [
        (0x55D0C0000000, 0x55D0C0001000, "/usr/bin/python3.11"),
        (0x7F0000000000, 0x7F0000001000, "/opt/a b/lib/libblas.so.3"),
        (0x7F0000002000, 0x7F0000003000, "/usr/lib/libold.so"),
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3", "OpenBLAS"),
        ("/usr/lib/x86_64-linux-gnu/libopenblasp-r0.3.21.so", "OpenBLAS"),
        ("/opt/intel/libmkl_rt.so.2", "MKL"),
        ("/usr/lib64/libblis.so.4", "BLIS"),
        ("/home/openblas/venv/lib/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", machine.REFERENCE),
        ("/usr/lib/libsomething.so", "an unknown BLAS"),
    ],
)
def test_the_family_is_read_off_the_file(path, name):
    assert machine.family(path) == name


def test_an_openblas_to_preload_is_found(tmp_path):
    """The threaded one first."""
    assert machine.openblas(tmp_path) is None
    for folder in ("lib/aarch64-linux-gnu", "lib/aarch64-linux-gnu/openblas-pthread"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libopenblas.so.0").touch()
    assert machine.openblas(tmp_path) == str(tmp_path / "lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0")
