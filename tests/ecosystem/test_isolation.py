"""FAULTS Q-03: the core imports alone, from anywhere, whatever optional package is missing or broken."""

import subprocess
import sys

import pytest

BANKS = ("core", "layouts", "methods", "plugins", "samplers")
OPTIONAL = ("gguf", "llguidance", "uvicorn", "fastapi", "starlette", "aiohttp", "pytest", "hypothesis")
BUILD = """
import json, sys
import oarlock.core.engine
from oarlock.core import manager
infos = manager.build().infos
broken = {i.name: i.reason for i in infos if i.distribution == "oarlock" and i.state == "broken"}
print(json.dumps([broken, sorted(name for name in OPTIONAL if name in sys.modules)]))
"""


def run(code, *, cwd, flags=()):
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.fault("Q-03")
def test_what_needs_no_mlx_imports_no_mlx(tmp_path):
    """Requests, errors, hooks, config and the listing of plugins are there on a machine without MLX."""
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm", "transformers", "numpy"):
            raise ImportError(f"{name} is blocked by the test")
sys.meta_path.insert(0, Blocked())
import oarlock.core, oarlock.core.config, oarlock.core.observe
from oarlock.core import manager
assert len(manager.list_plugins()) > 3
infos = manager.build().infos
print({i.state for i in infos if i.name == "full"}, [i.reason for i in infos if i.name == "full"])
"""
    said = run(code, cwd=tmp_path, flags=["-I"])
    assert "broken" in said
    assert "blocked by the test" in said


@pytest.mark.fault("Q-03", twin=True)
def test_the_twin_of_it_is_caught(tmp_path):
    """A core that imported mlx would fail under the same block."""
    code = "import sys; sys.modules['mlx'] = None\ntry:\n    import oarlock.layouts.full\nexcept ImportError: print('caught')"
    assert run(code, cwd=tmp_path, flags=["-I"]) == "caught"


@pytest.mark.fault("Q-03")
@pytest.mark.parametrize("bank", BANKS)
def test_it_imports_from_inside_its_own_directories(root, bank):
    """No file of ours is named like a module that somebody else imports while the engine loads."""
    assert run(f"OPTIONAL = {OPTIONAL}\n{BUILD}", cwd=root / bank).startswith("[{},")


def test_loading_the_engine_imports_nothing_optional(tmp_path):
    """No server, no grammar, no test library: they wait until they are asked for."""
    assert run(f"OPTIONAL = {OPTIONAL}\n{BUILD}", cwd=tmp_path, flags=["-I"]) == "[{}, []]"


@pytest.mark.fault("Q-03")
def test_a_broken_optional_package_breaks_nothing_else(tmp_path):
    """The real error is in the reason of what needs it, at most, and the engine loads."""
    for name in OPTIONAL:
        tmp_path.joinpath(f"{name}.py").write_text("raise ImportError('half installed')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nOPTIONAL = {OPTIONAL}\n{BUILD}"
    assert run(code, cwd=tmp_path, flags=["-I"]) == "[{}, []]"
