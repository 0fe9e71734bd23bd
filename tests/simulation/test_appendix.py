"""SPEC appendix A with its numbers: checks that need no real model. A6 stands in tests/core/test_planner.py."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest
from harness.instruments import Lock
from harness.model import PRIME, StubModel
from harness.plugins import Store
from mlx_lm.models.cache import ArraysCache, KVCache

from oarlock.core import Request, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import EngineClosed
from oarlock.methods.plain import PlainDecoding, PlainOptions


class Zeros(StubModel):
    """Keys and values as in the stub, and the score of token 0 is the best at every step. It notes its forwards."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        self.before = lambda cache, ids: self.shapes.append(list(ids.shape))

    def __call__(self, ids, cache):
        return 0 * super().__call__(ids, cache) - self._tokens


class Hybrid(Zeros):
    """The same, beside a layer that folds every token that it is fed into one number."""

    def make_cache(self):
        return [KVCache(), ArraysCache(1)]

    def __call__(self, ids, cache):
        scores = super().__call__(ids, cache[:1])
        state = cache[1][0]
        state = mx.zeros((ids.shape[0], 1)) if state is None else state
        for token in range(ids.shape[1]):
            state = mx.remainder(3 * state + ids[:, token : token + 1] + 1, PRIME)
        cache[1][0] = state
        return scores


def fold(tokens):
    """Return what `Hybrid` keeps of these tokens."""
    state = 0
    for token in tokens:
        state = (3 * state + token + 1) % PRIME
    return state


@attrs.define(eq=False)
class Given:
    """A plugin of the parts that a check brings."""

    store: object = None
    methods: tuple = ()
    adapter: object = None

    @hookimpl
    def register_state_caches(self, register):
        if self.store is not None:
            register(self.store)

    @hookimpl
    def register_methods(self, register):
        for method in self.methods:
            register(method)

    @hookimpl
    def register_adapters(self, register):
        if self.adapter is not None:
            register(self.adapter)


def build(model, *, store=None, methods=(), adapter=None, lock=None, **scheduler):
    config = {"scheduler": {"verify": False, **scheduler}}
    if store is not None:
        config["state_cache"] = {"name": store.name, "publish_min_tokens": 256}
    return Engine(model, config=config, plugins=[Given(store, methods, adapter)], lock=lock)


def prompt(length, first):
    return tuple((first + 7 * i) % 60 for i in range(length))


def run(engine, requests, turns=400):
    handles = [engine.submit(request) for request in requests]
    for _ in range(turns):
        if not engine.step():
            return handles
    pytest.fail(f"not done after {turns} steps: {engine.stats()}")


def replay(model_type, tokens):
    """Return the states of one row that was fed exactly ``tokens``, by an engine that does nothing else."""
    store = Store(lambda *entry: None)
    run(build(model_type(), store=store, prefill_chunk=7), [Request(prompt_ids=[*tokens, 0], max_tokens=1)])
    return next(states for _, stored, states in store.entries if stored == tuple(tokens))


# --- A1 to A3: what is stored -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [Zeros, Hybrid])
def test_three_states_are_stored_of_two_long_rows(model_type):
    """A1, and A3 for the hybrid: B's boundary of 255 is too short; B's last token was fed, A's was not (8.7)."""
    store = Store(lambda *entry: None)
    a, b = prompt(300, 1), prompt(256, 2)
    run(build(model_type(), store=store), [Request(prompt_ids=a, max_tokens=10), Request(prompt_ids=b, max_tokens=3)])
    keys = [tokens for _, tokens, _ in store.entries]
    assert keys == [a[:-1], (*b, 0, 0, 0), (*a, *[0] * 9)]
    for _, tokens, states in store.entries:
        assert states[0].arrays()["keys"][0, 0, :, 0].tolist() == list(tokens)
        for state, alone in zip(states, replay(model_type, tokens), strict=True):
            assert state.tokens == alone.tokens == len(tokens)
            for name, array in alone.arrays().items():
                assert mx.array_equal(state.arrays()[name], array), name


