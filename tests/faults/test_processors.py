"""Kinds F and M, and what of O needs no grammar: processors see each row's own history, and nobody skips them."""

import itertools

import attrs
import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, errors, processing
from oarlock.core.processing import ProcessorGroup
from oarlock.core.sampling import SamplerGroup
from oarlock.samplers.penalties import PenaltyRows


def check_histories(bench, keeping, **settings):
    """Prompt and generated tokens, once each: alone, together, joined late, behind who leaves, and on a prefix."""
    recorder, model = bench.Recorder(), bench.tiny()
    state = {"name": "keeping"}
    engine = bench.engine(model, plugins=[recorder, keeping], state_cache=state, prefill_chunk=4, **settings)
    prompts = [(3, 5, 7), (9, 11), (2, 4, 6, 8, 10, 12, 14, 16, 18), (21,)]
    handles = []

    def submit(mark, prompt, n):
        asked = bench.ask(*prompt, n=n, sampling=SamplingParams(extra={"recorder": mark}))
        handles.append((mark, prompt, engine.submit(asked)))

    submit("alone", prompts[0], 9)
    handles[-1][2].result()
    for number, prompt in enumerate(prompts):
        submit(f"row {number}", prompt, (9, 3, 12, 6)[number])
        engine.submit(bench.ask(*prompt, n=5 + number))
        engine.step()
        engine.step()
    for _, _, handle in handles:
        handle.result()
    submit("prefix", (*prompts[0], *handles[0][2].result().token_ids, 1), 5)
    for mark, prompt, handle in handles:
        said, seen = handle.result().token_ids, [history for history, _ in recorder.noted[mark]]
        assert seen[: len(said)] == [(*prompt, *said[:i]) for i in range(len(said))], mark
        assert {*seen[len(said) :]} <= {(*prompt, *said)}, mark  # a row that is full takes part in one step more
    assert engine.stats()["recoveries"] == 0
    assert keeping.found


SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"pipeline": False}, {"early_first_token": False}, {"mixed": True}], ids=str
)


@pytest.mark.fault("M-11")
@SETTINGS
def test_every_history_is_the_rows_own_once(bench, keeping, settings):
    check_histories(bench, keeping, **settings)


def forget_prompts(row, seen=processing.seen_by_processors):
    return attrs.evolve(seen(row), prompt=row.prompt_ids[-1:])


def double_the_last(row, seen=processing.seen_by_processors):
    return attrs.evolve(seen(row), generated=[*row.token_ids, *row.token_ids[-1:]])


def open_again(self, rows):
    """Forgets what is unread."""
    self.set_rows(())
    self.set_rows(rows)


@pytest.mark.fault("M-11", twin=True)
@pytest.mark.parametrize(
    ("where", "name", "fault", "settings"),
    [
        (processing, "seen_by_processors", forget_prompts, {}),
        (processing, "seen_by_processors", double_the_last, {}),
        (ProcessorGroup, "keep", open_again, {}),
        (SamplerGroup, "push", lambda self, draw: None, {"early_first_token": False}),
        (ProcessorGroup, "push", lambda *_: None, {"pipeline": False}),
    ],
)
def test_twin_a_history_that_is_not_the_rows_is_noticed(
    bench, keeping, planted, monkeypatch, where, name, fault, settings
):
    monkeypatch.setattr(where, name, fault)
    with planted():
        check_histories(bench, keeping, **settings)


PROCESSED = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=1.0, seed=5, frequency_penalty=2.0, logit_bias={3: 2.0, 90: -50.0}),
    SamplingParams(extra={"no_repeat_ngram": 2}, presence_penalty=1.0),
]


def check_joins_and_leaves(bench, **settings):
    """Rows with no, one and two processors, with and without a draw, in orders of joining and of leaving."""
    model, requests = bench.tiny(), []
    for number, params in enumerate(PROCESSED):
        requests.append(Request(prompt_ids=[3 + number, 5, 7], max_tokens=6 + 3 * number, sampling=params))
    wanted = dict(enumerate(bench.alone(model, requests)))
    engine = bench.engine(model, **settings)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        handles = {}
        for number in order:
            handles[number] = engine.submit(requests[number])
            engine.step()
        assert {number: handle.result().token_ids for number, handle in handles.items()} == wanted, order
    assert engine.stats()["recoveries"] == 0


@pytest.mark.fault("F-03")
@SETTINGS
def test_rows_with_and_without_processors_stand_side_by_side(bench, settings):
    check_joins_and_leaves(bench, **settings)


class Stale(ProcessorGroup):
    """Plants: histories stay where they were when rows leave, or are the first rows', or all rows'."""

    def nothing_moves(self, rows):
        self._rows = list(rows)

    def everybody_is_processed(self, logits, errors, lines=None):
        scores = logits
        for opened in self._opened:
            rows = mx.arange(logits.shape[0], dtype=mx.int32) % len(opened.places)
            scores = opened.rows.apply(scores, rows)
        return scores


