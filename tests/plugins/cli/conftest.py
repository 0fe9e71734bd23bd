"""Distributions that are not installed, and two ways to run a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from click.testing import CliRunner


@pytest.fixture(scope="session")
def tiny(saved, tmp_path_factory):
    """The directory of a tiny model with a chat template."""
    return saved(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untalkative(saved, tmp_path_factory):
    """The same without a chat template."""
    return saved(tmp_path_factory.mktemp("untalkative"), template="")


@pytest.fixture(scope="session")
def solo(tiny):
    """Answer one request alone, through the engine and without the command line."""
    from oarlock.core import Request
    from oarlock.core.engine import Engine

    answers = {}

    def answer(**fields):
        key = json.dumps(fields, sort_keys=True)
        if key not in answers:
            with Engine.load(tiny) as engine:
                (answers[key],) = engine.generate([Request.from_mapping(fields)])
        return answers[key]

    return answer


@pytest.fixture
def invoke():
    """Run a command in this process."""
    from oarlock.plugins.cli.app import cli

    def run(*arguments, code=0, **options):
        done = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="oarlock", **options)
        assert done.exit_code == code, done.output + repr(done.exception)
        return done

    return run


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from oarlock.plugins.cli import main
main()
"""
"""As in the foreground of a terminal: what a shell runs behind itself, these tests perhaps, ignores interrupts."""


@pytest.fixture
def start(tmp_path):
    """Start a command in a process of its own, away from this checkout."""

    def start(*arguments, path=None, program=PROGRAM, **variables):
        environment = {**os.environ, **variables}
        environment.pop("OARLOCK_PLUGINS", None) if "OARLOCK_PLUGINS" not in variables else None
        environment["PYTHONPATH"] = str(path or "")
        command = [sys.executable, "-c", program, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)

    return start


@pytest.fixture
def run(start):
    """Run a command in a process of its own and return code, stdout and stderr."""

    def run(*arguments, code=0, given="", **options):
        process = start(*arguments, **options)
        out, err = process.communicate(given.encode(), timeout=180)
        done = SimpleNamespace(code=process.returncode, out=out.decode(), err=err.decode())
        assert code is None or done.code == code, done.err
        return done

    return run


@pytest.fixture
def distribution(tmp_path):
    """Put a distribution on a path: its metadata, and one plugin a module. Nothing is installed."""
    return lambda name, version, modules: write_distribution(tmp_path / "path", name, version, modules)


def write_distribution(folder, name, version, modules):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entries = [f"{key} = {name.replace('-', '_')}_{key}" for key in modules]
    (info / "entry_points.txt").write_text("\n".join(["[oarlock]", *entries, ""]))
    for key, source in modules.items():
        (folder / f"{name.replace('-', '_')}_{key}.py").write_text(textwrap.dedent(source))
    return folder
