"""The prose against the code: hooks, the twelve-line plugin, the README's example and tables."""

import ast
import importlib
import re
import tomllib
import types

import pytest

from oarlock.core import FinishReason, Request, Usage, manager
from oarlock.core.observe import Observers


def hooks(root):
    """Return {name: exact signature} of every hook, from the source of core/hookspecs.py."""
    tree = ast.parse((root / "core" / "hookspecs.py").read_text())
    found = {}
    for node in tree.body:
        marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
        if any(mark.split("(")[0] == "hookspec" for mark in marks):
            found[node.name] = f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
    return found


def code_blocks(text, language):
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def table(text, title):
    """Return the names in the first column of the table whose header begins with `title`."""
    match = re.search(rf"^\| *{title} *\|.*\n\|[-| :]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert match, f"the page has no table that begins with {title!r}"
    return {re.match(r"\| *`?([\w-]+)`? *\|", line)[1] for line in match[1].splitlines()}


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


@pytest.fixture(scope="module")
def built_in(root):
    """The registries filled from our own entry points, as pyproject.toml has them now."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    modules = [importlib.import_module(target) for target in project["entry-points"]["oarlock"].values()]
    return manager.build(disable=["oarlock"], plugins=modules).registries


def test_every_hook_is_documented_with_its_exact_signature(root):
    """docs/hooks.md lists all of them, in the order of the source, and no other."""
    documented = [
        line for block in code_blocks((root / "docs/hooks.md").read_text(), "python") for line in block.splitlines()
    ]
    assert documented == list(hooks(root).values())


def test_the_readme_lists_every_hook(root, readme):
    """Its one block of signatures is the same list."""
    block = next(block for block in code_blocks(readme, "python") if block.startswith("def register_layouts"))
    assert block.split("\n")[:-1] == list(hooks(root).values())


def test_every_hook_has_a_test(root):
    """For each hook there is a test called test_hook_<name>."""
    tests = {
        name
        for path in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_hook_\w+)", path.read_text())
    }
    missing = {f"test_hook_{name}" for name in hooks(root)} - tests
    assert not missing, sorted(missing)


@pytest.mark.parametrize("page", ["README.md", "docs/plugins.md"])
def test_the_twelve_line_plugin_runs(root, page, capsys):
    """It is loaded as the manager loads any plugin, and its lines are counted."""
    source = next(block for block in code_blocks((root / page).read_text(), "python") if "hookimpl" in block)
    assert len([line for line in source.splitlines() if line.strip()]) <= 12
    tally = types.ModuleType("tally")
    exec(compile(source, page, "exec"), tally.__dict__)  # noqa: S102 - the page is ours
    observers = Observers(manager.build(disable=["oarlock"], plugins=[tally]).manager)
    request = Request(id="a", prompt_ids=[1])
    observers.notify("request_first_token", request=request, elapsed=0.25)
    observers.notify("request_finished", request=request, reason=FinishReason.STOP, usage=Usage(generated_tokens=7))
    assert capsys.readouterr().out == "a: first token after 250 ms\na: stop after 7 tokens\n"


@pytest.mark.parametrize("kind", ["layout", "method", "sampler", "processor"])
def test_the_readme_tables_match_the_registries(built_in, readme, kind):
    """What the README lists is what is registered, name by name."""
    assert table(readme, kind) == set(built_in.of(kind).names())


def test_the_page_on_installing_lists_every_extra(root):
    """And no other."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert table((root / "docs/installing.md").read_text(), "extra") == set(extras)


def test_the_readme_example_is_short(readme):
    """Fifteen lines at most; tests/docs runs them."""
    source = next(block for block in code_blocks(readme, "python") if "Engine.load" in block)
    assert len(source.splitlines()) <= 15


def test_links_between_pages_lead_somewhere(root):
    """Every relative link of README.md, CONTRIBUTING.md and docs/ names a file that is there."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    dead = [
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead, dead