@pytest.mark.fault("F-03", twin=True)
@pytest.mark.parametrize(("name", "fault"), [("keep", Stale.nothing_moves), ("apply", Stale.everybody_is_processed)])
def test_twin_rows_that_change_places_without_their_processors_are_noticed(bench, planted, monkeypatch, name, fault):
    monkeypatch.setattr(ProcessorGroup, name, fault)
    with planted(IndexError, KeyError, errors.OarlockError):
        check_joins_and_leaves(bench)


def check_temperature_0_skips_nothing(bench):
    """Bias, banned tokens and min_tokens decide, at temperature 0 as at 0.7."""
    words = bench.Words({}, eos=(9,))
    engine = bench.engine(bench.Scripted({1: [9, 10, 11]}), words)
    for temperature in (0.0, 0.7):
        base = SamplingParams(temperature=temperature, seed=1)
        forced = attrs.evolve(base, logit_bias={33: 100})
        away = attrs.evolve(base, logit_bias={9: -100})
        only = attrs.evolve(base, extra={"banned_tokens": [token for token in range(64) if token != 44]})
        requests = [bench.ask(1, n=4, sampling=params) for params in (base, forced, away, only)]
        requests.append(bench.ask(1, n=6, min_tokens=5, sampling=only))
        requests.append(bench.ask(1, n=9, min_tokens=4, sampling=base))
        rows = bench.run(engine, requests)
        assert rows[0] == ()
        assert rows[1] == (33,) * 4
        assert 9 not in rows[2]
        assert len(rows[2]) == 4
        assert rows[3] == (44,) * 4
        assert rows[4] == (44,) * 6
        assert len(rows[5]) >= 4
        assert 9 not in rows[5]


@pytest.mark.fault("M-12")
def test_greedy_rows_are_processed_as_drawn_ones_are(bench):
    check_temperature_0_skips_nothing(bench)


@pytest.mark.fault("M-12", twin=True)
def test_twin_greedy_rows_that_pass_processors_by_are_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(processing, "_asks", lambda each, row: not row.params.greedy and each.handles(row))
    with planted():
        check_temperature_0_skips_nothing(bench)


def check_penalties_count_what_they_say(bench):
    """Repetition counts the prompt, presence and frequency do not: token 5 is in the prompt and nowhere else."""
    model = bench.Scripted({1: [5, 6]})
    engine = bench.engine(model)
    rows = [
        bench.ask(1, 5, 5, n=1, sampling=params)
        for params in (
            SamplingParams(repetition_penalty=1e6, logit_bias={6: 8.5}),
            SamplingParams(presence_penalty=100.0, frequency_penalty=100.0, logit_bias={6: 8.5}),
        )
    ]
    assert bench.run(engine, rows) == [(6,), (5,)]


@pytest.mark.fault("M-11")
def test_repetition_counts_the_prompt_and_presence_does_not(bench):
    check_penalties_count_what_they_say(bench)


@pytest.mark.fault("M-11", twin=True)
@pytest.mark.parametrize("prompts", [0, 10**6])
def test_twin_penalties_on_the_wrong_part_are_noticed(bench, planted, monkeypatch, prompts):
    apply = PenaltyRows.apply

    def shifted(self, logits, rows=None, drafted=None):
        self._prompts = [prompts for _ in self._prompts]
        if prompts:
            self._lengths = [0 for _ in self._lengths]
        return apply(self, logits, rows, drafted)

    monkeypatch.setattr(PenaltyRows, "apply", shifted)
    with planted():
        check_penalties_count_what_they_say(bench)


def check_no_token_is_no_answer(bench):
    """Where processors leave no token the row ends with an error, and never with one that was forbidden."""
    engine = bench.engine(bench.Scripted({1: [10, 11], 2: [20, 21]}))
    every = {"banned_tokens": list(range(63)), "no_repeat_ngram": 1}
    stuck, free = bench.run(engine, [bench.ask(1, n=4, sampling=SamplingParams(extra=every)), bench.ask(2, n=4)])
    assert isinstance(stuck, errors.NonFiniteLogits)
    assert free == (20, 21, 20, 21)


@pytest.mark.fault("O-02")
def test_a_row_that_may_take_nothing_is_not_let_run_free(bench):
    check_no_token_is_no_answer(bench)


@pytest.mark.fault("O-02", twin=True)
def test_twin_a_processor_that_steps_aside_is_noticed(bench, planted, monkeypatch):
    apply = ProcessorGroup.apply

    def lenient(self, logits, errors, lines=None):
        scores = apply(self, logits, errors, lines)
        return mx.where(mx.isfinite(scores).any(axis=-1, keepdims=True), scores, logits)

    monkeypatch.setattr(ProcessorGroup, "apply", lenient)
    with planted():
        check_no_token_is_no_answer(bench)
