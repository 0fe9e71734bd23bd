"""Processors in the engine: each row's own history, whoever joins, leaves and fails, and no trace where nobody asks."""

import random
from collections import Counter

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import NonFiniteLogits
from oarlock.core.intake import admit_request
from oarlock.core.lines import Lines
from oarlock.core.processing import ProcessorGroup
from oarlock.core.testing import models
from oarlock.samplers.categorical import CategoricalRows
from oarlock.samplers.greedy import GreedyRows
from oarlock.samplers.histories import Histories

SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline": False},
        {"early_first_token": False},
        {"mixed": True, "mixed_token_budget": 24, "prefill_chunk": 8},
        {"mixed": True, "mixed_token_budget": 24, "prefill_chunk": 8, "pipeline": False},
        {"vectorised_sampling": False},
    ],
    ids=str,
)
UNMIXED = pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"early_first_token": False}], ids=str)


# --- against references -----------------------------------------------------------------------------------------


PENALISED = [
    {},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 3.0},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {5: 3.0, 9: -100.0, 96: 8.0}, "repetition_penalty": 1.3},
    {"extra": {"no_repeat_ngram": 2, "banned_tokens": [1, 2, 3]}},
    {"repetition_penalty": 0.7, "frequency_penalty": 2.0, "extra": {"no_repeat_ngram": 3}},
]


def reference(params, prompt_tokens):
    """What mlx-lm's own generation calls: the same in numpy, from the formulas."""

    def process(tokens, logits):
        known, scores = np.array(tokens).tolist(), np.array(logits.astype(mx.float32))[0]
        generated = known[prompt_tokens:]
        for token, bias in (params.logit_bias or {}).items():
            scores[token] += np.float32(bias)
        scores[list(params.extra.get("banned_tokens", ()))] = -np.inf
        n = params.extra.get("no_repeat_ngram", len(known) + 1)
        for end in range(n, len(known) + 1):
            if known[end - n : end - 1] == known[len(known) - n + 1 :]:
                scores[known[end - 1]] = -np.inf
        for token in set(known):
            penalty = np.float32(params.repetition_penalty)
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        for token in set(generated):
            scores[token] -= np.float32(params.presence_penalty)
            scores[token] -= np.float32(params.frequency_penalty) * np.float32(generated.count(token))
        return mx.array(scores[None])

    return process


@SETTINGS
def test_greedy_rows_get_the_tokens_of_a_reference(engines, tiny, settings):
    """Rows that ask for this and that join one by one and leave after different lengths."""
    rng, tokens = random.Random(3), 30
    asked, wanted = [], []
    for number, fields in enumerate(PENALISED):
        params, prompt = SamplingParams(**fields), rng.choices(range(60), k=(5, 23, 11)[number % 3])
        count = tokens - 4 * (number % 4)
        asked.append(Request(prompt_ids=prompt, max_tokens=count, sampling=params))
        wanted.append(models.serial(tiny, prompt, count, logits_processors=[reference(params, len(prompt))]))
    plain = [models.serial(tiny, request.prompt_ids, request.max_tokens).tokens for request in asked]
    assert all(own.tokens != bare for own, bare in zip(wanted[1:], plain[1:], strict=True))
    engine = engines(tiny, **settings)
    handles = []
    for request in asked:
        handles.append(engine.submit(request))
        engine.step()
        engine.step()
    said = [handle.result().token_ids for handle in handles]
    assert engine.stats()["recoveries"] == 0
    models.compare(said, [row.tokens for row in wanted], [row.gaps for row in wanted]).check()


def drawn_requests(count=8):
    """Rows with and without processors, greedy and seeded, of uneven lengths, with ends that min_tokens puts off."""
    rng, asked = random.Random(7), []
    for number in range(count):
        fields = PENALISED[number % len(PENALISED)]
        params = SamplingParams(**fields, temperature=(0.0, 0.9)[number % 2], seed=number, logprobs=2)
        asked.append(
            Request(
                prompt_ids=rng.choices(range(60), k=rng.randrange(3, 30)),
                max_tokens=rng.randrange(6, 24),
                min_tokens=(0, 5, 3)[number % 3],
                stop_token_ids=range(0, 97, 3),
                sampling=params,
                id=f"row {number}",
            )
        )
    return asked


def check_alike(results, wanted):
    for result, own in zip(results, wanted, strict=True):
        assert (result.token_ids, result.finish_reason) == (own.token_ids, own.finish_reason)
        np.testing.assert_allclose(
            [record.logprob for record in result.logprobs], [record.logprob for record in own.logprobs], atol=1e-4
        )


