"""Kind M, in the engine: parameters, seeds and samplers belong to a row, whoever decodes beside it."""

import subprocess
import sys

import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl, sampling
from oarlock.core.sampling import SamplerGroup
from oarlock.samplers.categorical import Categorical, CategoricalRows
from oarlock.samplers.greedy import Greedy, GreedyRows

HOT = SamplingParams(temperature=1.0)


def draws(bench, model, seeds, n=12):
    """Tokens of one prompt at temperature 1, for each of these seeds, in one batch."""
    requests = [bench.ask(3, 5, n=n, sampling=SamplingParams(temperature=1.0, seed=seed)) for seed in seeds]
    return bench.run(bench.engine(model), requests)


def check_seeds(bench):
    """Seeds decide everything, on every thread; without one, rows, threads and engines differ."""
    model = bench.tiny()
    ones = [bench.Worker(draws, bench, model, [1]).result()[0] for _ in range(2)] + draws(bench, model, [1, 2, 1])
    mx.random.seed(7)
    assert len({ones[0], ones[1], ones[2], ones[4]}) == 1
    assert ones[3] != ones[0]
    fresh = [bench.Worker(draws, bench, model, [None, None]).result() for _ in range(3)]
    assert len({row for rows in fresh for row in rows}) == 6


@pytest.mark.fault("M-01")
def test_seeds_mean_the_same_on_every_thread_and_none_means_another(bench):
    check_seeds(bench)


@pytest.mark.fault("M-01", twin=True)
def test_twin_draws_by_the_threads_own_state_are_noticed(bench, planted, monkeypatch):
    def sample(self, logits, keys, rows=None):
        return mx.random.categorical(logits.astype(mx.float32)).astype(mx.uint32)

    monkeypatch.setattr(CategoricalRows, "sample", sample)
    with planted():
        check_seeds(bench)


def check_equal_prompts_differ(bench):
    rows = draws(bench, bench.tiny(), [None] * 10)
    assert len(set(rows)) == 10
    assert len(set(bench.run(bench.engine(bench.tiny()), [bench.ask(3, 5, n=6)] * 10))) == 1


@pytest.mark.fault("M-14")
def test_equal_prompts_without_a_seed_get_answers_of_their_own(bench):
    check_equal_prompts_differ(bench)


FRESH = """
import mlx.core as mx
from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.testing.models import build
mx.set_default_device(mx.cpu)
request = Request(prompt_ids=[3, 5], max_tokens=12, sampling=SamplingParams(temperature=1.0))
print(Engine(build("tiny-full")).generate([request])[0].token_ids)
"""


@pytest.mark.fault("M-14")
def test_a_fresh_process_draws_differently(bench):
    run = subprocess.run([sys.executable, "-c", FRESH], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() != str(draws(bench, bench.tiny(), [None])[0])


@pytest.mark.fault("M-14", twin=True)
def test_twin_one_seed_for_all_is_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr("oarlock.core.intake.secrets.randbits", lambda _: 0)
    with planted():
        check_equal_prompts_differ(bench)


def check_rows_keep_their_parameters(bench):
    """Rows whose outcome is forced equal greedy ones, a seeded row equals itself alone; they join one by one."""
    forced = [
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=1, seed=1),
        SamplingParams(temperature=1.0, min_p=1.0, seed=2),
        SamplingParams(temperature=1.0, top_p=1e-6, seed=3),
    ]
    seeded = SamplingParams(temperature=1.0, seed=5)
    prompt = (3, 5, 7)
    requests = [Request(prompt_ids=prompt, max_tokens=14, sampling=params) for params in [seeded, *forced, seeded]]
    engine = bench.engine(bench.tiny())
    handles = []
    for request in requests:
        handles.append(engine.submit(request))
        engine.step()
        engine.step()
    rows = [handle.result().token_ids for handle in handles]
    greedy, alone = bench.alone(bench.tiny(), [bench.ask(*prompt, n=14), requests[0]])
    assert rows[1:5] == [greedy] * 4
    assert rows[0] == rows[5] == alone != greedy


@pytest.mark.fault("M-02")
def test_each_row_is_drawn_with_its_own_parameters(bench):
    check_rows_keep_their_parameters(bench)


