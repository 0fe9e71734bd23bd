"""Makes the kit's test items for a plugin named on the command line. Imports neither mlx nor the kit when it loads.

``pytest --oarlock-layout NAME`` in any directory runs the layout contract on an installed layout, and nothing that
lies in that directory, unless files are named as well.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

_CONTRACTS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        "layout": ("oarlock.core.testing.layouts", "LayoutContract"),
        "method": ("oarlock.core.testing.methods", "MethodContract"),
        "processor": ("oarlock.core.testing.processors", "ProcessorContract"),
        "sampler": ("oarlock.core.testing.samplers", "SamplerContract"),
        "state_cache": ("oarlock.core.testing.state_caches", "StateCacheContract"),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("oarlock", "conformance kit of oarlock plugins")
    for kind in _CONTRACTS:
        group.addoption(
            f"--oarlock-{kind.replace('_', '-')}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"run its contract on an installed {kind.replace('_', ' ')}; may be given several times",
        )
    group.addoption(
        "--oarlock-options",
        default="{}",
        metavar="JSON",
        help="""its options as a JSON object, for instance '{"bits": 4}'""",
    )
    group.addoption(
        "--oarlock-tolerance",
        default=0.0,
        type=float,
        metavar="SHARE",
        help="how far a lossy layout may be from exact storage; 0: rounding alone",
    )


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave out the directory's own tests where only the kit was asked for."""
    asked = any(config.getoption(f"oarlock_{kind}") for kind in _CONTRACTS)
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return True if asked and not named else None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the kit's items before the directory's own."""
    made = [
        item
        for kind in _CONTRACTS
        for name in config.getoption(f"oarlock_{kind}")
        for item in _items(session, kind, name)
    ]
    items[:0] = made


def _items(session: pytest.Session, kind: str, name: str) -> list[pytest.Item]:
    import importlib

    from oarlock.core.errors import OarlockError

    module, contract = _CONTRACTS[kind]
    base = getattr(importlib.import_module(module), contract)
    given = {kind: name, "options": _options(session.config), "__module__": module}
    if kind == "layout":
        given["tolerance"] = session.config.getoption("oarlock_tolerance")
    subject = type(f"Test_{name}", (base,), given)
    try:
        subject.check_subject()  # type: ignore[attr-defined]
    except OarlockError as error:
        raise pytest.UsageError(str(error)) from error
    node = _Module.from_parent(session, path=Path(__file__), name=f"oarlock {kind}")
    node.made = types.ModuleType(module)
    setattr(node.made, subject.__name__, subject)
    return list(session.genitems(node))


class _Module(pytest.Module):
    """A module that was made, not read from a file."""

    made: types.ModuleType

    def _getobj(self) -> types.ModuleType:
        return self.made


def _options(config: pytest.Config) -> dict[str, Any]:
    text = config.getoption("oarlock_options")
    try:
        found = json.loads(text)
    except ValueError as error:
        msg = f"--oarlock-options: {error}; give a JSON object"
        raise pytest.UsageError(msg) from error
    if not isinstance(found, dict):
        msg = f"--oarlock-options is {text}; give a JSON object"
        raise pytest.UsageError(msg)
    return found
