"""Capabilities, never identity: the core names no plugin and no model, and knows mlx-lm's caches in two files."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

# Layer kinds are the core's own words, though layouts carry the same names.
KINDS = {"full", "rotating", "recurrent", "chunked", "composite"}
PLUGIN_NAMES = {
    "quantized", "paged", "delayed", "plain", "speculative", "ngram", "draft_model", "fill", "greedy", "categorical",
    "truncate", "penalties", "bias",
}  # fmt: skip
# Defaults of the configuration have to be named somewhere; everything else asks what an object can do.
ALLOWED = {("core/config.py", "plain"), ("core/config.py", "fill")}
CACHE_READERS = {"core/layers.py", "core/bind.py", "layouts/recurrent.py"}


def model_names():
    """Every architecture that mlx-lm has, by the name of its file."""
    folder = Path(importlib.util.find_spec("mlx_lm").origin).parent / "models"
    return {path.stem for path in folder.glob("*.py") if re.search(r"^class Model\b", path.read_text(), re.MULTILINE)}


def identities(source, names):
    """Yield string literals that are the name of a plugin or of a model."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if node.value in names - KINDS and (source.path.as_posix(), node.value) not in ALLOWED:
            yield f"{source.at(node)}  <- the core names {node.value!r}"
        if re.match(r"oarlock\.(?!core)", node.value):
            yield f"{source.at(node)}  <- the core names a module of a bank"


def cache_imports(source):
    """Yield imports of mlx-lm's cache classes."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        if any(module == "mlx_lm.models.cache" or module.startswith("mlx_lm.models.cache.") for module in modules):
            yield f"{source.at(node)}  <- only {', '.join(sorted(CACHE_READERS))} know mlx-lm's caches"


def dangerous(source):
    """Yield what could run stored bytes or strings as code."""
    for node in ast.walk(source.tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        if {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names):
            yield f"{source.at(node)}  <- nothing is ever unpickled"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "compile", "builtins.eval", "builtins.exec"}:
                yield f"{source.at(node)}  <- no text is run as code"
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield f"{source.at(node)}  <- nothing is ever unpickled"


def test_the_core_names_no_plugin_and_no_model(sources):
    """Its own kit apart, which builds models by name."""
    names = PLUGIN_NAMES | model_names()
    core = [source for source in sources if source.bank == "core" and not source.is_kit]
    found = [line for source in core for line in identities(source, names)]
    assert not found, "\n".join(found)


def test_two_files_know_the_caches_of_mlx_lm(sources):
    """And the recurrent layout, since models ask isinstance(cache, ArraysCache). The kit compares with them."""
    others = [s for s in sources if s.path.as_posix() not in CACHE_READERS and not s.is_kit]
    found = [line for source in others for line in cache_imports(source)]
    assert not found, "\n".join(found)


def test_nothing_is_unpickled_or_evaluated(sources):
    """No request and no file can name code."""
    found = [line for source in sources for line in dangerous(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["if method.name == 'speculative': pass", "x = {'llama': 1}", "load('oarlock.layouts.full')"]
)
def test_an_identity_is_found(plant, text):
    """The walk's twin."""
    assert list(identities(plant("core/a.py", text), PLUGIN_NAMES | model_names()))


@pytest.mark.parametrize(
    "text",
    ["from mlx_lm.models.cache import KVCache", "from mlx_lm.models import cache", "import mlx_lm.models.cache as c"],
)
def test_a_cache_import_is_found(plant, text):
    """The walk's twin."""
    assert list(cache_imports(plant("core/a.py", text)))


@pytest.mark.parametrize(
    "text", ["import pickle", "from marshal import loads", "eval('1')", "np.load(f, allow_pickle=True)"]
)
def test_danger_is_found(plant, text):
    """The walk's twin."""
    assert list(dangerous(plant("core/a.py", text)))