@pytest.mark.fault("M-02", twin=True)
def test_twin_the_first_rows_parameters_for_all_are_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(Categorical, "open", lambda self, params: CategoricalRows([params[0]] * len(params)))
    with planted():
        check_rows_keep_their_parameters(bench)


class LastRows(GreedyRows):
    """Always the last token of the vocabulary."""

    def sample(self, logits, keys, rows=None):
        return mx.full((logits.shape[0],), logits.shape[-1] - 1, dtype=mx.uint32)


class Last:
    """A third party's sampler: it takes rows at temperature 0.125 and nobody else's."""

    name, is_argmax_invariant = "last", False

    @hookimpl
    def register_samplers(self, register):
        register(self)

    def handles(self, params):
        return params.temperature == 0.125

    def open(self, params):
        return LastRows()


def check_a_row_keeps_its_sampler(bench):
    """The general sampler would take all of them, and would not give the row what it gets alone."""
    engine = bench.engine(bench.Scripted({1: [10, 11], 2: [20, 21]}), plugins=[Last()])
    special = bench.ask(1, n=4, sampling=SamplingParams(temperature=0.125))
    neighbours = [bench.ask(2, n=4), bench.ask(2, n=4, sampling=SamplingParams(temperature=0.2, seed=1))]
    assert bench.run(engine, [special]) == [(63,) * 4]
    for company in ([neighbours[0]], [neighbours[1]], neighbours):
        assert bench.run(engine, [special, *company]) == [(63,) * 4] + [(20, 21, 20, 21)] * len(company)


@pytest.mark.fault("M-02")
def test_company_does_not_change_which_sampler_a_row_gets(bench):
    check_a_row_keeps_its_sampler(bench)


@pytest.mark.fault("M-02", twin=True)
def test_twin_a_sampler_for_all_that_is_not_each_rows_own_is_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(SamplerGroup, "_serves", lambda self, sampler, params: sampler.handles(params))
    with planted():
        check_a_row_keeps_its_sampler(bench)


def test_greedy_rows_beside_drawn_ones_share_one_call(bench, monkeypatch):
    """Where no sampler changes a greedy row's token, one may serve all: no row is sampled on its own."""
    monkeypatch.setattr(SamplerGroup, "_row_by_row", lambda *_: pytest.fail("row by row"))
    engine = bench.engine(bench.Scripted({1: [10, 11], 2: [20, 21]}))
    rows = bench.run(engine, [bench.ask(1, n=4), bench.ask(2, n=4, sampling=SamplingParams(temperature=0.1, seed=1))])
    assert rows == [(10, 11, 10, 11), (20, 21, 20, 21)]


def check_greedy_honours_logprobs(bench):
    """At temperature 0 as at any other: the chosen token's and the best ones', beside rows that want none."""
    engine = bench.engine(bench.tiny())
    cold, hot = (SamplingParams(temperature=t, top_k=1, seed=1, logprobs=3) for t in (0.0, 0.7))
    results = engine.generate([bench.ask(3, 5, n=5, sampling=params) for params in (cold, hot, SamplingParams())])
    assert results[0].logprobs == results[1].logprobs
    assert [record.token for record in results[0].logprobs] == list(results[0].token_ids)
    assert all(record.top[0] == (record.token, record.logprob) for record in results[0].logprobs)
    assert results[2].logprobs is None


@pytest.mark.fault("M-12")
def test_temperature_0_skips_nothing(bench):
    check_greedy_honours_logprobs(bench)


@pytest.mark.fault("M-12", twin=True)
def test_twin_a_greedy_shortcut_is_noticed(bench, planted, monkeypatch):
    plain = SamplerGroup._add_logprobs

    def skip(self, draw, logits):
        if not all(row.request.sampling.greedy for row in self._rows):
            plain(self, draw, logits)
        draw.wants = [
            None if row.request.sampling.greedy else want for row, want in zip(self._rows, draw.wants, strict=True)
        ]

    monkeypatch.setattr(SamplerGroup, "_add_logprobs", skip)
    with planted(TypeError):
        check_greedy_honours_logprobs(bench)


def test_the_order_of_registration_is_no_choice(bench):
    """The specialised sampler goes first, so greedy rows alone are never drawn."""
    order = sampling.specialised_first([Categorical(), Greedy()])
    assert [each.name for each in order] == ["greedy", "categorical"]
