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
    gone = [attribute for attribute in CACHES[name] if not hasattr(cache, attribute)]
    assert not gone, (
        f"mlx-lm's {name} has no {gone} any more, by which core/layers.py knows a layer's kind and geometry"
    )


# What models ask of caches, and our layouts have (contracts/layout.py, BatchCache); what is of lists and dictionaries of
# caches; and what belongs to caches that a model brings itself, whose layers are refused at bind.
DUCK = {"advance", "keys", "keys_and_values", "lengths", "make_mask", "maybe_trim_front", "offset", "start_position",
        "update_and_fetch", "values"}  # fmt: skip
OF_CONTAINERS = {"append", "get", "setdefault"}
OF_OTHERS = {
    "base.py": {"bits", "group_size"},
    "deepseek_v41.py": {"compress_kv", "index_k", "pending_gate", "pending_kv", "update_window", "window"},
}


def asked(source):
    """Return the attributes that a model's source reads of what it calls a cache."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        base = node.value if isinstance(node, ast.Attribute) else None
        while isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name) and ("cache" in base.id.lower() or base.id == "c"):
            found.add(node.attr)
    return found


def check_duck(sources):
    """``sources``: of mlx-lm's models, by file name. Returns all that they ask for."""
    everything = {name: asked(source) - OF_CONTAINERS for name, source in sources.items()}
    for name, wanted in everything.items():
        new = wanted - DUCK - OF_OTHERS.get(name, set())
        assert not new, (
            f"mlx-lm's {name} asks a cache for {sorted(new)}, which no layout of ours has: its caches have moved"
        )
    return set().union(*everything.values())


@pytest.mark.fault("Q-04")
def test_models_ask_caches_for_nothing_that_ours_lack():
    folder = Path(importlib.import_module("mlx_lm.models").__path__[0])
    models = {path.name: path.read_text() for path in folder.glob("*.py") if path.name != "cache.py"}
    assert len(models) > 100
    assert check_duck(models) >= DUCK, "some of it nobody asks for any more"


@pytest.mark.fault("Q-04", twin=True)
@pytest.mark.parametrize("source", ["cache.rewound(3)", "for c in cache:\n    c.trim_front()", "cache[0].paged"])
def test_twin_a_cache_that_is_asked_for_more_is_noticed(planted, source):
    with planted():
        check_duck({"new.py": source})


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