@pytest.fixture(scope="module")
def drawn_alone(tiny):
    """What `drawn_requests` get one at a time."""
    with Engine(tiny, config={"scheduler": {"max_batch": 1}}) as engine:
        return engine.generate(drawn_requests())


@SETTINGS
def test_a_row_among_others_is_the_row_alone(engines, tiny, drawn_alone, settings):
    """Rows that join at different times and leave at different lengths, or at an end that min_tokens put off."""
    engine, handles = engines(tiny, max_batch=5, **settings), []
    for request in drawn_requests():
        handles.append(engine.submit(request))
        engine.step()
    check_alike([handle.result() for handle in handles], drawn_alone)


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_come_and_go_at_random_are_the_rows_alone(engines, tiny, drawn_alone, seed):
    """Any order and time of joining, consumers that stop and that raise, cancellations, in any mode."""
    rng = random.Random(seed)
    settings = {
        "pipeline": rng.random() < 0.7,
        "early_first_token": rng.random() < 0.5,
        "max_batch": rng.randrange(2, 7),
    }
    settings |= {"mixed": rng.random() < 0.5, "prefill_chunk": rng.choice([4, 16, 64])}
    engine, handles = engines(tiny, **settings), []
    order = rng.choices(range(8), k=14)
    for place, number in enumerate(order):
        limit, raises = rng.choice([2, 5, 100]), rng.random() < 0.3

        def consume(event, limit=limit, raises=raises):
            if event.index + 1 == limit and raises:
                raise KeyError("consumer")
            return event.index + 1 < limit

        request = attrs.evolve(
            drawn_requests()[number], id=f"{place}", on_token=consume if rng.random() < 0.5 else None
        )
        handles.append((number, engine.submit(request)))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.25:
            rng.choice(handles)[1].cancel()
    while engine.step():
        pass
    whole = 0
    for number, handle in handles:
        row, own = handle._row, drawn_alone[number]
        assert tuple(row.token_ids) == own.token_ids[: len(row.token_ids)]
        assert row.reason in {own.finish_reason, "stop", "cancelled", None}
        whole += tuple(row.token_ids) == own.token_ids
    assert whole >= 4
    assert engine.stats()["recoveries"] == 0


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_row_that_was_preempted_goes_on_from_all_of_its_tokens(engines, tiny, drawn_alone, pipeline):
    largest = engines(tiny).bound.bytes_at(60)
    engine = engines(tiny, pipeline=pipeline, kv_budget=3 * largest, overcommit=4.0)
    check_alike(engine.generate(drawn_requests()), drawn_alone)
    assert engine.stats()["preemptions"] >= 2


@pytest.mark.parametrize("early_first_token", [True, False])
@pytest.mark.parametrize("call", range(2, 10))
def test_a_row_that_is_computed_again_goes_on_from_its_own_tokens(engines, successor, device, call, early_first_token):
    """The device fails in forward ``call``: nothing that was in flight is in anybody's history."""
    params = SamplingParams(frequency_penalty=30.0, repetition_penalty=1.2, extra={"no_repeat_ngram": 2})
    asked = [Request(prompt_ids=[20 * i, 20 * i + 1], max_tokens=9, sampling=params) for i in range(3)]
    wanted = [result.token_ids for result in engines(successor, max_batch=1).generate(asked)]
    engine = engines(successor, early_first_token=early_first_token)
    successor.fail_late, successor.calls = (call,), 0
    assert [result.token_ids for result in engine.generate(asked)] == wanted
    assert engine.stats()["recoveries"] == 1


def test_logprobs_are_the_models_own(engines, tiny):
    """A bias changes which token is drawn, and not how probable the model thinks that it is."""
    prompt = [3, 5, 7]
    scores = tiny(mx.array([prompt]))[0, -1]
    logprobs = (scores - mx.logsumexp(scores)).tolist()
    sampling = SamplingParams(logit_bias={11: 1000.0}, logprobs=1)
    (result,) = engines(tiny).generate([Request(prompt_ids=prompt, max_tokens=1, sampling=sampling)])
    assert result.token_ids == (11,)
    assert result.logprobs[0].logprob == pytest.approx(logprobs[11], abs=1e-4)
    assert result.logprobs[0].top[0][0] == int(np.argmax(logprobs))


