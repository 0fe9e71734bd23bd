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
