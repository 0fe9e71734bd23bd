"""Kinds E, M and O where drafts are verified: what a window's lines are drawn from and what is heard of them."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, processing
from oarlock.core.constraints import Matcher
from oarlock.core.errors import ConstraintFailed, OarlockError
from oarlock.core.sampling import SamplerGroup
from oarlock.core.testing.oracle import Oracle
from oarlock.samplers.categorical import _Device
from oarlock.samplers.histories import Histories
from oarlock.samplers.penalties import PenaltyRows

METHOD = {"name": "speculative", "proposer": "oracle", "depth": 4, "adaptive": False}
LENGTHS = (30, 3, 12, 7)


def check_as_alone(bench, requests, plugins=(), apart=(), **settings):
    """Requests with drafts, of which some are wrong, joining one by one, say what each says plainly and alone, by ``apart``."""
    model = bench.tiny()
    alone = bench.alone(model, requests, plugins=apart)
    answers = {request.prompt_ids: said for request, said in zip(requests, alone, strict=True)}
    engine = bench.engine(model, plugins=[Oracle(answers=answers, wrong=0.3), *plugins], method=METHOD, **settings)
    handles = []
    for request in requests:
        handles.append(engine.submit(request))
        engine.step()
    results = [handle.result() for handle in handles]
    assert [result.token_ids for result in results] == alone
    stats = engine.stats()
    assert stats["recoveries"] == 0
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    return results


def asks(bench, params, n=20):
    return [
        bench.ask(*prompt, n=n, sampling=each) for prompt, each in zip(bench.prompts(LENGTHS, 97), params, strict=True)
    ]


# --- E-04, M-11: histories ------------------------------------------------------------------------------------------


def check_histories(bench, **settings):
    """Each token was drawn behind the prompt and the tokens before it, once each; without its drafts a line has no other."""
    recorder = bench.Recorder()
    penalty = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    params = [SamplingParams(**penalty, extra={"recorder": row}) for row in range(3)]
    params.append(SamplingParams(temperature=0.9, seed=6, **penalty, extra={"recorder": 3}))
    requests = asks(bench, params)
    results = check_as_alone(bench, requests, [recorder], [bench.Recorder()], **settings)
    for mark, (request, result) in enumerate(zip(requests, results, strict=True)):
        whole = (*request.prompt_ids, *result.token_ids)
        before = {whole[:end] for end in range(len(request.prompt_ids), len(whole) + 1)}
        seen = {history for history, _ in recorder.noted[mark]}
        assert {history[: len(history) - ahead] for history, ahead in recorder.noted[mark]} <= before
        assert before - {whole} <= seen


@pytest.mark.fault("E-04", "M-11")
@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"prefill_chunk": 4}], ids=str)
def test_histories_are_those_of_plain_decoding(bench, settings):
    check_histories(bench, **settings)


def rejected_too(accept):
    """Lets processors believe that everything was taken that a window drew."""

    def everything(self, taken):
        accept(self, taken if self._drawn is None else [self._drawn.shape[1]] * len(taken))

    return everything


LINES = Histories.lines


@pytest.mark.fault("E-04", twin=True)
@pytest.mark.fault("M-11", twin=True)
@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (Histories, "lines", lambda self, rows=None, drafted=None: LINES(self, rows)),
        (SamplerGroup, "accept", rejected_too(SamplerGroup.accept)),
        (SamplerGroup, "accept", lambda self, taken: None),
    ],
    ids=["drafts are not seen", "rejected drafts stay", "accepted drafts are lost"],
)
def test_twin_histories_that_do_not_follow_drafts_are_noticed(bench, planted, monkeypatch, where, name, fault):
    monkeypatch.setattr(where, name, fault)
    with planted():
        check_histories(bench)


# --- M: a window's lines are their row's -------------------------------------------------------------------------------

KINDS = [
    [SamplingParams(), SamplingParams(temperature=2.0, top_k=1, seed=1), SamplingParams(temperature=1.0, min_p=1.0, seed=2),
     SamplingParams(temperature=1.0, seed=5)],
    [SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0.8, top_p=0.8, seed=5),
     SamplingParams(temperature=1.5, top_k=9, seed=6), SamplingParams(temperature=1.2, min_p=0.1, top_p=0.95, seed=7)],
]  # fmt: skip


def check_parameters(bench):
    for params in KINDS:
        check_as_alone(bench, asks(bench, params))


@pytest.mark.fault("M-01", "M-02", "M-04", "M-09")
def test_windows_are_drawn_with_each_rows_parameters_and_seed(bench):
    check_parameters(bench)


def first_row(take=_Device.take):
    return lambda self, rows: take(self, None if rows is None else mx.zeros_like(rows))


def one_key(keys=SamplerGroup._keys):
    return lambda self, places, lines: keys(self, [(row, 0) for row, _ in places], lines)


@pytest.mark.fault("M-02", twin=True)
@pytest.mark.fault("M-04", twin=True)
@pytest.mark.fault("M-01", twin=True)
@pytest.mark.parametrize(
    ("where", "name", "fault"), [(_Device, "take", first_row()), (SamplerGroup, "_keys", one_key())]
)
def test_twin_windows_drawn_with_anothers_are_noticed(bench, planted, monkeypatch, where, name, fault):
    monkeypatch.setattr(where, name, fault)
    with planted():
        check_parameters(bench)


def check_nothing_is_skipped(bench):
    """Bias, banned tokens, min_tokens and log-probabilities, at temperature 0."""
    params = [
        SamplingParams(logit_bias={33: 3.0, 5: -100.0}, logprobs=2),
        SamplingParams(extra={"banned_tokens": list(range(0, 97, 2))}),
        SamplingParams(extra={"no_repeat_ngram": 1}),
    ]
    requests = asks(bench, [*params, SamplingParams()])
    ends = Request(prompt_ids=(9, 8), max_tokens=20, min_tokens=15, stop_token_ids=tuple(range(0, 97, 3)))
    results = check_as_alone(bench, [*requests, ends])
    assert len(results[0].logprobs) == 20
    assert all(token % 2 for token in results[1].token_ids)
    assert len(set(results[2].token_ids)) == 20
    assert len(results[-1].token_ids) >= 15


@pytest.mark.fault("M-12")
def test_greedy_windows_are_processed(bench):
    check_nothing_is_skipped(bench)


@pytest.mark.fault("M-12", twin=True)
def test_twin_windows_that_pass_processors_by_are_noticed(bench, planted, monkeypatch):
    apply = processing.ProcessorGroup.apply

    def single_lines_only(self, logits, errors, lines=None):
        return apply(self, logits, errors) if lines is None else logits

    monkeypatch.setattr(processing.ProcessorGroup, "apply", single_lines_only)
    with planted():
        check_nothing_is_skipped(bench)


@pytest.mark.fault("M-11", twin=True)
def test_twin_penalties_that_see_no_drafts_are_noticed(bench, planted, monkeypatch):
    apply = PenaltyRows.apply
    monkeypatch.setattr(PenaltyRows, "apply", lambda self, logits, rows=None, drafted=None: apply(self, logits, rows))
    with planted():
        check_histories(bench)


# --- O: constraints follow drafts, and are taken back -----------------------------------------------------------------

EOS = 63


class Counting:
    """Allows the ids from 30 on, one after the other, and its end from ``least`` of them on; ``fails`` at so many."""

    terminated = False

    def __init__(self, least=6, fails=None):
        self.least, self.fails, self.taken, self.back = least, fails, [], 0

    def accept(self, token):
        assert self.mask()[token]
        self.taken.append(token)

    def ready(self):
        if len(self.taken) == self.fails:
            msg = "as asked"
            raise LookupError(msg)

    def mask(self):
        mask = np.arange(64) == 30 + len(self.taken)
        mask[EOS] = len(self.taken) >= self.least
        return mask

    def forced(self):
        return ()

    def rollback(self, n):
        self.back += n
        del self.taken[-n:]


def counted(bench, specs, drafts):
    """Results of constrained rows of a model that would end at once, beside a free one; their constraints; the counts."""
    answers = {(8, row): draft for row, draft in enumerate(drafts)} | {(1,): [10, 11, 12, 13] * 4}
    grammar = bench.Grammar(Counting)
    engine = bench.engine(
        bench.Scripted({8: [EOS], 1: [10, 11, 12, 13]}), bench.Words({}, eos=[EOS]),
        plugins=[grammar, Oracle(answers=answers, wrong=0.0, vocabulary=64)], method=METHOD,
    )  # fmt: skip
    asked = [
        Request(prompt_ids=(8, row), max_tokens=12, constraint={"counting": spec}) for row, spec in enumerate(specs)
    ]
    *results, free = engine.generate([*asked, bench.ask(1, n=12)], return_errors=True)
    assert free.token_ids == (10, 11, 12, 13) * 3
    return results, grammar.opened, engine.stats()


RIGHT, ENDS, HALF = range(30, 50), [EOS] * 20, [*range(30, 33), 9, *range(34, 38), EOS, *range(39, 50)]


def check_constraints(bench):
    """Drafts that are right, that would end the row, and that are wrong here and there."""
    results, opened, stats = counted(bench, [{"least": 6}, {"least": 3}, {"least": 12}], [RIGHT, ENDS, HALF])
    for result, constraint, least in zip(results, opened, (6, 3, 12), strict=True):
        assert result.token_ids == tuple(range(30, 30 + least))
        assert constraint.taken[:least] == list(result.token_ids), "each token is heard once, and no draft stays"
    assert opened[0].back + opened[2].back > 0
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.fault("O-04", "O-05")
def test_constraints_hear_what_is_accepted_and_end_where_they_may(bench):
    check_constraints(bench)


@pytest.mark.fault("O-04", twin=True)
@pytest.mark.fault("O-05", twin=True)
@pytest.mark.parametrize("fault", ["drafts stay", "ends are allowed"])
def test_twin_constraints_that_keep_drafts_or_end_too_soon_are_noticed(bench, planted, monkeypatch, fault):
    allowed = Matcher.allowed
    if fault == "drafts stay":
        monkeypatch.setattr(Matcher, "take_back", lambda self, tokens: None)
    else:
        monkeypatch.setattr(Matcher, "allowed", lambda self, *given: allowed(self, *given) | (np.arange(64) == EOS))
    with planted(AttributeError, ConstraintFailed):
        check_constraints(bench)


def check_a_failure_ends_its_row(bench):
    results, _, _ = counted(bench, [{"least": 9, "fails": 5}, {"least": 9}, {"least": 9, "fails": 0}], [RIGHT] * 3)
    assert isinstance(results[0], ConstraintFailed)
    assert results[1].token_ids == tuple(range(30, 39))
    assert isinstance(results[2], ConstraintFailed)


@pytest.mark.fault("O-02")
def test_a_constraint_that_fails_within_a_window_ends_its_row(bench):
    check_a_failure_ends_its_row(bench)


@pytest.mark.fault("O-02", twin=True)
def test_twin_a_window_that_is_let_run_free_is_noticed(bench, planted, monkeypatch):
    along = Matcher.along

    def free(self, sampled, draft, width):
        for mask in along(self, sampled, draft, width):
            yield np.ones(width, dtype=bool) if isinstance(mask, ConstraintFailed) else mask
        self.error = None

    monkeypatch.setattr(Matcher, "along", free)
    with planted(OarlockError, AttributeError):
        check_a_failure_ends_its_row(bench)