# --- what nobody asks for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)])
def test_rows_that_ask_for_nothing_are_sampled_from_the_very_scores(engines, tiny, ask, monkeypatch, params):
    """No operation is added to the graph: samplers get the array that the forward returned."""
    given, taken, apply = [], [], ProcessorGroup.apply

    def applied(self, logits, errors, lines=None):
        given.append(logits)
        return apply(self, logits, errors, lines)

    for rows in (GreedyRows, CategoricalRows):
        sample = rows.sample

        def sampled(self, logits, keys, rows=None, sample=sample):
            taken.append(logits)
            return sample(self, logits, keys, rows)

        monkeypatch.setattr(rows, "sample", sampled)
    monkeypatch.setattr(ProcessorGroup, "apply", applied)
    monkeypatch.setattr(ProcessorGroup, "push", lambda *_: pytest.fail("nobody has a history"))
    engines(tiny).generate([ask(3, 5, sampling=params), ask(4, 7, sampling=params)])
    assert given
    assert all(one is other for one, other in zip(given, taken, strict=True))


class Fake:
    """A processor for rows that have its name in ``extra``: it adds nothing, records histories, and raises on demand.

    ``value`` "apply", "push", "open" or "keep" of a row: there it raises where that row takes part.
    """

    fields = frozenset()

    def __init__(self, name="fake", is_argmax_invariant=False):
        self.name, self.is_argmax_invariant = name, is_argmax_invariant
        self.extra = frozenset({name})
        self.histories, self.applied = [], 0

    @hookimpl
    def register_processors(self, register):
        register(self)

    def check(self, params, vocabulary):
        pass

    def handles(self, row):
        return self.name in row.params.extra

    def open(self, rows):
        values = [row.params.extra[self.name] for row in rows]
        fail(values, "open")
        return FakeRows(self, rows, values)


def fail(values, where):
    if where in values:
        msg = f"{where} fails"
        raise KeyError(msg)


class FakeRows:
    def __init__(self, fake, rows, values):
        self._fake, self._values = fake, values
        self._past = Histories(rows)

    def apply(self, logits, rows=None, drafted=None):
        mine = range(len(self._values)) if rows is None else rows.tolist()
        self._fake.applied += 1
        fail([self._values[row] for row in mine], "apply")
        self._fake.histories += [tuple(self._past.line(row).tolist()) for row in mine]
        return logits + 0.0

    def push(self, tokens, counts):
        fail([value for value, count in zip(self._values, counts, strict=True) if count], "push")
        self._past.push(tokens, counts)

    def keep(self, indices):
        fail(self._values, "keep")
        self._past.keep(indices)
        self._values = [self._values[i] for i in indices]


def asking(fake="fake", value=True):
    return SamplingParams(extra={fake: value})


@UNMIXED
@pytest.mark.parametrize("where", ["apply", "push", "open"])
def test_a_processor_that_raises_costs_the_guilty_row_alone(engines, successor, ask, counted, where, settings):
    """With its own error; rows with other processors, with none, and with the same one go on."""
    fake = Fake()
    engine = engines(successor, plugins=[fake], **settings)
    guilty = engine.submit(ask(0, 9, sampling=asking(value=where)))
    others = [engine.submit(ask(20, 9, sampling=asking())), engine.submit(ask(40, 9))]
    engine.step()
    others.append(engine.submit(ask(60, 9, sampling=asking())))
    with pytest.raises(KeyError, match=f"{where} fails"):
        guilty.result()
    assert [handle.result().token_ids for handle in others] == [counted(start, 9) for start in (20, 40, 60)]
    assert engine.stats()["recoveries"] == 0
    assert engine.generate([ask(20, 9, sampling=asking())])[0].token_ids == counted(20, 9)


def test_rows_whose_histories_are_lost_fail_alone(engines, successor, ask, counted):
    """A processor that cannot drop a row costs the rows that it was opened for."""
    engine = engines(successor, plugins=[Fake()])
    short, long, free = (
        engine.submit(ask(start, tokens, sampling=params))
        for start, tokens, params in ((0, 3, asking()), (20, 9, asking(value="keep")), (40, 9, SamplingParams()))
    )
    assert short.result().token_ids == counted(0, 3)
    with pytest.raises(KeyError, match="keep fails"):
        long.result()
    assert free.result().token_ids == counted(40, 9)


@UNMIXED
def test_a_row_that_may_take_nothing_fails_and_nobody_else(engines, successor, ask, counted, settings):
    """Processors leave no token: the row ends with an error, never with one that was forbidden."""
    every = {"no_repeat_ngram": 1, "banned_tokens": list(range(3, 97))}
    engine = engines(successor, **settings)
    stuck = engine.submit(ask(0, 9, sampling=SamplingParams(extra=every)))
    free = engine.submit(ask(20, 9))
    with pytest.raises(NonFiniteLogits):
        stuck.result()
    assert free.result().token_ids == counted(20, 9)


