"""FAULTS Q-04: every symbol and attribute of mlx-lm that we use is there, read from our own sources."""

import ast
import importlib
import inspect
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BANKS = ("core", "layouts", "methods", "samplers", "plugins")
LIBRARIES = ("mlx_lm", "mlx")


def uses(source):
    """Yield (module, dotted name or "") of everything of `LIBRARIES` that ``source`` imports or reads through a name."""
    tree = ast.parse(source)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    yield alias.name, ""
                    if alias.asname:
                        aliases[alias.asname] = (alias.name, "")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                yield node.module, alias.name
                aliases[alias.asname or alias.name] = (node.module, alias.name)
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is not None and dotted[0] in aliases:
            module, name = aliases[dotted[0]]
            yield module, ".".join(part for part in (name, *dotted[1:]) if part)


def _dotted(node):
    """Return the names of ``a.b.c``, or None for what is no such chain."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) and parts else None


def missing(module, name):
    """Return whether ``module.name`` cannot be reached; what an instance is asked for is not looked into."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return True
    for part in name.split(".") if name else ():
        if not hasattr(found, part):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
                continue
            except (ImportError, AttributeError):
                return True
        found = getattr(found, part)
        if not (inspect.ismodule(found) or inspect.isclass(found)):
            return False
    return False


def check_contract(sources):
    used = sorted({use for source in sources for use in uses(source)})
    gone = [f"{module}: {name}" for module, name in used if missing(module, name)]
    assert not gone, gone
    return used


def sources():
    return [path.read_text() for bank in BANKS for path in sorted((ROOT / bank).rglob("*.py"))]


# What we ask of mlx-lm's objects: attributes that no import shows.
CACHES = {
    "KVCache": ("offset", "update_and_fetch", "make_mask"),
    "RotatingKVCache": ("max_size", "keep"),
    "ArraysCache": ("cache",),
    "ChunkedKVCache": ("chunk_size",),
    "CacheList": ("caches",),
}
ARGUMENTS = {
    "KVCache": (),
    "RotatingKVCache": (8, 2),
    "ArraysCache": (2,),
    "ChunkedKVCache": (8,),
    "CacheList": (),
}


@pytest.mark.fault("Q-04")
def test_everything_we_use_of_mlx_lm_is_there():
    used = check_contract(sources())
    assert {module for module, _ in used} >= {"mlx.core", "mlx_lm.models.cache"}
    assert len(used) > 40


@pytest.mark.fault("Q-04")
@pytest.mark.parametrize("name", CACHES)
def test_caches_have_what_bind_reads(name):
    cache = getattr(importlib.import_module("mlx_lm.models.cache"), name)(*ARGUMENTS[name])
    assert [attribute for attribute in CACHES[name] if not hasattr(cache, attribute)] == []


@pytest.mark.fault("Q-04")
@pytest.mark.parametrize("library", ["mlx", "mlx-lm"])
def test_the_next_minor_release_is_not_taken_unseen(library):
    pins = [Requirement(line) for line in requires("oarlock") or ()]
    pin = next(r for r in pins if r.name == library and r.marker is None)
    assert "0.32.4" in pin.specifier
    for version in ("0.31.2", "0.33.0", "1.0.0"):
        assert version not in pin.specifier


@pytest.mark.fault("Q-04", twin=True)
@pytest.mark.parametrize(
    "source",
    [
        "from mlx_lm.models.cache import KVCache, CacheOfAnotherRelease",
        "import mlx_lm.of_another_release",
        "import mlx.core as mx\nmx.of_another_release(1)",
        "from mlx_lm.models import cache\ncache.KVCache.of_another_release",
    ],
)
def test_twin_a_symbol_of_another_release_is_noticed(planted, source):
    with planted():
        check_contract([source])
