"""Every cell of docs/composition.md is what the page says, and the page is whole."""

import re

import attrs
import pytest

from oarlock.core.errors import BindError, CompiledRefused, UnsupportedFeature
from oarlock.core.testing.composition import REASONS, Cell, Outcome, Status, cells, every_cell, problems, run
from oarlock.core.testing.composition.case import Case
from oarlock.core.testing.composition.features import FEATURES
from oarlock.core.testing.composition.methods import METHODS
from oarlock.core.testing.composition.storages import STORAGES

CELLS = list(every_cell())
QUICK = {
    Cell(layout, method, feature)
    for start in (0, 5)
    for place, feature in enumerate(FEATURES)
    for layout in [list(STORAGES)[(start + 3 * place) % len(STORAGES)]]
    for method in [list(METHODS)[(start + place) % len(METHODS)]]
}
"""Each feature in two layouts, each layout with two features at least, each method with five."""
FULL = Cell("full", "speculative, ngram", "penalties")


def name(cell):
    return "-".join(re.sub(r"\W+", "_", part) for part in attrs.astuple(cell))


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=name(cell), marks=() if cell in QUICK else pytest.mark.long) for cell in CELLS]
)
def test_a_cell_is_what_the_page_says(cell, page, text, shared, tmp_path):
    """Equal, with counts that prove it; or refused at bind for the same reason, in the same words."""
    outcome = run(cell, shared, tmp_path)
    assert page.word(outcome) == page.word(page.parsed(text)[cell]), f"{outcome.message}; run: make composition"
    if outcome.status is Status.REFUSED:
        assert _unnumbered(f"| {page.quoted(outcome.message)} |") in _unnumbered(text)


def _unnumbered(said):
    """Without the numbers of lines, which are another release's as well."""
    return re.sub(r"\.py:\d+", ".py", said)


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_page_is_whole(page, text):
    """No cell is empty, a defect or refused for a reason of its own, and the top counts just these."""
    outcomes = page.parsed(text)
    assert not problems(outcomes)
    assert set(outcomes) == set(CELLS)
    assert text.startswith(page.head(outcomes)), "run: make composition"
    assert page.tables(outcomes) in text


def test_the_page_holds_the_list_as_it_is(page, text):
    """Reasons and layouts are those of the kit, and every reason is some cell's."""
    assert page.reasons() in text, "run: make composition"
    assert page.layouts() in text, "run: make composition"
    assert {outcome.reason for outcome in page.parsed(text).values()} - {""} == set(REASONS)


def test_every_refusal_has_its_message_on_the_page(page, text):
    """A line for each layout and feature that is refused."""
    said = text.partition("## Messages")[2].partition("\n## ")[0]
    lines = {tuple(line[:2]) for line in (re.findall(r"[^|]+", row) for row in said.splitlines()[4:])}
    refused = {cell for cell, each in page.parsed(text).items() if each.status is Status.REFUSED}
    assert {tuple(part.strip() for part in line) for line in lines if line} == {(c.layout, c.feature) for c in refused}


def test_the_quick_cells_reach_everything():
    """Every layout, every method and every feature, and refusals too."""
    assert {cell.layout for cell in QUICK} == set(STORAGES)
    assert {cell.method for cell in QUICK} == set(METHODS)
    assert {cell.feature for cell in QUICK} == set(FEATURES)


# --- twins: each way in which a cell or the page could look right and be wrong -------------------------------------


def test_twin_an_empty_cell_is_noticed(page, text):
    line = next(line for line in text.splitlines() if line.startswith("| paged | equal"))
    with pytest.raises(ValueError, match="not a valid Status"):
        page.parsed(text.replace(line, line.replace("equal", "", 1), 1))
    with pytest.raises(ValueError, match="shorter"):
        page.parsed(text.replace(line, line.removesuffix(" equal |"), 1))


def test_twin_a_missing_line_is_noticed(page, text):
    line = next(line for line in text.splitlines() if line.startswith("| paged | equal"))
    assert [wrong for wrong in problems(page.parsed(text.replace(line + "\n", "", 1))) if wrong.endswith(": empty")]


def test_twin_a_refusal_of_three_is_noticed(page, text):
    """One cell for a reason that belongs to a layout, or to a method, and not to the cell."""
    outcomes = page.parsed(text)
    outcomes[FULL] = Outcome(status=Status.REFUSED, reason="shape")
    assert [wrong.partition(":")[0] for wrong in problems(outcomes)] == [str(FULL)]


def test_a_method_may_be_refused_a_feature_in_every_layout(page, text):
    outcomes = page.parsed(text)
    column = [cell for cell in CELLS if (cell.method, cell.feature) == (FULL.method, FULL.feature)]
    outcomes |= dict.fromkeys(column, Outcome(status=Status.REFUSED, reason="state"))
    assert not problems(outcomes)
    outcomes[column[0]] = Outcome(status=Status.REFUSED, reason="shape")
    assert len(problems(outcomes)) == len(column)


def test_twin_another_token_is_a_defect(shared, tmp_path, monkeypatch):
    wanted = Case.wanted

    def other(self, *kind):
        first, *rest = wanted(self, *kind)
        return [attrs.evolve(first, token_ids=(*first.token_ids[:-1], first.token_ids[-1] ^ 1)), *rest]

    monkeypatch.setattr(Case, "wanted", other)
    outcome = run(FULL, shared, tmp_path)
    assert outcome.status is Status.DEFECT
    assert "row 0 differs from step 23 on" in outcome.message


def test_twin_a_cell_that_was_idle_is_a_defect(shared, tmp_path, monkeypatch):
    """A method whose drafts are never made."""
    idle = attrs.evolve(METHODS[FULL.method], config={"name": "plain"})
    monkeypatch.setattr(cells, "METHODS", {FULL.method: idle})
    outcome = run(FULL, shared, tmp_path)
    said = "nothing was tried: accepted drafts, rejected drafts"
    assert (outcome.status, outcome.message) == (Status.DEFECT, said)


@pytest.mark.parametrize(
    "error",
    [CompiledRefused("llama", "it is Monday", None), BindError("rows of different length cannot share a forward")],
)
def test_twin_a_refusal_in_other_words_has_no_reason(shared, tmp_path, monkeypatch, error):
    """Nor has one in the words of a member that another error says."""

    def refuse(case):
        raise error

    monkeypatch.setattr(cells, "FEATURES", {FULL.feature: refuse})
    outcome = run(FULL, shared, tmp_path)
    assert (outcome.status, outcome.reason, outcome.message) == (Status.REFUSED, "", str(error))
    assert problems({FULL: outcome}, [FULL]) == [f"{FULL}: refused for no member of the list: {error}"]


def test_twin_what_raises_is_a_defect(shared, tmp_path, monkeypatch):
    """A refusal that comes later than bind, for instance."""

    def refuse(case):
        raise UnsupportedFeature("seed", "it is Monday")

    monkeypatch.setattr(cells, "FEATURES", {FULL.feature: refuse})
    assert run(FULL, shared, tmp_path).status is Status.DEFECT
