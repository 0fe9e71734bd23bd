"""Imports go one way: banks use the core's public modules, the core knows no bank, and inside it files have ranks."""

import ast

import pytest

# Inside core a file imports from its own rank and the ranks before it.
ORDER = (
    {"errors", "request", "result"},
    {"row", "contracts", "choices", "config", "text", "stops", "tracing", "values", "cleanup"}
    | {"constraints", "lines"},
    {"hookspecs", "registry"},
    {"manager", "discovery", "observe"},
    {"planner", "compaction", "admission", "scheduler", "pace", "adapters", "inputs", "head", "mixed", "tap"},
    {"budget"},
    {"prefill", "recovery", "group", "forward", "sampling", "emission", "publication", "recording", "residency"}
    | {"processing", "preparing", "compiled", "states", "checkpoints", "guarded", "windows", "companion"},
    {"rebuild", "relief"},
    {"layers", "bind", "attention", "mixing", "compiling", "probe", "rehearsal", "evidence", "finding", "intake"}
    | {
        "driver",
        "gauges",
        "mailbox",
        "handle",
        "models",
        "layout_choice",
        "device",
        "driven",
        "journal",
        "agreed",
        "logged",
    },
    {"engine", "aio_handle", "submissions"},
    {"journaled"},
    {"aio"},
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
PUBLIC = {"", "contracts", "errors", "request", "result", "hookspecs", "observe", "row", "testing"}
# What third parties may build on besides, see docs/plugins.md; of ours only what stands for a third party does.
OFFERED = {"oarlock.layouts.coded", "oarlock.samplers.histories", "oarlock.samplers.callables"}
STRANGERS = ("plugins.starters",)
# The command line and the server drive an engine; other plugins are driven by one.
DRIVERS = {"plugins.cli", "plugins.ranks", "plugins.server"}
PUBLIC_TO_DRIVERS = PUBLIC | {"engine", "aio", "aio_handle", "journal", "journaled", "config", "manager", "bind"}


def imports(source, modules):
    """Yield (node, imported module, type-only) for each oarlock module that a source imports, wherever in it."""
    typing_only = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            whole = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules or base == "oarlock" else base for name in whole]
        else:
            continue
        for name in names:
            yield node, name, id(node) in typing_only


def core_file(module):
    """Name the file or package directly below core: '' is oarlock.core itself."""
    return module.removeprefix("oarlock.core").strip(".").split(".")[0]


def refusal(source, module, typing_only):
    """Say why `source` may not import `module`; None when it may."""
    if module.startswith("."):
        return "imports are absolute"
    top = module.split(".")[0]
    if top in {"core", "layouts", "methods", "plugins", "samplers"}:
        return f"{top} is a directory; its package is oarlock.{top}"
    if top != "oarlock":
        return None
    bank = module.split(".")[1] if "." in module else ""
    if source.bank == "core":
        return _refused_inside_core(source, module, bank, typing_only)
    if bank == source.bank:
        return None
    if bank != "core":
        stranger = ".".join(source.path.parts[:2]) in STRANGERS
        return None if stranger and module in OFFERED else f"sideways: {source.bank} may not know {bank}"
    driver = ".".join(source.path.with_suffix("").parts[:2]) in DRIVERS
    if core_file(module) not in (PUBLIC_TO_DRIVERS if driver else PUBLIC):
        return f"{module} is not public to {source.bank}"
    return None


def _refused_inside_core(source, module, bank, typing_only):
    if bank != "core":
        return f"the core knows no bank, and {bank or 'oarlock'} is one"
    mine, other = core_file(source.module), core_file(module)
    if source.is_kit:
        return None
    if other == "testing":
        return "the engine does not import the kit"
    if other == "" and mine != "":
        return "inside core, import from the module that defines the name"
    if mine not in RANK and mine != "":
        return f"core/{mine} has no rank: add it to ORDER here and to the design's list of files"
    if other not in RANK and other != "":
        return f"core/{other} has no rank"
    if mine == "":
        return None if RANK.get(other, 0) <= RANK["hookspecs"] else "oarlock.core offers what needs no engine"
    if not typing_only and RANK[other] > RANK[mine]:
        return f"upward: {mine} stands before {other}"
    return None


