"""Rows' lives in random order, so that orders nobody thought of are tried, and the shortest life that shows a fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

from oarlock.core.testing.layouts.rows import Rows

SEQUENCES, OPERATIONS = 8, 16
MOST_ROWS = 6
DRAFT = 4
LENGTHS = (0, 1, 3, 9, 17, 40, 255)


@attrs.frozen
class Operation:
    """One change. What it does to which rows is drawn from ``seed``, so it fits whatever rows there are."""

    name: str
    seed: int

    def apply(self, rows: Rows) -> None:
        """Do it to the caches and the lists; every token that it forwards is checked."""
        draw = random.Random(self.seed)
        if rows.count > MOST_ROWS:
            rows.keep(range(3))
        if rows.count or self.name in ("enter", "add"):
            _OPERATIONS[self.name](rows, draw)


def sequences(seeds: Sequence[int]) -> list[list[Operation]]:
    """Return one sequence of operations for each seed."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        names = ["enter", *draw.choices(list(_OPERATIONS), list(_WEIGHTS), k=OPERATIONS)]
        found.append([Operation(name, draw.getrandbits(32)) for name in names])
    return found


def live(make: Callable[[], Rows], operations: Sequence[Operation]) -> None:
    """Apply the operations to new caches, then look at every row. Raises AssertionError where the cache is wrong."""
    rows = make()
    try:
        for operation in operations:
            operation.apply(rows)
            rows.check_counts()
        rows.check()
    except AssertionError:
        raise
    except Exception as error:
        msg = f"{type(error).__name__}: {error}; after {', '.join(rows.log)}"
        raise AssertionError(msg) from error


def shortest(make: Callable[[], Rows], operations: Sequence[Operation]) -> AssertionError | None:
    """Return the complaint about the shortest life found that is still wrong; None where it is right."""
    complaint = _complaint(make, operations)
    if complaint is None:
        return None
    left, at = list(operations), len(operations) - 1
    while at >= 0:
        fewer = left[:at] + left[at + 1 :]
        found = _complaint(make, fewer)
        if found is not None:
            left, complaint = fewer, found
        at = min(at, len(left)) - 1
    return complaint


def _complaint(make: Callable[[], Rows], operations: Sequence[Operation]) -> AssertionError | None:
    try:
        live(make, operations)
    except AssertionError as error:
        return error
    return None


# --- the operations -------------------------------------------------------------------------------------------


def _step(rows: Rows, _draw: random.Random) -> None:
    rows.step([1] * rows.count)


def _window(rows: Rows, draw: random.Random) -> None:
    widths = [draw.randint(0, DRAFT) for _ in range(rows.count)]
    widths[draw.randrange(rows.count)] = DRAFT
    kept = [draw.randint(0, width) if rows.cuts else draw.choice((0, width)) for width in widths]
    rows.step(widths, widths if draw.random() < 0.3 else kept)


def _chunk(rows: Rows, draw: random.Random) -> None:
    widths = [draw.choice((0, 0, 1, 7, 20)) for _ in range(rows.count)]
    widths[draw.randrange(rows.count)] = 20
    rows.step(widths)


def _abort(rows: Rows, draw: random.Random) -> None:
    rows.abort(draw.choice((1, 2, 20)), draw.choice((0, 1, None)))


def _enter(rows: Rows, draw: random.Random) -> None:
    lengths, window = [draw.choice(LENGTHS) for _ in range(draw.randint(1, 3))], draw.choice((1, rows.window))
    rows.enter(*lengths, pieces=draw.randint(1, 3), window=window)


def _add(rows: Rows, draw: random.Random) -> None:
    rows.add(draw.randint(1, 2))


def _keep(rows: Rows, draw: random.Random) -> None:
    rows.keep(draw.sample(range(rows.count), draw.randint(0, rows.count)))


def _break(rows: Rows, draw: random.Random) -> None:
    broken = draw.randrange(rows.count)
    rows.poison(broken)
    order = [row for row in range(rows.count) if row != broken]
    draw.shuffle(order)
    rows.keep(order)


def _take(rows: Rows, draw: random.Random) -> None:
    part = rows.take(draw.sample(range(rows.count), draw.randint(1, rows.count)))
    if part.caches[0] is rows.caches[0]:
        return
    part.step([1] * part.count)
    if draw.random() < 0.5:
        rows.fresh = part.fresh
        rows.join(part)


def _restore(rows: Rows, draw: random.Random) -> None:
    row = draw.randrange(rows.count)
    pieces, states = list(rows.pieces[row]), rows.states(row)
    rows.step([1] * rows.count)
    rows.join(rows.restored(states, pieces))


def _cut(rows: Rows, draw: random.Random) -> None:
    if allowed := [tokens for tokens in range(1, min(rows.lengths) + 1) if rows.reusable(tokens)]:
        rows.cut(draw.choice(allowed))


def _compact(rows: Rows, _draw: random.Random) -> None:
    rows.compact()


_OPERATIONS: dict[str, Callable[[Rows, random.Random], None]] = {
    "step": _step, "window": _window, "chunk": _chunk, "abort": _abort, "enter": _enter, "add": _add, "keep": _keep,
    "break": _break, "take": _take, "restore": _restore, "compact": _compact, "cut": _cut,
}  # fmt: skip
_WEIGHTS = (3, 4, 1, 1, 2, 1, 2, 1, 1, 1, 1, 1)
