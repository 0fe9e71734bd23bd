"""Decode steps that take a preparation's chunk along: order, budget, failures, and who is refused. Numbers are SPEC's."""

from __future__ import annotations

import mlx.core as mx
import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import MixedRefused
from oarlock.core.mixed import MixedCache, Side, Work, forward
from oarlock.core.testing import models
from oarlock.methods.plain import PlainDecoding, PlainOptions

TOKENS = 24


@pytest.fixture
def watched():
    """Build a tiny model that calls ``called(ids, cache)`` before each forward."""

    def make(called, name="tiny-full"):
        model = models.build(name)
        kind = type(model)

        class Watched(kind):
            def __call__(self, ids, cache=None):
                called(ids, cache)
                return kind.__call__(self, ids, cache=cache)

        model.__class__ = Watched
        return model

    return make


def request(prompt, tokens=TOKENS, **fields):
    return Request(prompt_ids=prompt, max_tokens=tokens, **fields)


def begun(engine, prompt, tokens=TOKENS, **fields):
    """A row that decodes."""
    handle = engine.submit(request(prompt, tokens, **fields))
    for _ in range(3):
        engine.step()
    return handle


def same(handles, alone):
    """Compare rows with the first of those that ran alone, as far as they were asked for."""
    alone = alone[: len(handles)]
    said = [handle.result().token_ids for handle in handles]
    told = [row.tokens[: handle._row.max_tokens] for handle, row in zip(handles, alone, strict=True)]
    models.compare(said, told, [row.gaps for row in alone])


# --- what a step does ----------------------------------------------------------------------------------------------


def test_a_step_takes_the_chunk_along(engines, tiny, told, prompts, alone):
    """8.8: the record of the step and a counter show it."""
    engine = engines(tiny, plugins=[told], prefill_chunk=8)
    handles = [begun(engine, prompts[0]), engine.submit(request(prompts[1]))]
    engine.step()
    step = told.records[-1]
    assert (step.phase, step.decode_rows, step.prefill_tokens, step.mixed_tokens) == ("prefill+decode", 1, 8, 9)
    same(handles, alone)
    assert engine.stats()["mixed_forwards"] == 5  # 8, 8, 8, 5 tokens and the last one
    assert not told.records[-1].mixed_tokens
    assert not engine.stats()["recoveries"]


@pytest.mark.parametrize(("mixed", "shapes"), [(True, [(9, 1)]), (False, [(1, 8), (1, 1)])])
def test_an_iteration_is_one_forward_of_the_model(engines, watched, prompts, mixed, shapes):
    """Without it there are two."""
    seen = []
    engine = engines(watched(lambda ids, cache: seen.append(ids.shape)), mixed=mixed, prefill_chunk=8)
    begun(engine, prompts[0])
    engine.submit(request(prompts[1]))
    seen.clear()
    engine.step()
    assert seen == shapes


def test_decode_is_through_before_the_preparation_goes_on(engines, tiny, told, prompts, alone):
    """8.9, A10: budget 9, two joiners; a row that ends in the step that ends their prompts is gone before they speak."""
    heard, engine = [], engines(tiny, plugins=[told], mixed_token_budget=9, prefill_chunk=64)

    def listener(name):
        return lambda event: heard.append((name, event.index, [row.id for row in engine._driver.group.rows]))

    long = engine.submit(request(prompts[3], id="long", on_token=listener("long")))
    short = engine.submit(request(prompts[0], 7, id="short", on_token=listener("short")))
    for _ in range(2):
        engine.step()
    joiners = [engine.submit(request(prompts[4], id=name, on_token=listener(name))) for name in ("c", "d")]
    same([long, short, *joiners], [alone[3], alone[0], alone[4], alone[4]])
    mixed = [step for step in told.records if step.mixed_tokens]
    assert max(step.mixed_tokens for step in mixed) <= 9
    assert len(mixed) > 4
    assert any(step.left and step.joined for step in mixed)
    spoken = [(name, index) for name, index, _ in heard]
    first = spoken.index(("c", 0))
    assert spoken.index(("short", 6)) < first
    assert heard[first][2] == ["long"]


def test_a_small_budget_still_moves_every_row(engines, tiny, told, prompts, alone):
    """3.1.8: as many tokens as there are rows, on either side, whatever the budget."""
    engine = engines(tiny, plugins=[told], mixed_token_budget=1)
    handles = [begun(engine, prompts[0]), *(engine.submit(request(prompts[i])) for i in (3, 4))]
    same(handles, [alone[0], alone[3], alone[4]])
    assert {step.mixed_tokens for step in told.records} >= {0, 3}


def test_a_cancelled_preparation_needs_no_forward(engines, tiny, told, prompts, alone):
    """8.10: decode goes alone."""
    engine = engines(tiny, plugins=[told], prefill_chunk=4)
    running, joiner = begun(engine, prompts[0]), engine.submit(request(prompts[1]))
    engine.step()
    joiner.cancel()
    engine.step()
    assert (told.records[-1].phase, told.records[-1].mixed_tokens) == ("decode", 0)
    same([running], alone)
    assert joiner.result().finish_reason == "cancelled"


