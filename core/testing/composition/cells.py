"""The cells of the table: what is composed in each, and what came of it."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import attrs

from oarlock.core.errors import BindError
from oarlock.core.testing.composition.case import Case
from oarlock.core.testing.composition.features import FEATURES
from oarlock.core.testing.composition.methods import METHODS
from oarlock.core.testing.composition.reasons import reason_of
from oarlock.core.testing.composition.rows import Shared
from oarlock.core.testing.composition.storages import STORAGES, Storage


@attrs.frozen(order=True)
class Cell:
    """A layout, a method and a feature, by name."""

    layout: str
    method: str
    feature: str

    def __str__(self) -> str:
        """Name all three."""
        return f"{self.layout} x {self.method} x {self.feature}"


class Status(enum.Enum):
    """What became of a cell."""

    EQUAL = "equal"
    REFUSED = "refused"
    DEFECT = "defect"


@attrs.frozen(kw_only=True)
class Outcome:
    """``reason``: the member of `reasons.REASONS`, "" where a refusal is none. ``message``: bind's, or what differs."""

    status: Status
    reason: str = ""
    message: str = ""
    evidence: Mapping[str, int] = attrs.field(factory=dict)


def every_cell() -> Iterator[Cell]:
    """Yield all cells, layout by layout."""
    return itertools.starmap(Cell, itertools.product(STORAGES, METHODS, FEATURES))


def run(cell: Cell, shared: Shared, scratch: Path, storage: Storage | None = None) -> Outcome:
    """Run one cell, of another ``storage`` than the table's where one is given. ``scratch`` is an empty directory."""
    case = Case(storage=storage or STORAGES[cell.layout], method=METHODS[cell.method], shared=shared, scratch=scratch)
    try:
        evidence = FEATURES[cell.feature](case)
    except BindError as error:
        return Outcome(status=Status.REFUSED, reason=reason_of(error) or "", message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the cell shows it
        return Outcome(status=Status.DEFECT, message=f"{type(error).__name__}: {error}")
    idle = [what for what, count in evidence.items() if count <= 0]
    if idle:
        return Outcome(status=Status.DEFECT, message=f"nothing was tried: {', '.join(idle)}", evidence=evidence)
    return Outcome(status=Status.EQUAL, evidence=evidence)


def problems(outcomes: Mapping[Cell, Outcome], cells: Collection[Cell] = ()) -> list[str]:
    """Say what is wrong with a table of ``cells``: empty ones, defects, and refusals that no pair of the three explains.

    Either a layout lacks something for a feature, whatever the method, or a feature and a method do not go together,
    whatever the layout: then all those cells are refused, and for the same reason.
    """
    wrong = [f"{cell}: empty" for cell in cells or every_cell() if cell not in outcomes]
    for cell, outcome in outcomes.items():
        if outcome.status is Status.DEFECT:
            wrong.append(f"{cell}: {outcome.message}")
        elif outcome.status is Status.REFUSED and not outcome.reason:
            wrong.append(f"{cell}: refused for no member of the list: {outcome.message}")
        elif outcome.status is Status.REFUSED:
            beside = [other for other in outcomes if other.feature == cell.feature]
            methods = {outcomes[other].reason for other in beside if other.layout == cell.layout}
            layouts = {outcomes[other].reason for other in beside if other.method == cell.method}
            if {outcome.reason} not in (methods, layouts):
                wrong.append(f"{cell}: refused ({outcome.reason}), and neither in all methods nor in all layouts")
    return wrong
