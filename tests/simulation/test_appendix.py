"""SPEC appendix A with its numbers: A1 to A4, A7 and A8. A6 stands in tests/core/test_planner.py."""

from __future__ import annotations

import mlx.core as mx
import pytest
from harness.model import PRIME
from harness.plugins import Store
from harness.rig import Zeros, build, prompt, run
from mlx_lm.models.cache import ArraysCache, KVCache

from oarlock.core import Request


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
