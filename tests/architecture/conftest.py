"""The source tree, parsed once for all walks. What is allowed stands in the walks themselves."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANKS = ("core", "layouts", "methods", "plugins", "samplers")


@dataclass(frozen=True)
class Source:
    """One Python file of the five packages: where it stands, what it is called, what it says."""

    path: Path
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False, compare=False)

    @classmethod
    def read(cls, path: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        return cls(path.relative_to(ROOT), text, ast.parse(text, str(path)))

    @classmethod
    def planted(cls, path: str, text: str) -> Source:
        """A source that no file holds: the twin of a walk plants a fault with it."""
        return cls(Path(path), text, ast.parse(text))

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(("oarlock", *(parts[:-1] if parts[-1] == "__init__" else parts)))

    @property
    def bank(self) -> str:
        return self.path.parts[0]

    @property
    def is_kit(self) -> bool:
        """Part of core/testing, which serves tests and is held to the rules of tests."""
        return self.path.parts[:2] == ("core", "testing")

    def at(self, node: ast.AST) -> str:
        """Name the offending line: path, number, text."""
        line = getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {self.text.splitlines()[line - 1].strip()}"


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every Python file of the five packages."""
    return [Source.read(path) for bank in BANKS for path in sorted((ROOT / bank).rglob("*.py"))]


@pytest.fixture(scope="session")
def plant():
    """Make a source from a path and a text."""
    return Source.planted


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """Every path of the project: what git tracks, or what lies there where there is no git."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return [name for name in names.split("\0") if name]
    made = {".venv", ".git", ".hypothesis", "__pycache__", "build", "dist"}
    names = sorted(path.name for path in ROOT.iterdir())
    return [name for name in names if name not in made and not name.endswith(("_cache", ".egg-info"))]


@pytest.fixture(scope="session")
def run_python(tmp_path_factory):
    """Run a snippet in a fresh interpreter, outside the checkout and isolated from it; return what it prints."""

    def run(code: str) -> str:
        where = tmp_path_factory.mktemp("elsewhere")
        done = subprocess.run(
            [sys.executable, "-I", "-c", code], cwd=where, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