@pytest.mark.parametrize("pipeline", [True, False])
def test_placeholders_are_pushed_to_nobody(engines, successor, ask, monkeypatch, pipeline):
    """Each row's history grows by its own tokens, though a full row takes part in one step more."""
    pushed, push = Counter(), FakeRows.push

    def counted(self, tokens, counts):
        pushed.update(dict(zip(self._values, counts, strict=True)))
        push(self, tokens, counts)

    monkeypatch.setattr(FakeRows, "push", counted)
    engine = engines(successor, plugins=[Fake()], pipeline=pipeline)
    limits = {"a": 3, "b": 9, "c": 1, "d": 6}
    engine.generate([ask(20 * i, n, sampling=asking(value=mark)) for i, (mark, n) in enumerate(limits.items())])
    assert pushed == limits


def test_greedy_rows_skip_what_never_changes_the_best_token(engines, successor, ask, counted):
    """And drawn rows do not."""
    still = Fake(is_argmax_invariant=True)
    engine = engines(successor, plugins=[still])
    assert engine.generate([ask(0, 4, sampling=asking())])[0].token_ids == counted(0, 4)
    assert not still.applied
    engine.generate([ask(0, 4, sampling=SamplingParams(temperature=1.0, seed=1, extra={"fake": True}))])
    assert still.applied


def test_processors_apply_by_order_of_name(engines, successor, ask):
    """Whatever was registered first."""
    seen = []

    class Named(Fake):
        def open(self, rows):
            fake = self

            class Rows(FakeRows):
                def apply(self, logits, rows=None, drafted=None):
                    seen.append(fake.name)
                    return logits

            return Rows(fake, rows, [None] * len(rows))

    engine = engines(successor, plugins=[Named("zeta"), Named("alpha"), Named("mid")])
    params = SamplingParams(extra={"mid": 1, "zeta": 1, "alpha": 1})
    engine.generate([ask(0, 1, sampling=params)])
    assert seen == ["alpha", "mid", "zeta"]


# --- windows ------------------------------------------------------------------------------------------------------


def group_of(engines, model, params):
    """A processor group for rows with these parameters, and as many rows."""
    processors = engines(model).bound.processors
    asked = [
        Request(prompt_ids=[3, 5, 3, 7 + i], min_tokens=3, stop_token_ids=[4], sampling=p) for i, p in enumerate(params)
    ]
    rows = [admit_request(request, engines(model).bound, None, f"r{i}") for i, request in enumerate(asked)]
    group = ProcessorGroup(processors)
    group.set_rows(rows)
    return group


def scores_of(lines, seed=0):
    return mx.array(np.random.default_rng(seed).normal(size=(lines, 97)).astype(np.float32))


def test_a_window_is_the_tokens_one_by_one_for_rows_of_every_kind(engines, tiny):
    """Lines of rows with none, one and several processors, in any order; what is pushed and rolled back leaves no trace."""
    params = [SamplingParams(**fields) for fields in PENALISED]
    window, step = (group_of(engines, tiny, params) for _ in range(2))
    draw, width = np.random.default_rng(1), 4
    tokens = mx.array(draw.integers(0, 9, (len(params), width), dtype=np.uint32))
    ids = mx.concatenate([mx.zeros((len(params), 1), dtype=mx.uint32), tokens], axis=1)
    lines = Lines(ids, [width + 1] * len(params))
    logits, errors = scores_of(len(lines.places)), [None] * len(params)
    for _ in range(2):
        rewritten = np.array(window.apply(logits, blamed := [None] * len(lines.places), lines))
        assert not any(blamed)
        window.push(tokens, [2] * len(params), errors)
        window.rollback([2] * len(params))
    for taken in range(width + 1):
        places = [lines.places.index((row, taken)) for row in range(len(params))]
        wanted = np.array(step.apply(logits[mx.array(places)], errors))
        assert (rewritten[places] == wanted).all(), taken
        if taken < width:
            step.push(tokens[:, taken : taken + 1], [1] * len(params), errors)
    assert errors == [None] * len(params)


def test_a_processor_that_raises_in_a_window_costs_the_guilty_row_alone(engines, tiny):
    """All lines of the others are rewritten, and the one error is the row's."""
    fake = Fake()
    values = [asking(value="apply"), asking(), SamplingParams()]
    rows = [
        admit_request(Request(prompt_ids=[3, 5], sampling=params), engines(tiny, plugins=[fake]).bound, None, "r")
        for params in values
    ]
    group, errors = ProcessorGroup([fake]), [None] * 6
    group.set_rows(rows)
    logits = scores_of(6)
    scores = group.apply(logits, errors, Lines(mx.zeros((3, 2), dtype=mx.uint32), [2] * 3))
    assert isinstance(errors[0], KeyError)
    assert errors == [errors[0]] * 2 + [None] * 4
    assert scores.tolist() == logits.tolist()
