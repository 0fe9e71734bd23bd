"""The kit on our processors."""

import mlx.core as mx
import pytest

from oarlock.core import SamplingParams
from oarlock.core.testing.processors import ProcessorContract
from oarlock.samplers.callables import per_row
from oarlock.samplers.histories import Histories
from oarlock.samplers.penalties import Penalties, PenaltyRows


def extra(**values):
    return SamplingParams(extra=values)


class TestPenalties(ProcessorContract):
    processor = "penalties"


class TestBias(ProcessorContract):
    processor = "bias"
    params = (
        SamplingParams(logit_bias={0: 1.5, 9: -3}),
        SamplingParams(logit_bias={3: 100.0}),
        extra(banned_tokens=[1, 2, 6, 10]),
        SamplingParams(logit_bias={3: 1.0, 0: 2.0}, extra={"banned_tokens": [3]}),
    )


class TestMinTokens(ProcessorContract):
    processor = "min_tokens"


class TestNgrams(ProcessorContract):
    processor = "no_repeat_ngram"
    params = tuple(extra(no_repeat_ngram=n) for n in (1, 2, 3, 5, 40))


def fewer_of_the_last(strength):
    """As mlx-lm's own: less for each token of the last three."""

    def process(tokens, logits):
        logits[:, tokens[-3:]] = logits[:, tokens[-3:]] - strength
        return logits

    return process


class TestCallables(ProcessorContract):
    processor = per_row("fewer", fewer_of_the_last)
    params = tuple(extra(fewer=strength) for strength in (0.5, 2.0))


# --- twins: a processor with one fault each -------------------------------------------------------------------


class MindsCompany(PenaltyRows):
    """Every row's scores depend on how many there are."""

    def apply(self, logits, rows=None, drafted=None):
        return super().apply(logits, rows, drafted) + 1e-6 * logits.shape[0]


class IgnoresRows(PenaltyRows):
    """Line i is always row i."""

    def apply(self, logits, rows=None, drafted=None):
        lines = None if rows is None else mx.arange(len(rows), dtype=mx.int32) % len(self._params)
        return super().apply(logits, lines, drafted)


class IgnoresDrafts(PenaltyRows):
    """Sees what was accepted alone."""

    def apply(self, logits, rows=None, drafted=None):
        return super().apply(logits, rows)


class KeepsDrafts(PenaltyRows):
    """Takes drafted tokens for accepted ones."""

    def apply(self, logits, rows=None, drafted=None):
        scores = super().apply(logits, rows, drafted)
        if drafted is not None and len(drafted.counts) == len(self._params):
            self.push(drafted.tokens, drafted.counts)
        return scores


class PushesAll(PenaltyRows):
    """Appends what is not real as well."""

    def push(self, tokens, counts):
        super().push(tokens, [tokens.shape[1]] * len(counts))


class NeverRollsBack(PenaltyRows):
    """Keeps what was taken back."""

    def rollback(self, counts):
        pass


class KeepsNothing(PenaltyRows):
    """Histories stay in their old order."""

    def keep(self, indices):
        Histories.keep(self, range(len(indices)))
        self._set([self._params[i] for i in indices])


class ReadsTokens(PenaltyRows):
    """Waits for the device."""

    def push(self, tokens, counts):
        super().push(mx.array(tokens.tolist(), dtype=mx.uint32), counts)


class ChangesWhatItIsGiven(PenaltyRows):
    """Writes into the scores."""

    def apply(self, logits, rows=None, drafted=None):
        scores = super().apply(logits, rows, drafted)
        logits[:] = scores
        return scores


class PilesUp(PenaltyRows):
    """Notes what was pushed in an array that few steps read."""

    def apply(self, logits, rows=None, drafted=None):
        scores = super().apply(logits, rows, drafted)
        self._steps = getattr(self, "_steps", 0) + 1
        return scores + 0 * self._sum if self._steps % 12 == 0 else scores

    def push(self, tokens, counts):
        super().push(tokens, counts)
        self._sum = getattr(self, "_sum", mx.array(0.0)) + tokens.sum()


class SpoilsTheBatch(PenaltyRows):
    """One row's numbers are everybody's."""

    def apply(self, logits, rows=None, drafted=None):
        return super().apply(logits + 0 * logits.sum(), rows, drafted)


class Planted(Penalties):
    name, is_argmax_invariant = "planted", True

    def __init__(self, rows):
        self._rows = rows

    def open(self, rows):
        return self._rows(rows)


@pytest.mark.parametrize(
    ("rows", "clause", "arguments"),
    [
        (MindsCompany, "test_a_row_does_not_mind_its_company", (11, mx.float32)),
        (ChangesWhatItIsGiven, "test_a_row_does_not_mind_its_company", (11, mx.float32)),
        (IgnoresRows, "test_lines_may_be_of_any_row", ()),
        (IgnoresDrafts, "test_a_window_is_the_tokens_one_by_one", (11,)),
        (KeepsDrafts, "test_a_window_changes_nothing", ()),
        (PushesAll, "test_a_history_is_what_was_pushed", ()),
        (NeverRollsBack, "test_pushed_tokens_are_taken_back", ()),
        (KeepsNothing, "test_rows_are_kept_in_any_order", (1,)),
        (PilesUp, "test_pushes_do_not_pile_up", ()),
        (SpoilsTheBatch, "test_a_line_that_is_no_number_spoils_no_other", ()),
        (PenaltyRows, "test_the_best_token_stays_the_best_where_it_says_so", ()),
    ],
)
def test_the_clause_on_a_fault_breaks(rows, clause, arguments):
    class Kit(ProcessorContract):
        processor = Planted(rows)

    with pytest.raises(AssertionError):
        getattr(Kit(), clause)(*arguments)


def test_a_wait_for_the_device_is_found():
    class Kit(ProcessorContract):
        processor = Planted(ReadsTokens)

    with pytest.raises(ValueError, match="eval"):
        Kit().test_nothing_waits_for_the_device()