def test_a_joiner_cancelled_by_a_running_rows_consumer_ends_quietly(engines, tiny, prompts, alone):
    """It is in the forward already: its place is kept until the preparation goes on."""
    engine, joiners = engines(tiny, prefill_chunk=4), []

    def cancel(event):
        if event.index == 8 and joiners:
            joiners[0].cancel()

    running = begun(engine, prompts[0], on_token=cancel)
    joiners += [engine.submit(request(prompts[i])) for i in (2, 1)]
    same([running, joiners[1]], [alone[0], alone[1]])
    assert joiners[0].result().finish_reason == "cancelled"


def test_decode_without_a_forward_lets_the_preparation_go_alone(engines, tiny, told, prompts, alone):
    """8.10: the running row's last token is only read."""
    engine = engines(tiny, plugins=[told], prefill_chunk=4)
    running = engine.submit(request(prompts[0], 4))
    while running._row.live:
        engine.step()
    joiner = engine.submit(request(prompts[1]))
    engine.step()
    assert (told.records[-1].prefill_tokens, told.records[-1].mixed_tokens) == (4, 0)
    same([running, joiner], alone)


# --- methods -------------------------------------------------------------------------------------------------------


class Other:
    """Plain decoding that says it carries nothing, or says so and carries nothing all the same."""

    options = PlainOptions

    def __init__(self, name, carries):
        self.name, self.carries, self.given = name, carries, []

    @hookimpl
    def register_methods(self, register):
        register(self)

    def open(self, host, options):
        carries, given = self.carries, self.given

        class Method(PlainDecoding):
            running_tokens = property(lambda self: len(host.rows) if carries else None)

            def advance(self, work=None):
                given.append(work)
                super().advance()

        return Method(host)


@pytest.mark.parametrize("carries", [True, False])
def test_a_method_that_carries_nothing_is_given_nothing_or_leaves_it(tiny, prompts, alone, carries):
    """8.8: what the method says of itself decides; what it leaves goes alone."""
    other = Other("other", carries)
    with Engine(
        tiny, config={"method": {"name": "other"}, "scheduler": {"prefill_chunk": 8}}, plugins=[other]
    ) as engine:
        same([begun(engine, prompts[0]), engine.submit(request(prompts[1]))], alone)
        assert any(isinstance(work, Work) for work in other.given) == carries
        assert not engine.stats()["mixed_forwards"]


# --- failures ------------------------------------------------------------------------------------------------------


def sides_of(cache):
    return [side.caches[0] for side in cache[0].sides] if isinstance(cache[0], MixedCache) else cache[:1]


def test_a_mixed_forward_that_raises_once_costs_nobody_anything(engines, watched, prompts, alone):
    """8.11, DESIGN 7.6: both sides unwind, and each goes on alone in the same step."""
    raised = []

    def fail(ids, cache):
        if cache is not None and isinstance(cache[0], MixedCache) and not raised:
            raised.append(ids.shape)
            raise OSError("once")

    engine = engines(watched(fail), mixed=True, verify=False, prefill_chunk=8)
    same([begun(engine, prompts[0]), *(engine.submit(request(prompts[i])) for i in (1, 2))], alone)
    assert raised
    assert engine.stats()["recoveries"] == 1
    assert engine.stats()["mixed_forwards"]


@pytest.mark.parametrize("number", range(1, 6))
def test_a_mixed_forward_that_fails_on_the_device_costs_nobody(
    engines, watched, prompts, alone, failing_device, number
):
    """DESIGN 7.4: what is read next raises, once, whichever side it belongs to; both are built again."""
    mixed, pending = [], []

    def called(ids, cache):
        if cache is not None and isinstance(cache[0], MixedCache):
            mixed.append(ids.shape)
            pending.extend([True] if len(mixed) == number else [])

    engine = engines(watched(called), mixed=True, verify=False, prefill_chunk=8)
    failing_device(lambda *_: bool(pending) and pending.pop())
    handles = [begun(engine, prompts[0]), engine.submit(request(prompts[1]))]
    same(handles, alone)
    assert len(mixed) >= number
    assert engine.stats()["recoveries"] == 1


@pytest.fixture
def failing(engines, watched):
    """An engine whose forwards raise where a row holds ``limit`` tokens; ``met`` says which of them were mixed."""
    met = []

    def make(limit):
        def fail(ids, cache):
            if cache is not None and max(n for side in sides_of(cache) for n in getattr(side, "tokens", (0,))) >= limit:
                met.append(isinstance(cache[0], MixedCache))
                raise OSError("too long")

        return engines(watched(fail), mixed=True, verify=False, prefill_chunk=4), met

    return make


def test_a_decoding_row_that_always_fails_fails_alone(failing, prompts, alone):
    """8.11: who decodes beside it, and who is prefilled meanwhile, gets his own tokens."""
    engine, met = failing(36)
    running = [engine.submit(request(prompts[i], 20)) for i in (0, 1, 3)]
    while running[1]._row.generated < 3:
        engine.step()
    joiners = [engine.submit(request(prompts[4], 12)) for _ in range(2)]
    with pytest.raises(OSError, match="too long"):
        running.pop(1).result()
    same([*running, *joiners], [alone[0], alone[3], alone[4], alone[4]])
    assert met[0]
    assert engine.stats()["recoveries"] == 2  # the mixed forward, and the step alone


