"""The site's settings against the files: every page is in the navigation, every contract on its page. It builds nothing."""

import re


def navigation(root):
    """Return the pages that .ci/mkdocs.yml names, in order."""
    settings = (root / ".ci/mkdocs.yml").read_text()
    return re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)


def test_every_page_is_in_the_navigation_once(root):
    """A page that no menu names is found by nobody."""
    pages = sorted(str(path.relative_to(root / "docs")) for path in (root / "docs").rglob("*.md"))
    assert sorted(navigation(root)) == pages


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
