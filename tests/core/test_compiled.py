"""Decode steps that are traced once and replayed: tokens, traces, who is compiled, failures, refusals. Numbers are SPEC's."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
import structlog

from oarlock.core import Request, SamplingParams
from oarlock.core.compiled import MAX_ROWS, STABLE, CompiledStep, reading
from oarlock.core.contracts.composition import TraceableCache
from oarlock.core.contracts.layout import Positions
from oarlock.core.engine import Engine
from oarlock.core.errors import CompiledRefused
from oarlock.core.sampling import PendingDraw
from oarlock.core.testing import memory, models
from oarlock.layouts.traced import TracedColumns

TOKENS = 48
LONG = 600


@pytest.fixture
def compiled(engines):
    """Open an engine whose decode steps are compiled."""
    return lambda model, **scheduler: engines(model, compiled=True, **scheduler)


@pytest.fixture
def failing():
    """Build a tiny model that calls ``called(cache)`` before each forward, once `bind` is through."""

    def make(called):
        model = models.build("tiny-full")
        kind = type(model)

        class Failing(kind):
            def __call__(self, ids, cache=None):
                if model.armed:
                    called(cache)
                return kind.__call__(self, ids, cache=cache)

        model.__class__ = Failing
        model.armed = False
        return model

    return make


def request(prompt, tokens=TOKENS, **fields):
    return Request(prompt_ids=prompt, max_tokens=tokens, **fields)


def same(handles, alone):
    """Compare rows with those that ran alone, as far as they were asked for."""
    said = [handle.result().token_ids for handle in handles]
    told = [row.tokens[: handle._row.max_tokens] for handle, row in zip(handles, alone, strict=True)]
    models.compare(said, told, [row.gaps for row in alone])


def counts(engine):
    stats = engine.stats()
    return stats["compiled_steps"], stats["compiled_traces"]


# --- tokens and traces -----------------------------------------------------------------------------------------------


def test_a_lone_row_is_replayed_from_its_first_step(compiled, engines, tiny, prompts):
    """10.1: 600 tokens are the ordinary step's and mlx-lm's, over three capacities of the cache: three traces."""
    serial = models.serial(tiny, prompts[0], LONG)
    engine = compiled(tiny)
    handle = engine.submit(request(prompts[0], LONG))
    same([handle], [serial])
    assert counts(engine) == (LONG - 1, 3)
    ordinary = engines(tiny)
    other = ordinary.submit(request(prompts[0], LONG))
    models.compare([handle.result().token_ids], [other.result().token_ids], [serial.gaps])
    assert counts(ordinary) == (0, 0)
    assert not engine.stats()["recoveries"]


def test_the_next_row_needs_no_trace(compiled, tiny, prompts, alone):
    """Its caches have shapes that were there before."""
    engine = compiled(tiny)
    same([engine.submit(request(prompts[0]))], alone[:1])
    same([engine.submit(request(prompts[1]))], alone[1:2])
    assert counts(engine) == (2 * (TOKENS - 1), 1)


def test_packed_rows_are_replayed_too(prompts):
    """A layout gets it by how its columns lie, whatever stands in them."""
    model = models.build("tiny-full", hidden_size=128)
    layouts = {"full": {"name": "quantized", "bits": 8, "group_size": 32}}
    said = []
    for on in (True, False):
        with Engine(model, config={"scheduler": {"compiled": on}, "layouts": layouts}) as engine:
            said.append(engine.submit(request(prompts[1])).result().token_ids)
            assert (counts(engine)[0] > 0) == on
    assert said[0] == said[1]


def test_a_small_batch_is_compiled_once_it_stays(compiled, tiny, prompts, alone):
    """Three rows of different length, after so many ordinary steps; when one is over, the two wait again."""
    engine = compiled(tiny)
    handles = [engine.submit(request(prompt, n)) for prompt, n in zip(prompts, (40, TOKENS, TOKENS), strict=False)]
    while engine.stats()["active_rows"] < 3:
        engine.step()
    before = counts(engine)[0]
    for _ in range(STABLE):
        engine.step()
    assert counts(engine)[0] == before
    engine.step()
    assert counts(engine) == (before + 1, 1 + (before > 0))
    same(handles, alone[:3])
    assert counts(engine)[0] < before + 40


def test_a_row_may_forbid_it(compiled, tiny, prompts, alone):
    """1.1.16: alone, and for whoever runs beside it, as long as it is there."""
    engine = compiled(tiny)
    same([engine.submit(request(prompts[0], compiled=False))], alone[:1])
    same([engine.submit(request(prompt, compiled=i > 0)) for i, prompt in enumerate(prompts[:3])], alone[:3])
    assert counts(engine) == (0, 0)
    same([engine.submit(request(prompts[0]))], alone[:1])
    assert counts(engine) == (TOKENS - 1, 1)


def test_a_large_batch_is_not_compiled(compiled, tiny, prompts, alone):
    """Each number of rows would be a trace more, and the host is the less of it the more rows there are."""
    assert len(prompts) > MAX_ROWS
    engine = compiled(tiny)
    same([engine.submit(request(prompt)) for prompt in prompts], alone)
    assert counts(engine) == (0, 0)


def test_sampled_rows_draw_what_they_draw(compiled, engines, tiny, prompts):
    """Samplers see logits of the same rows in the same order."""
    sampling = [SamplingParams(temperature=t, top_p=0.9, seed=i) for i, t in enumerate((0.4, 0.8))]
    said = []
    for make in (compiled, engines):
        engine = make(tiny)
        pairs = zip(prompts, sampling, strict=False)
        handles = [engine.submit(request(prompt, sampling=params)) for prompt, params in pairs]
        said.append([handle.result().token_ids for handle in handles])
        assert (counts(engine)[0] > 20) == (make is compiled)
    assert said[0] == said[1]


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1024, 1025, 3000, 100_000])
def test_a_trace_reads_little_more_than_there_is(tokens):
    """At most a quarter more, once it is more than the least."""
    assert tokens <= reading(tokens) <= max(256 + tokens, tokens + tokens // 4)
    assert reading(tokens) % 256 == 0


def test_traces_are_few_however_long_a_row_gets():
    """Eight for each doubling, at most."""
    assert len({reading(tokens) for tokens in range(1, 100_000)}) < 60


# --- who is compiled ------------------------------------------------------------------------------------------------


def test_a_join_clears_the_mark_and_a_leave_does_not_set_it_again(compiled, tiny, prompts, alone):
    """10.1, 7.4: the row that is left of two goes on in ordinary steps, and so does the one that joins it later."""
    engine = compiled(tiny)
    first = engine.submit(request(prompts[0]))
    for _ in range(10):
        engine.step()
    before = counts(engine)[0]
    assert before
    second = engine.submit(request(prompts[1], 5))
    same([second], alone[1:2])
    now = counts(engine)[0]
    third = engine.submit(request(prompts[3], 5))
    same([first, third], [alone[0], alone[3]])
    assert counts(engine)[0] == now <= before + 4


def test_a_row_that_comes_when_all_are_gone_is_marked(compiled, tiny, prompts, alone):
    """The mark is the row's, not the engine's."""
    engine = compiled(tiny)
    same([engine.submit(request(prompt)) for prompt in prompts], alone)
    same([engine.submit(request(prompts[0]))], alone[:1])
    assert counts(engine)[0] == TOKENS - 1


def test_joins_and_leaves_between_replayed_steps(compiled, tiny, prompts, alone):
    """Rows come and go all the time, and each says what it says alone."""
    engine, handles = compiled(tiny), []
    for place, prompt in enumerate(prompts):
        handles.append(engine.submit(request(prompt, 20 + 7 * place)))
        for _ in range(19):
            engine.step()
    same(handles, alone)
    assert counts(engine)[0] > 20


# --- failures -------------------------------------------------------------------------------------------------------


def traced(cache):
    return isinstance(cache[0], TracedColumns)


def test_a_failing_trace_is_repeated_by_the_ordinary_step(compiled, failing, prompts, alone):
    """The cause is logged once with the row's name, it counts as a recovery, and the row is never compiled again."""
    failures = []

    def called(cache):
        if traced(cache) and not failures:
            failures.append(cache)
            raise RuntimeError("no trace")

    model = failing(called)
    engine = compiled(model)
    model.armed = True
    with structlog.testing.capture_logs() as logs:
        same([engine.submit(request(prompts[0], id="hurt"))], alone[:1])
    (warning,) = [entry for entry in logs if entry["event"] == "compiled_failed"]
    assert warning["requests"] == ["hurt"]
    assert "no trace" in warning["error"]
    assert engine.stats()["recoveries"] == 1
    assert counts(engine) == (0, 0)
    same([engine.submit(request(prompts[1]))], alone[1:2])
    assert counts(engine) == (TOKENS - 1, 1)


