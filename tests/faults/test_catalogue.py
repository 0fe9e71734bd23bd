"""The catalogue agrees with the tests: the page is up to date, what is closed has tests, and twins where they count."""

from pathlib import Path

import pytest

PATH = Path(__file__).parent / "catalogue.py"


@pytest.fixture(scope="module")
def catalogue(imported):
    return imported(PATH)


@pytest.fixture(scope="module")
def found(catalogue):
    return catalogue.marks()


def test_the_page_is_up_to_date(catalogue, found):
    """docs/faults.md is what `make faults` would write."""
    wanted = catalogue.page(found, catalogue.kinds())
    assert catalogue.PAGE.read_text(encoding="utf-8") == wanted, "run: make faults"


def test_nothing_is_wrong(catalogue, found):
    """No mark names an unknown entry, closed ones of S1 and S2 have a twin, and open ones say why."""
    assert not catalogue.problems(found, catalogue.entries())


def test_the_catalogue_is_whole(catalogue):
    """All of them, each with a severity, a title of its own and an issue that exists."""
    entries = catalogue.entries()
    assert len(entries) == 107
    assert len({entry.title for entry in entries.values()}) == 107
    for entry in entries.values():
        assert 1 <= entry.severity <= 4
        assert all(entry.issue < later <= catalogue.ISSUES for later in entry.again)


def test_marks_are_read_where_they_stand(catalogue):
    """On functions, on classes, and inside the marks of a parameter."""
    source = """
import pytest
@pytest.mark.fault("A-01", "A-02")
def test_one(): ...
@pytest.mark.fault("B-01")
class TestTwo:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fault("B-02", twin=True))])
    def test_three(self): ...
"""
    read = [(mark.entry, mark.test, mark.twin) for mark in catalogue.read(source, "f.py")]
    assert read == [
        ("A-01", "f.py::test_one", False),
        ("A-02", "f.py::test_one", False),
        ("B-01", "f.py::TestTwo::test_three", False),
        ("B-02", "f.py::TestTwo::test_three", True),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.fault('A-01')\ndef helper(): ...",
        "CASES = [pytest.param(1, marks=pytest.mark.fault('A-01'))]",
        "@pytest.mark.fault()\ndef test_none(): ...",
        "@pytest.mark.fault(NAME)\ndef test_computed(): ...",
        "@pytest.mark.fault('A-01', planted=True)\ndef test_other_word(): ...",
    ],
)
def test_marks_that_reach_no_test_are_refused(catalogue, source):
    with pytest.raises(catalogue.Misplaced, match=r"f\.py:1"):
        catalogue.read(source, "f.py")


def test_each_problem_is_found(catalogue):
    """The twin of `test_nothing_is_wrong`."""
    entry, mark = catalogue.Entry, catalogue.Mark
    known = {
        each.id: each
        for each in (
            entry(id="A-01", severity=2, title="no twin", issue=1),
            entry(id="A-02", severity=3, title="needs none", issue=1),
            entry(id="A-03", severity=1, title="no test", issue=1),
            entry(id="A-04", severity=1, title="excused", issue=1, reason="a reason"),
            entry(id="A-05", severity=1, title="later", issue=catalogue.ISSUES + 1),
            entry(id="A-06", severity=3, title="done after all", issue=1, reason="a reason"),
        )
    }
    found = [mark("A-01", "t", False), mark("A-02", "t", False), mark("A-06", "t", False), mark("Z-99", "t", False)]
    wrong = catalogue.problems(found, known)
    assert len(wrong) == 4
    assert [next(name for name in ("Z-99", "A-01", "A-03", "A-06") if name in text) for text in wrong] == [
        "Z-99",
        "A-01",
        "A-03",
        "A-06",
    ]
