"""The kit on our samplers."""

import mlx.core as mx
import pytest

from oarlock.core.testing.samplers import SamplerContract
from oarlock.samplers.categorical import Categorical, CategoricalRows


class TestGreedy(SamplerContract):
    sampler = "greedy"


class TestCategorical(SamplerContract):
    sampler = "categorical"


# --- twins: a sampler with one fault each ---------------------------------------------------------------------


class MindsCompany(CategoricalRows):
    """Every row's threshold is the batch's."""

    def density(self, logits, rows=None):
        return super().density(logits - logits.min() * (logits.shape[0] % 2), rows) + 1e-6 * logits.shape[0]


class IgnoresKeys(CategoricalRows):
    """Every draw has the first key."""

    def sample(self, logits, keys, rows=None):
        return super().sample(logits, keys * 0, rows)


class KeepsNothing(CategoricalRows):
    """Rows stay what they were."""

    def keep(self, indices):
        self._set(self._params[: len(indices)])


class IgnoresRows(CategoricalRows):
    """Line i is always row i."""

    def density(self, logits, rows=None):
        return super().density(logits, None if rows is None else mx.arange(len(rows)) % len(self._params))


class DrawsTheMasked(CategoricalRows):
    """Takes a token's neighbour."""

    def sample(self, logits, keys, rows=None):
        return super().sample(logits, keys, rows) ^ 1


class SpoilsTheBatch(CategoricalRows):
    """One row's numbers are everybody's."""

    def sample(self, logits, keys, rows=None):
        return super().sample(logits + 0 * logits.sum(), keys, rows)


class Other(Categorical):
    name = "planted"

    def __init__(self, rows):
        self._rows = rows

    def open(self, params):
        return self._rows(params)


@pytest.mark.parametrize(
    ("rows", "clause", "arguments"),
    [
        (MindsCompany, "test_a_row_does_not_mind_its_company", (8, mx.float32)),
        (IgnoresKeys, "test_draws_follow_the_density", ()),
        (KeepsNothing, "test_rows_are_kept_in_any_order", (1,)),
        (IgnoresRows, "test_lines_may_be_of_any_row", ()),
        (DrawsTheMasked, "test_what_is_masked_is_never_drawn", ()),
        (DrawsTheMasked, "test_a_sample_is_a_draw_from_the_density", (8,)),
        (SpoilsTheBatch, "test_a_line_that_is_no_number_spoils_no_other", ()),
    ],
)
def test_the_clause_on_a_fault_breaks(rows, clause, arguments):
    class Planted(SamplerContract):
        sampler = Other(rows)

    with pytest.raises(AssertionError):
        getattr(Planted(), clause)(*arguments)
