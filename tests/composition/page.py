"""Write docs/composition.md: what became of every layout x method x feature. It runs the cells and decides nothing.

Run it: `python tests/composition/page.py`, or with patterns (`"paged x * x seeds"`) to run and print only those cells.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from oarlock.core.testing.composition import REASONS, Cell, Outcome, Shared, Status, every_cell, problems, run
from oarlock.core.testing.composition.features import FEATURES
from oarlock.core.testing.composition.methods import METHODS
from oarlock.core.testing.composition.storages import STORAGES, WORDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "composition.md"

HEAD = """# Composition

| layout x method x feature | cells |
|---|---|
{counts}

**equal**: five rows of different length say, token by token, what the same requests say alone under `plain` with nothing
else switched on; so are finish reasons, counts and log-probabilities, and the counts below prove that the cell was not
idle. **refused**: bind raises an error that names both sides and what is allowed; the reason is one of the closed list
below. A cell is refused only where the layout refuses the feature under every method, or the method in every layout,
and for the same reason. Anything else would be a defect, and would stand here as one.

The models are tiny ones with random weights, in float32 on the CPU, of {words} words each, so that drafts are often right and
often wrong. This page is made by `make composition`; a test runs every cell again and compares.
"""

PROOFS = """
## Proofs

What is forced is `fill`'s; drafts, and what is taken back, are those of `speculative`.

| feature | what rows do | none of these is 0 |
|---|---|---|
"""


def counts(outcomes: Mapping[Cell, Outcome]) -> dict[str, int]:
    """Return the numbers at the page's top."""
    refused = [outcome for outcome in outcomes.values() if outcome.status is Status.REFUSED]
    return {
        "equal": sum(outcome.status is Status.EQUAL for outcome in outcomes.values()),
        "refused with a reason": sum(bool(outcome.reason) for outcome in refused),
        "refused without one (target 0)": sum(not outcome.reason for outcome in refused),
        "defects (target 0)": sum(outcome.status is Status.DEFECT for outcome in outcomes.values()),
        "all": len(outcomes),
    }


def word(outcome: Outcome) -> str:
    """Return what stands in a cell."""
    if outcome.status is Status.REFUSED:
        return f"refused: {outcome.reason or 'no reason'}"
    return outcome.status.value


def outcome(text: str) -> Outcome:
    """Return what a cell's words stand for. Raises ValueError for other words, and for none."""
    status, _, reason = text.partition(": ")
    return Outcome(status=Status(status), reason=reason if reason in REASONS else "")


def head(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return the page down to its first table."""
    lines = "\n".join(f"| {name} | {count} |" for name, count in counts(outcomes).items())
    return HEAD.format(counts=lines, words=WORDS)


def tables(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return one table of layouts and features a method."""
    text = ""
    for method in METHODS:
        text += f"\n## {method}\n\n| layout | {' | '.join(FEATURES)} |\n|{'---|' * (1 + len(FEATURES))}\n"
        for layout in STORAGES:
            cells = [word(outcomes[Cell(layout, method, feature)]) for feature in FEATURES]
            text += f"| {layout} | {' | '.join(cells)} |\n"
    return text


def layouts() -> str:
    """Return on which model each layout is tried, and by which config."""
    lines = [
        f"| {name} | {each.model} | {'`' + json.dumps(dict(each.layouts)) + '`' if each.layouts else ''} | {each.note} |\n"
        for name, each in STORAGES.items()
    ]
    return "\n## Layouts\n\n| layout | model | `[layouts]` | |\n|---|---|---|---|\n" + "".join(lines)


def reasons() -> str:
    """Return the closed list."""
    lines = [f"| {reason.name} | `{reason.error.__name__}` | {reason.why} |\n" for reason in REASONS.values()]
    return "\n## Reasons\n\n| refused | raised at bind | inequality or missing operation |\n|---|---|---|\n" + "".join(
        lines
    )


def messages(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return what bind says: one line for cells that say the same."""
    said: dict[tuple[str, str, str], None] = {}
    for cell, each in outcomes.items():
        if each.status is not Status.EQUAL:
            said[cell.layout, cell.feature, each.message] = None
    lines = [f"| {layout} | {feature} | {quoted(message)} |\n" for layout, feature, message in said]
    return "\n## Messages\n\n| layout | feature | message |\n|---|---|---|\n" + "".join(lines)


def proofs(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return what each feature does, and what is counted."""
    lines = []
    for feature, does in FEATURES.items():
        shown = {name: None for one, each in outcomes.items() if one.feature == feature for name in each.evidence}
        said = quoted(" ".join((does.__doc__ or "").split()))
        lines.append(f"| {feature} | {said} | {', '.join(shown)} |\n")
    return PROOFS + "".join(lines)


def page(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return docs/composition.md."""
    return head(outcomes) + tables(outcomes) + reasons() + messages(outcomes) + layouts() + proofs(outcomes)


def parsed(text: str) -> dict[Cell, Outcome]:
    """Read the cells of a page. Raises ValueError for one that says nothing, or something unknown."""
    found = {}
    for method in METHODS:
        block = text.partition(f"\n## {method}\n")[2].partition("\n## ")[0]
        for line in re.findall(r"^\| (?!layout )(.*) \|$", block, re.MULTILINE):
            layout, *cells = re.split(r" *\| *", line)
            for feature, said in zip(FEATURES, cells, strict=True):
                found[Cell(layout, method, feature)] = outcome(said)
    return found


def run_all(patterns: Sequence[str] = ("*",)) -> Iterator[tuple[Cell, Outcome]]:
    """Run the cells that a pattern names, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shared = Shared(_made(scratch / "shared"))
        for number, cell in enumerate(every_cell()):
            if any(fnmatch.fnmatch(str(cell), pattern) for pattern in patterns):
                yield cell, run(cell, shared, _made(scratch / str(number)))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def quoted(text: str) -> str:
    """Return a text as it stands in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def main(*patterns: str) -> None:
    """Write the page, or print the cells that were named; exit 1 if anything is wrong."""
    mx.set_default_device(mx.cpu)
    outcomes = {}
    for cell, each in run_all(patterns or ("*",)):
        outcomes[cell] = each
        detail = each.message or ", ".join(f"{name}: {count}" for name, count in each.evidence.items())
        print(f"{cell}: {word(each)} ({detail})", flush=True)
    wrong = problems(outcomes, outcomes)
    if not patterns:
        PAGE.write_text(page(outcomes), encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: " + ", ".join(f"{count} {name}" for name, count in counts(outcomes).items()))
    print(*wrong, sep="\n", end="")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
