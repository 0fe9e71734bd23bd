"""Layout x method x feature: every cell runs on a tiny model and says what each request says alone, or is refused.

It decides nothing about a cell: `cells.run` finds out, and whoever asks compares.
"""

from oarlock.core.testing.composition.cells import Cell, Outcome, Status, every_cell, problems, run
from oarlock.core.testing.composition.reasons import REASONS, Reason
from oarlock.core.testing.composition.rows import Shared

__all__ = ["REASONS", "Cell", "Outcome", "Reason", "Shared", "Status", "every_cell", "problems", "run"]