def test_short_rows_of_a_batch_are_not_stored():
    """A2."""
    store = Store(lambda *entry: None)
    requests = [Request(prompt_ids=prompt(8, 1), max_tokens=10), Request(prompt_ids=prompt(8, 2), max_tokens=3)]
    run(build(Zeros(), store=store), requests)
    assert store.entries == []


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_recurrent_state_is_the_fold_of_prompt_and_fed_tokens(pipeline):
    """A3, 13.6: rows that end one after the other in one batch."""
    store = Store(lambda *entry: None)
    prompts = [prompt(length, i) for i, length in enumerate((300, 256, 270))]
    requests = [Request(prompt_ids=ids, max_tokens=n) for ids, n in zip(prompts, (9, 2, 5), strict=True)]
    run(build(Hybrid(), store=store, prefill_chunk=64, pipeline=pipeline), requests)
    finished = [(tokens, states) for _, tokens, states in store.entries if tokens[-1] == 0 and len(tokens) > 256]
    assert len(finished) >= 3
    for tokens, states in finished:
        (held,) = (array for array in states[1].arrays().values())
        assert held.item() == fold(tokens)


# --- A4, A7: failures --------------------------------------------------------------------------------------------


def test_a_consumer_that_raises_fails_its_own_row():
    """A4, 10.7: at its third token, after two deliveries."""
    taken = []

    def consumer(event):
        if event.index == 2:
            raise OSError("full")
        taken.append(event.token)

    requests = [
        Request(prompt_ids=[i + 1, 5, 6], max_tokens=6, on_token=consumer if i == 1 else None) for i in range(3)
    ]
    handles = run(build(Zeros()), requests)
    assert isinstance(handles[1].outcome, OSError)
    assert taken == [0, 0]
    assert [handles[i].result().finish_reason for i in (0, 2)] == ["length", "length"]
    assert [handles[i].result().usage.generated_tokens for i in (0, 2)] == [6, 6]


def failing_model(guilty):
    """A model whose forwards raise while a row with one of these first tokens takes part."""
    model = Zeros()

    def before(cache, ids):
        model.shapes.append(list(ids.shape))
        rows = set(ids[:, 0].tolist()) & set(guilty)
        if rows:
            raise OSError(*sorted(rows))

    model.before = before
    return model


def test_a_failing_cohort_is_halved():
    """A7 as DESIGN 7.6 changes it: in place, then halves; the guilty row alone is rejected, the others go on."""
    model = failing_model({2})
    requests = [Request(prompt_ids=[i + 1, *[40] * 8], max_tokens=3) for i in range(3)]
    handles = run(build(model, prefill_chunk=4), requests)
    assert model.shapes[:6] == [[3, 4], [3, 4], [1, 4], [2, 4], [1, 4], [1, 4]]  # twice, {0}, {1, 2}, {1}, {2}
    assert model.shapes[6] == [2, 4]
    assert isinstance(handles[1].outcome, OSError)
    assert [handles[i].result().token_ids for i in (0, 2)] == [(0, 0, 0)] * 2


def test_a_cohort_in_which_everybody_fails_is_rejected():
    """A7: each row with its own error; the engine goes on."""
    model = failing_model({1, 2, 3})
    engine = build(model, prefill_chunk=4)
    handles = run(engine, [Request(prompt_ids=[i + 1, *[40] * 8], max_tokens=3) for i in range(3)])
    assert model.shapes[:2] == [[3, 4], [3, 4]]
    assert [handle.outcome.args for handle in handles] == [(1,), (2,), (3,)]
    assert run(engine, [Request(prompt_ids=[9], max_tokens=2)])[0].result().token_ids == (0, 0)


