"""Keeping rows within the budget: who may enter, and who leaves when the next step would hold too much.

A row that leaves waits at the head of the queue and is computed again from its delivered tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from oarlock.core.budget import Budget, Holding, final
from oarlock.core.group import ExecutionGroup
from oarlock.core.prefill import PrefillCohort
from oarlock.core.row import Row


def newest_first(rows: Sequence[Row]) -> list[Row]:
    """Return rows in the order in which they must leave."""
    return sorted(rows, key=lambda row: -row.admitted_number)


@attrs.define(eq=False)
class Relief:
    """Applies the budget to the running group and to the preparation beside it."""

    budget: Budget
    group: ExecutionGroup
    put_back: Callable[[Row], None]
    preemptions: int = 0

    def affords(self, row: Row, preparation: PrefillCohort | None) -> bool:
        """Return whether a row may enter beside those there are."""
        if self.budget.limit is None:
            return True
        holdings = self._holdings(preparation)
        beside = self.group.beside([tokens for holding in holdings for tokens in holding.final] + [final(row)])
        return self.budget.admits(row, *holdings, beside)

    def relieve(self, preparation: PrefillCohort | None) -> PrefillCohort | None:
        """Preempt the newest rows while the next step would hold too much; return what is left of the preparation.

        A lone row is left alone: it was refused if it did not fit. What is left is the method's, for what it can do without.
        """
        while (row := self._excess(preparation)) is not None:
            if preparation is not None and row in preparation.rows:
                preparation.evict(row)
                preparation = preparation if preparation.rows else None
            elif not self.group.evict(row):
                continue
            self.preempt(row)
        if self.budget.limit is not None:
            self.group.spare(lambda: self.budget.left(*self._holdings(preparation)))
        return preparation

    def preempt(self, row: Row) -> None:
        """Let a row whose state is gone wait at the head of the queue."""
        row.preempted = True
        self.preemptions += 1
        self.put_back(row)

    def portions(self, suspects: Sequence[Sequence[Row]]) -> list[list[Row]]:
        """Cut sets of rows that lost their state into such as can be built anew at once, the newest first."""
        if self.budget.rebuilds([row for rows in suspects for row in rows]):
            return [list(rows) for rows in suspects if rows]
        portions: list[list[Row]] = []
        for rows in reversed(suspects):
            portion: list[Row] = []
            for row in newest_first(rows):
                if not self.budget.rebuilds([row, *portion]):
                    portions.append(portion)
                    portion = []
                portion.insert(0, row)
            portions += [portion] if portion else []
        return portions

    def _excess(self, preparation: PrefillCohort | None) -> Row | None:
        """Return who must leave before the next step, None where it fits."""
        if self.budget.limit is None or self.budget.relieves(*(holdings := self._holdings(preparation))):
            return None
        rows = [row for holding in holdings for row in holding.rows]
        return newest_first(rows)[0] if len(rows) > 1 else None

    def _holdings(self, preparation: PrefillCohort | None) -> tuple[Holding, Holding]:
        return self.group.holding(), preparation.holding() if preparation is not None else Holding()
