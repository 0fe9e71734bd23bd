"""The site's settings against the files: every page is in the navigation, every contract on its page. It builds nothing."""

import ast
import re
import tomllib

from oarlock.core import hookspecs


def navigation(root):
    """Return the pages that .ci/mkdocs.yml names, in order."""
    settings = (root / ".ci/mkdocs.yml").read_text()
    return re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)


def test_every_page_is_in_the_navigation_once(root):
    """A page that no menu names is found by nobody."""
    pages = sorted(str(path.relative_to(root / "docs")) for path in (root / "docs").rglob("*.md"))
    assert sorted(navigation(root)) == pages


def test_every_page_is_linked_from_the_first(root):
    """Whoever reads the pages in the repository has no menu."""
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", (root / "docs/index.md").read_text()))
    assert {*navigation(root)} - linked == {"index.md"}


def test_every_contract_is_on_its_page(root):
    """docs/contracts.md shows each file of core/contracts once, and none that is not there."""
    files = {path.stem for path in (root / "core/contracts").glob("*.py")} - {"__init__"}
    shown = re.findall(r"^::: oarlock\.core\.contracts\.(\w+)$", (root / "docs/contracts.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(files)


def test_the_picture_of_a_step_names_what_there_is(root):
    """Each name in monospace is a method of a class of the core."""
    from oarlock.core import admission, driver, engine, group, handle, prefill, scheduler
    from oarlock.core.contracts import state_cache

    modules = (admission, driver, engine, group, handle, prefill, scheduler, state_cache)
    names = re.findall(
        r"\b([A-Z]\w+)\.(\w+)\b",
        re.sub(r"<style>.*</style>", "", (root / "docs/step.svg").read_text(), flags=re.DOTALL),
    )
    assert len(names) > 7
    for cls, method in names:
        (found,) = {getattr(module, cls) for module in modules if hasattr(module, cls)}
        assert callable(getattr(found, method)), f"{cls}.{method}"


def test_the_page_of_compatibility_says_what_the_import_matrix_says(root):
    """Public modules are those that other banks may import, what third parties are offered besides, and those of programs."""
    tree = ast.parse((root / "tests/architecture/test_imports.py").read_text())
    constants = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    public = ast.literal_eval(constants["PUBLIC"]) | ast.literal_eval(constants["PUBLIC_TO_DRIVERS"].right)
    names = {f"oarlock.core.{name}".rstrip(".") for name in public} | ast.literal_eval(constants["OFFERED"])
    page = (root / "docs/compatibility.md").read_text()
    assert sorted(re.findall(r"^\| `(oarlock[\w.]*)` \|", page, re.MULTILINE)) == sorted(names)


def test_the_page_of_compatibility_names_the_versions_of_pyproject(root):
    page = (root / "docs/compatibility.md").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ranges = [text for text in project["dependencies"] if text.startswith("mlx")]
    assert [text for text in ranges if f"`{text}`" not in page] == []
    assert f"has the number {hookspecs.OARLOCK_API}." in page
    assert project["requires-python"].removeprefix(">=") in page