# --- A8: late arrivals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "shapes"), [(2048, [[1, 4], [2, 4], [2, 4]]), (25, [[1, 4], [1, 4], [1, 4]])], ids=["joins", "waits"]
)
def test_a_row_that_arrives_during_a_forward_joins_the_next(limit, shapes):
    """A8, 5.13; 5.14, trap 32: the limit counts whole prompts, not what is left of them."""
    model = Zeros()
    engine = build(model, prefill_chunk=4, prefill_batch_tokens=limit)
    late = []

    def between(cache, ids):
        if not late:
            late.append(engine.submit(Request(prompt_ids=prompt(13, 3), max_tokens=1)))

    model.between = between
    run(engine, [Request(prompt_ids=prompt(13, 1), max_tokens=1)])
    assert model.shapes[:3] == shapes
    assert late[0].result().token_ids == (0,)


# --- A9, A11, A12: methods, holds, adapters ---------------------------------------------------------------------------


class Noted:
    """A method that plain decoding stands behind; it notes when it is opened, stepped and closed."""

    options = PlainOptions

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def open(self, host, options):
        name, notes = self.name, self.notes

        class Watched(PlainDecoding):
            def advance(self, work=None):
                notes.append(f"{name} steps {len(host.rows)}")
                super().advance(work)

            def close(self):
                notes.append(f"{name} closes")
                super().close()

        notes.append(f"{name} opens")
        return Watched(host)


def test_a_method_is_opened_once_for_its_rows_and_closed_before_the_next():
    """A9, 4.10, trap 46: four requests of X and one of Y."""
    notes = []
    engine = build(Zeros(), methods=(Noted("x", notes), Noted("y", notes)), max_batch=4)
    requests = [Request(prompt_ids=[i + 1], max_tokens=3, method="x") for i in range(4)]
    handles = run(engine, [*requests, Request(prompt_ids=[9], max_tokens=3, method="y")])
    assert all(handle.result().token_ids == (0, 0, 0) for handle in handles)
    assert notes[0] == "x opens"
    assert "x steps 4" in notes
    assert [note for note in notes if "steps" not in note] == ["x opens", "x closes", "y opens"]
    assert not [note for note in notes[: notes.index("x closes")] if note.startswith("y")]
    engine.close()
    assert notes[-1] == "y closes"


def test_a_method_survives_an_empty_batch():
    """4.10, trap 46: the next request of the same key finds it open."""
    notes = []
    engine = build(Zeros(), methods=(Noted("x", notes),))
    for _ in range(3):
        run(engine, [Request(prompt_ids=[1], max_tokens=2, method="x")])
        engine.step()
    assert [note for note in notes if "steps" not in note] == ["x opens"]


def test_closing_a_held_engine_rejects_the_queued():
    """A11, 2.9."""
    engine = build(Zeros())
    engine.hold()
    handle = engine.submit(Request(prompt_ids=[1], max_tokens=2))
    assert not engine.step()
    engine.close()
    assert isinstance(handle.outcome, EngineClosed)
    with pytest.raises(EngineClosed, match="closed"):
        handle.result()


class Entered:
    """An adapter that notes."""

    name = "lora"

    def __init__(self, note):
        self.note = note

    def enter(self, model):
        self.note("enter")
        return lambda: self.note("leave")


@pytest.mark.parametrize("raises", [False, True])
def test_an_adapter_is_entered_and_left_under_the_lock(raises):
    """A12, 4.3, 4.9, 16.5: resolved, entered, left; also when on_admitted raises."""
    notes = []
    lock = Lock(lambda: notes.append("unlocked"))

    def note(what):
        assert lock.held
        notes.append(what)

    def admitted():
        note("admitted")
        if raises:
            raise OSError("no")

    def namespace():
        note("namespace")
        return "n"

    engine = build(Zeros(), adapter=Entered(note), lock=lock)
    request = Request(prompt_ids=[1], max_tokens=2, adapter="lora", namespace=namespace, on_admitted=admitted)
    handle = run(engine, [request])[0]
    engine.step()
    assert notes == ["namespace", "enter", "admitted", "leave", "unlocked"]
    assert isinstance(handle.outcome, OSError) == raises
