"""Write docs/faults.md: each known failure, the tests that answer it, and what it waits for. It runs no test.

Tests answer an entry by `@pytest.mark.fault("B-01")`, several by several names. A test that plants the fault and
asserts that the check fails is its twin: `@pytest.mark.fault("B-01", twin=True)`. Both are read from the sources.
Run it: `python tests/faults/catalogue.py`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
ISSUES = 7
DONE = 7
"""Issues up to this one are done: their entries are closed, or say why not."""

HEAD = """# Faults

What users of other engines reported in public, and what none of it may do here: {total} failures, in our own words,
ordered by how much they hurt. A test answers an entry; its twin plants the fault and asserts that the test's check
fails, so that no check passes by looking away. Every closed entry of severity S1 or S2 has one.

**S1** silent wrong answer or another user's content; **S2** crash, hang, outage, unbounded memory; **S3** a parameter
ignored, a wrong distribution, a visible defect; **S4** cosmetic or operational. An entry is closed by the first of the
seven issues that has the parts it needs. *Again in* names later issues that bring parts which it can touch too.

This page is made by `make faults` from `tests/faults/catalogue.toml` and the marks of the tests; edit those.

| kind | closed | waiting | open |
|---|---|---|---|
{summary}
"""


@attrs.frozen(kw_only=True)
class Entry:
    """One failure: when it closes, and why it does not where it should have."""

    id: str
    severity: int
    title: str
    issue: int
    again: tuple[int, ...] = attrs.field(default=(), converter=tuple)
    reason: str = ""


@attrs.frozen
class Mark:
    """One test and the entry that it answers, or plants."""

    entry: str
    test: str
    twin: bool


class Misplaced(ValueError):
    """A mark that belongs to no test, or names its entries in a way that cannot be read."""


@attrs.frozen
class Kind:
    """A letter, what it stands for, and its entries."""

    letter: str
    title: str
    entries: tuple[Entry, ...]


def kinds() -> tuple[Kind, ...]:
    """Return the catalogue in its own order."""
    data = tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text(encoding="utf-8"))
    return tuple(
        Kind(
            letter,
            table["title"],
            tuple(Entry(id=f"{letter}-{number}", **facts) for number, facts in table.items() if number != "title"),
        )
        for letter, table in data.items()
    )


def entries() -> dict[str, Entry]:
    """Return every entry by its id."""
    return {entry.id: entry for kind in kinds() for entry in kind.entries}


def marks(root: Path = ROOT) -> list[Mark]:
    """Read the marks of every test file below ``root``/tests."""
    found: list[Mark] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        found += read(path.read_text(encoding="utf-8"), name)
    return found


def read(source: str, name: str) -> list[Mark]:
    """Read the marks of one file. Raises `Misplaced` for one outside the decorators of a test or of its class."""
    tree = ast.parse(source)
    found, seen = [], set()
    for test, decorators in _tests(tree):
        for call in _calls(decorators):
            seen.add(id(call))
            try:
                ids = [ast.literal_eval(argument) for argument in call.args]
                options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            except ValueError:
                ids, options = [], {}
            if not ids or set(options) - {"twin"}:
                msg = f"{name}:{call.lineno}: fault() takes ids as plain strings, and twin=True"
                raise Misplaced(msg)
            found += [Mark(entry, f"{name}::{test}", bool(options.get("twin"))) for entry in ids]
    for call in _calls([tree]):
        if id(call) not in seen:
            msg = f"{name}:{call.lineno}: fault() decorates a test function or a test class"
            raise Misplaced(msg)
    return found


def _tests(tree: ast.Module) -> Iterator[tuple[str, Sequence[ast.expr]]]:
    """Yield each test's name and what decorates it, its class's decorators included."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if _is_test(inner):
                    yield f"{node.name}::{inner.name}", [*node.decorator_list, *inner.decorator_list]
        elif _is_test(node):
            yield node.name, node.decorator_list


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def _calls(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    for root in nodes:
        for node in ast.walk(root):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
                yield node


def status(entry: Entry, found: Sequence[Mark]) -> str:
    """Return "closed", "waiting" or "open"."""
    if entry.issue > DONE:
        return "waiting"
    return "closed" if any(mark.entry == entry.id and not mark.twin for mark in found) else "open"


def problems(found: Sequence[Mark], known: Mapping[str, Entry]) -> list[str]:
    """Say what is wrong: unknown entries, closed ones of S1 and S2 without a twin, open ones without a reason."""
    wrong = [f"{mark.test} names {mark.entry}, which the catalogue lacks" for mark in found if mark.entry not in known]
    twins = {mark.entry for mark in found if mark.twin}
    for entry in known.values():
        state = status(entry, found)
        if state == "closed" and entry.severity <= 2 and entry.id not in twins:
            wrong.append(f"{entry.id} is S{entry.severity} and closed, and no test plants it")
        if state == "open" and not entry.reason:
            wrong.append(f"{entry.id} belongs to issue {entry.issue} of {ISSUES}: no test, and no reason why not")
        if state == "closed" and entry.reason:
            wrong.append(f"{entry.id} is closed and still carries a reason why not")
    return wrong


def page(found: Sequence[Mark], catalogue: Sequence[Kind]) -> str:
    """Return docs/faults.md."""
    counts = []
    for kind in catalogue:
        states = [status(entry, found) for entry in kind.entries]
        row = " | ".join(str(states.count(state)) for state in ("closed", "waiting", "open"))
        counts.append(f"| {kind.letter}. {kind.title} | {row} |")
    total = sum(len(kind.entries) for kind in catalogue)
    text = HEAD.format(total=total, summary="\n".join(counts))
    for kind in catalogue:
        text += (
            f"\n## {kind.letter}. {kind.title}\n\n| entry | | what fails | status | twins |\n|---|---|---|---|---|\n"
        )
        for entry in kind.entries:
            text += _line(entry, [mark for mark in found if mark.entry == entry.id], status(entry, found))
    return text


def _line(entry: Entry, own: Sequence[Mark], state: str) -> str:
    tests = [mark.test for mark in own if not mark.twin]
    words = {
        "closed": "closed",
        "waiting": f"waits for issue {entry.issue} of {ISSUES}",
        "open": f"open: {entry.reason}",
    }
    said = words[state]
    if tests:
        said += ("; so far" if state == "waiting" else "") + ": " + _listed(tests)
    if entry.again:
        said += f"<br>again in {', '.join(map(str, entry.again))} of {ISSUES}"
    twins = _listed([mark.test for mark in own if mark.twin])
    return f"| {entry.id} | S{entry.severity} | {entry.title} | {said} | {twins} |\n"


def _listed(tests: Sequence[str]) -> str:
    return "<br>".join(f"`{test.removeprefix('tests/')}`" for test in dict.fromkeys(tests))


def main() -> None:
    """Write the page and say what is wrong; exit 1 if anything is."""
    found, catalogue = marks(), kinds()
    PAGE.write_text(page(found, catalogue), encoding="utf-8")
    wrong = problems(found, entries())
    states = [status(entry, found) for entry in entries().values()]
    summary = ", ".join(f"{states.count(state)} {state}" for state in ("closed", "waiting", "open"))
    print(f"{PAGE.relative_to(ROOT)}: {summary}", *wrong, sep="\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
