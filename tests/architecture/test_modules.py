"""What importing does: no second copies, no mlx where none is needed, no optional package, no work."""

import ast

import pytest

# Packages that extras bring. The core and the banks below must import without them.
OPTIONAL = ("gguf", "hypothesis", "llguidance", "pytest", "_pytest", "starlette", "uvicorn", "mkdocs")

IMPORT_ALL = """
import importlib, pkgutil, sys
names = []
for bank in {banks!r}:
    package = importlib.import_module("oarlock." + bank)
    names += [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.startswith({skip!r}):
        importlib.import_module(name)
"""

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(name + " is optional and was imported")
sys.meta_path.insert(0, Block())
"""


def test_no_directory_becomes_a_top_level_module(run_python):
    """After importing everything, nothing is called core, layouts, methods, plugins or samplers."""
    banks = ("core", "layouts", "methods", "plugins", "samplers")
    code = IMPORT_ALL.format(banks=banks, skip=("oarlock.core.testing.",))
    printed = run_python(code + f"print([n for n in sys.modules if n.split('.')[0] in {banks!r}])")
    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "oarlock.core",
        "oarlock.core.admission",
        "oarlock.core.config",
        "oarlock.core.pace",
        "oarlock.core.planner",
        "oarlock.core.scheduler",
        "oarlock.core.testing.pytest_plugin",
    ],
)
def test_what_needs_no_mlx_imports_none(module, run_python):
    """Scheduling is pure, and neither the public names nor the pytest plugin cost the import of mlx."""
    code = f"import sys, {module}\nprint([n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm')])"
    assert run_python(code).strip() == "[]"


def test_the_pytest_plugin_loads_no_kit(run_python):
    """It is loaded into every pytest run of everyone who has oarlock installed."""
    code = "import sys, oarlock.core.testing.pytest_plugin\nprint(*(n for n in sys.modules if 'oarlock.core.testing' in n))"
    assert set(run_python(code).split()) == {"oarlock.core.testing", "oarlock.core.testing.pytest_plugin"}


def test_the_core_imports_without_any_extra(run_python):
    """Core and banks work on the required dependencies alone."""
    code = BLOCK.format(names=OPTIONAL) + IMPORT_ALL.format(
        banks=("core", "layouts", "methods", "samplers"), skip=("oarlock.core.testing.",)
    )
    run_python(code)


def defines(node):
    """Say whether a statement of a module's top level only gives a name to something."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return "TYPE_CHECKING" in test or "__name__" in test
    if isinstance(node, ast.Try):  # a module that a platform may lack
        caught = {ast.unparse(handler.type) if handler.type else "" for handler in node.handlers}
        return caught == {"ImportError"} and all(
            map(defines, (*node.body, *(s for h in node.handlers for s in h.body)))
        )
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(name, ast.Name) for t in targets for name in getattr(t, "elts", [t]))
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def import_time_work(source):
    """Yield statements of a module's top level that do more than define."""
    return [f"{source.at(node)}  <- work at import time" for node in source.tree.body if not defines(node)]


def environment_reads(source):
    """Yield every use of the process environment."""
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
        name = isinstance(node, ast.alias) and node.name in {"environ", "getenv", "environb"}
        if attribute or name:
            yield f"{source.at(node)}  <- the library reads no environment variable"


def test_no_module_works_when_imported(sources):
    """No patching, no discovery, no logging set-up: a module only defines."""
    found = [line for source in sources for line in import_time_work(source)]
    assert not found, "\n".join(found)


def test_the_library_reads_no_environment_variable(sources):
    """Settings come through EngineConfig. The command line alone may look at the environment."""
    library = [source for source in sources if source.path.parts[:2] != ("plugins", "cli")]
    found = [line for source in library for line in environment_reads(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "structlog.configure()",
        "base.attention = mine",
        "for name in names:\n    register(name)",
        "with lock:\n    x = 1",
        "try:\n    start()\nexcept ImportError:\n    pass",
    ],
)
def test_import_time_work_is_found(plant, text):
    """The walk's twin."""
    assert import_time_work(plant("core/a.py", text))


@pytest.mark.parametrize(
    "text",
    [
        '"""What it is."""',
        "A, B = 1, 2",
        "log = get_logger(__name__)",
        "if TYPE_CHECKING:\n    import a",
        "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None",
    ],
)
def test_a_definition_is_no_work(plant, text):
    """The walk refuses no more than it should."""
    assert not import_time_work(plant("core/a.py", text))


@pytest.mark.parametrize("text", ["os.environ['A']", "os.getenv('A')", "from os import environ"])
def test_an_environment_read_is_found(plant, text):
    """The walk's twin."""
    assert list(environment_reads(plant("core/a.py", text)))