def test_a_prompt_that_always_fails_fails_alone(failing, prompts, alone):
    """8.11: who is prefilled beside it, and who decodes meanwhile, gets his own tokens."""
    engine, met = failing(28)
    running = begun(engine, prompts[3])
    bad, beside = engine.submit(request(prompts[2])), engine.submit(request(prompts[4], 8))
    with pytest.raises(OSError, match="too long"):
        bad.result()
    same([running, beside], [alone[3], alone[4]])
    assert met[0]
    assert engine.stats()["mixed_forwards"]


def test_a_forward_that_raises_half_way_leaves_both_sides_as_they_were(engines, tiny, prompts):
    """No cache of either side has moved, and the next forward of each gives what it would have given."""
    bound = engines(tiny).bound

    def filled(prompt):
        caches = bound.open_caches(slots=1, window=1)
        for cache in caches:
            cache.add(1)
        side = Side(caches, mx.array([prompt], dtype=mx.uint32), [len(prompt)])
        (logits,) = forward(bound, [side])
        for cache in caches:
            cache.commit(side.widths)
        return caches, logits

    (one, first), (other, _) = filled(prompts[0]), filled(prompts[1])
    assert mx.allclose(first[0, -1], tiny(mx.array([prompts[0]]))[0, -1], atol=1e-4)
    sides = [Side(one, mx.array([[1]], dtype=mx.uint32), [1]), Side(other, mx.array([[2, 3]], dtype=mx.uint32), [2])]
    expected = forward(bound, sides)
    for side in sides:
        for cache in side.caches:
            cache.commit([0])
    layer, kept = tiny.model.layers[1].self_attn, tiny.model.layers[1].self_attn.o_proj
    layer.o_proj = None
    with pytest.raises(TypeError):
        forward(bound, sides)
    layer.o_proj = kept
    assert {cache.tokens for cache in one} == {(9,)}
    assert {cache.tokens for cache in other} == {(30,)}
    for got, wanted in zip(forward(bound, sides), expected, strict=True):
        assert mx.array_equal(got, wanted)


# --- bind ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("deepseek_v32", "0", "composite"),
        ("mamba2", "0", "recurrent"),
        ("lfm2", "3", "recurrent"),
        ("stablelm", "0", "full"),
        ("gpt_bigcode", None, "gpt_bigcode.py"),
    ],
)
def test_what_cannot_be_mixed_is_refused_where_it_is_asked_for(name, layer, reason):
    """8.8: multi-head latent, recurrent, attention of its own, one position for all; and "auto" says why it is not."""
    model = models.build(name, guard=False)
    with pytest.raises(MixedRefused, match=reason) as caught:
        Engine(model, config={"scheduler": {"mixed": True}})
    assert caught.value.layer == layer
    with Engine(model) as engine:
        line = next(line for line in engine.bound.explain() if line["part"] == "mixed")
    assert line["choice"] == "decode and prefill go apart"
    assert line["reason"] == caught.value.reason


def layered(change):
    """A tiny model whose layers call ``change(x, mask, cache)`` for what they go on with."""
    model = models.build("tiny-full")
    kind = type(model.model.layers[0])

    class Changed(kind):
        def __call__(self, x, mask=None, cache=None):
            return kind.__call__(self, *change(x, mask, cache))

    for layer in model.model.layers:
        layer.__class__ = Changed
    return model


def asks_for_more(x, mask, cache):
    return (x, mask, cache, cache.keys)[:3]


def makes_its_own_mask(x, mask, cache):
    known = mask is None or isinstance(mask, str | mx.array)
    return x, mask if known else None, cache


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (asks_for_more, "raises AttributeError"),
        (makes_its_own_mask, "mask of type NoneType"),
        (lambda x, mask, cache: (x + 0.1 * isinstance(cache, MixedCache), mask, cache), "a row in a mixed forward"),
    ],
)
def test_what_only_a_trial_shows(change, reason):
    """A model that wants more of a cache, makes masks of its own, or gives other scores, is not mixed, and it is said."""
    with Engine(layered(change)) as engine:
        assert engine.bound.verdict.ragged
        assert not engine.bound.mixing.on
        assert reason in engine.bound.mixing.reason


def test_off_is_off_and_unproved_is_asked_for(tiny):
    """Without the probe "auto" mixes nothing, and true is taken at its word."""
    for settings, on, reason in (
        ({"mixed": False}, False, "config scheduler.mixed"),
        ({}, True, "bind probe"),
        ({"verify": False}, False, "not probed"),
        ({"verify": False, "mixed": True}, True, "not probed"),
    ):
        with Engine(tiny, config={"scheduler": settings}) as engine:
            assert engine.bound.mixing.on == on
            assert reason in engine.bound.mixing.reason