def test_a_trace_that_fails_on_the_last_layer_has_changed_nothing(tiny, prompts):
    """Half of the layers have written then: to what stands for the caches, and not to those."""
    with Engine(tiny, config={"scheduler": {"compiled": True}}) as engine:
        caches = engine.bound.open_caches(slots=1, window=1)
    for cache in caches:
        cache.add(1)
        cache.begin([4], Positions([0]))
    tiny(mx.array([prompts[0][:4]]), cache=caches)
    for cache in caches:
        cache.commit([4])
        cache.begin([1], Positions([4]))
    before = [[*cache.planes.values()] for cache in caches]

    def model(ids, cache):
        tiny(ids, cache=cache)
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        CompiledStep(model)(caches, mx.array([[5]], dtype=mx.uint32), Positions([4]))
    after = [[*cache.planes.values()] for cache in caches]
    assert all(
        one is other
        for mine, theirs in zip(before, after, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )
    tiny(mx.array([[5]]), cache=caches)
    assert caches[0].offset == 5


def test_a_row_that_raises_in_every_step_fails_with_its_own_error(compiled, failing, prompts):
    """The ordinary step says so."""

    def called(cache):
        if traced(cache) or 20 in cache[0].tokens:
            raise RuntimeError("this row")

    model = failing(called)
    engine = compiled(model)
    model.armed = True
    handle = engine.submit(request(prompts[0]))
    with pytest.raises(RuntimeError, match="this row"):
        handle.result()
    assert len(handle._row.token_ids) > 5


def test_an_error_of_the_device_clears_the_mark(compiled, tiny, prompts, alone, monkeypatch):
    """The row is built again in ordinary steps: the error may have been the compiled step's."""
    engine, reads, read = compiled(tiny), [], PendingDraw.read

    def failing(draw):
        reads.append(draw)
        if len(reads) == 9:
            raise RuntimeError("the device failed")
        return read(draw)

    monkeypatch.setattr(PendingDraw, "read", failing)
    same([engine.submit(request(prompts[0]))], alone[:1])
    assert 5 < counts(engine)[0] < 12


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
def test_no_step_copies_a_cache(tiny, rows):
    """MLX writes where the planes lie, since nobody else holds them: the scores are the most that a step needs."""
    with Engine(tiny, config={"scheduler": {"compiled": True}}) as engine:
        caches = engine.bound.open_caches(slots=rows, window=1)
    tokens, step, ids = 4000, CompiledStep(tiny), mx.zeros((rows, 1), dtype=mx.uint32)
    for cache in caches:
        cache.add(rows)
        cache.begin([tokens] * rows, Positions([0] * rows))
        cache.update_and_fetch(*[mx.ones((rows, 2, tokens, 16))] * 2)
        cache.commit([tokens] * rows)
        assert isinstance(cache, TraceableCache)
    mx.eval([array for cache in caches for array in cache.arrays()])

    def advance():
        starts = Positions(caches[0].tokens)
        for cache in caches:
            cache.begin([1] * rows, starts)
        logits = step(caches, ids, starts)
        for cache in caches:
            cache.commit([1] * rows)
        mx.eval(logits)

    advance()
    plane = caches[0].planes["keys"].nbytes
    assert memory.peak_bytes(advance) < plane
    held = [array for cache in caches for array in cache.arrays()]
    assert memory.peak_bytes(advance) > 2 * plane  # somebody holds them now: this is what a copy looks like
    assert held
    assert step.traces == 1


def test_a_closed_engine_leaves_no_trace(prompts):
    """Traces hold the weights: they go with the engine."""
    before = memory.active_bytes()
    model = models.build("tiny-full")
    with Engine(model, config={"scheduler": {"compiled": True}}) as engine:
        engine.submit(request(prompts[0])).result()
        assert counts(engine)[0]
    del model, engine
    gc.collect()
    assert memory.active_bytes() - before < memory.SMALL


# --- who is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [("mamba2", "0"), ("tiny-ring", "0")])
def test_a_layer_that_cannot_be_replayed_is_named(name, layer):
    """10.1: refused when the model is bound, with the layer and why; "auto" and false bind."""
    model = models.build(name)
    with pytest.raises(CompiledRefused, match=r"whose steps cannot be replayed.*false") as refused:
        Engine(model, config={"scheduler": {"compiled": True}})
    assert refused.value.layer == layer
    for other in ("auto", False):
        with Engine(model, config={"scheduler": {"compiled": other}}) as engine:
            (line,) = [line for line in engine.bound.explain() if line["part"] == "compiled"]
            assert line["choice"] == "no step is compiled"
            assert "scheduler.compiled" in line["reason"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids, cache: ids + int(mx.max(ids).item()) * 0, "raises"),
        (lambda ids, cache: ids + traced(cache), "a compiled step differ"),
    ],
)
def test_what_only_a_trial_shows(change, reason):
    """A model that wants numbers while it is traced, or says something else then, is refused."""
    model = models.build("tiny-full")
    kind = type(model)

    class Changed(kind):
        def __call__(self, ids, cache=None):
            return kind.__call__(self, change(ids, cache), cache=cache)

    model.__class__ = Changed
    with pytest.raises(CompiledRefused, match=reason):
        Engine(model, config={"scheduler": {"compiled": True}})


def test_without_the_probe_it_is_taken_at_its_word(tiny):
    """And "auto" compiles nothing: docs/decisions says why."""
    for settings, on, reason in (
        ({"compiled": True}, True, "bind probe"),
        ({"compiled": True, "verify": False}, True, "not probed"),
        ({}, False, "true must ask"),
        ({"compiled": False}, False, "config scheduler.compiled"),
    ):
        with Engine(tiny, config={"scheduler": settings}) as engine:
            assert engine.bound.compiling.on == on
            assert reason in engine.bound.compiling.reason