def offences(sources):
    modules = {source.module for source in sources}
    found = {
        f"{source.at(node)}  <- {reason}": None  # an ordered set: one import of three names offends once
        for source in sources
        for node, module, typing_only in imports(source, modules)
        if (reason := refusal(source, module, typing_only))
    }
    return list(found)


def test_imports_go_one_way(sources):
    """The import matrix of the design, line by line."""
    found = offences(sources)
    assert not found, "\n".join(found)


def test_every_file_of_core_has_a_rank(sources):
    """A new file of the core is placed before it is written."""
    files = {core_file(source.module) for source in sources if source.bank == "core"} - {"", "testing"}
    assert files <= set(RANK), f"no rank: {sorted(files - set(RANK))}"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/engine.py", "from oarlock.layouts.full import Full"),
        ("core/engine.py", "if TYPE_CHECKING:\n    from oarlock.methods import plain"),
        ("core/planner.py", "from oarlock.core import engine"),
        ("core/row.py", "def late():\n    from oarlock.core.group import ExecutionGroup"),
        ("core/bind.py", "from oarlock.core import Request"),
        ("core/group.py", "from oarlock.core.testing import models"),
        ("core/surprise.py", "from oarlock.core import errors"),
        ("core/__init__.py", "from oarlock.core.engine import Engine"),
        ("core/group.py", "from .row import Row"),
        ("core/group.py", "from core.row import Row"),
        ("layouts/paged.py", "from oarlock.samplers import greedy"),
        ("methods/plain.py", "from oarlock.core.engine import Engine"),
        ("plugins/log.py", "import oarlock.core.manager"),
        ("samplers/greedy.py", "from oarlock.core import sampling"),
    ],
)
def test_a_forbidden_import_is_found(plant, sources, path, text):
    """The walk's twin: each of these lines fails it."""
    source = plant(path, text)
    modules = {source.module for source in sources} | {"oarlock.core.engine", "oarlock.core.sampling"}
    assert [line for node, name, lazy in imports(source, modules) if (line := refusal(source, name, lazy))]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/row.py", "if TYPE_CHECKING:\n    from oarlock.core.admission import GroupKey"),
        ("core/engine.py", "from oarlock.core import errors"),
        ("plugins/cli/run.py", "from oarlock.core.engine import Engine"),
        ("layouts/composite.py", "from oarlock.layouts.full import FullCache"),
        ("layouts/full.py", "from oarlock.core import Request, hookimpl"),
    ],
)
def test_an_allowed_import_is_let_through(plant, sources, path, text):
    """The walk refuses no more than it should."""
    source = plant(path, text)
    modules = {source.module for source in sources}
    assert not [line for node, name, lazy in imports(source, modules) if (line := refusal(source, name, lazy))]


def test_examples_are_short_and_import_what_is_public(root):
    """Under 200 lines, and nothing of ours but what docs/plugins.md offers to anybody."""
    paths = list((root / "examples").glob("*/*.py"))
    assert len(paths) >= 3
    for path in paths:
        text = path.read_text()
        assert len(text.splitlines()) < 200, path
        for node in ast.walk(ast.parse(text)):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            if module and module.startswith("oarlock"):
                public = module.startswith("oarlock.core") and core_file(module) in PUBLIC
                assert public or module in OFFERED, f"{path}: {module} is not public"


def test_the_docs_say_what_is_public(root):
    """Every module that third parties may import, in one list."""
    text = (root / "docs" / "plugins.md").read_text()
    offered = text[text.index("## What a plugin may rely on") : text.index("`OARLOCK_API` is the number")]
    names = {*(name.removeprefix("oarlock.") for name in OFFERED), *(PUBLIC - {""})}
    assert not [name for name in sorted(names) if f"`{name}`" not in offered]
