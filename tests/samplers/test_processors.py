"""Penalties, bias, banned tokens, n-grams and min_tokens against their definitions, number by number."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from oarlock.core import Request, SamplingParams, errors, hookimpl
from oarlock.core.contracts.sampler import ProcessedRow
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.samplers.bias import Bias, MinTokens
from oarlock.samplers.callables import per_row
from oarlock.samplers.ngrams import Ngrams
from oarlock.samplers.penalties import Penalties

SIZE = 50
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def row(prompt=(), generated=(), extra=None, **fields):
    own = {name: fields.pop(name) for name in ("stop_ids", "min_tokens") if name in fields}
    return ProcessedRow(params=SamplingParams(extra=extra or {}, **fields), prompt=prompt, generated=generated, **own)


def scores(rows, dtype=mx.float32, seed=0):
    return mx.array(np.random.default_rng(seed).normal(size=(rows, SIZE)).astype(np.float32) * 3).astype(dtype)


def number(array):
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_penalties_are_the_formulas(dtype, seed):
    """In float32, rounded once; tokens that were not there keep their bits."""
    rng = np.random.default_rng(seed)
    rows = [
        row(
            rng.integers(0, 20, rng.integers(1, 600)).tolist(),
            rng.integers(0, 20, rng.integers(0, 40)).tolist(),
            repetition_penalty=float(rng.choice([1.0, 0.5, 1.3])),
            presence_penalty=float(rng.choice([0.0, -1.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.4, -0.2])),
        )
        for _ in range(6)
    ]
    given = scores(6, dtype, seed)
    wanted = number(given)
    for line, own in zip(wanted, rows, strict=True):
        r, p, f = (
            np.float32(getattr(own.params, f"{name}_penalty")) for name in ("repetition", "presence", "frequency")
        )
        for token in {*own.prompt, *own.generated}:
            line[token] = line[token] / r if line[token] > 0 else line[token] * r
        for token in {*own.generated}:
            line[token] = line[token] - p - f * np.float32(own.generated.count(token))
    got = Penalties().open(rows).apply(given)
    assert (number(got) == number(mx.array(wanted).astype(dtype))).all()


def test_tokens_that_have_no_score_are_left_out():
    """A model may have more embeddings than scores."""
    rows = Penalties().open([row([3, SIZE, SIZE + 900], [SIZE + 1], repetition_penalty=2.0, presence_penalty=1.0)])
    given = scores(1)
    wanted = number(given)
    wanted[0, 3] = wanted[0, 3] / 2 if wanted[0, 3] > 0 else wanted[0, 3] * 2
    assert (number(rows.apply(given)) == wanted).all()
    biased = Bias().open([row(logit_bias={SIZE + 5: 9.0}), row(logit_bias={SIZE: 1.0, 2: 3.0})]).apply(scores(2))
    wanted = number(scores(2))
    wanted[1, 2] += np.float32(3)
    assert (number(biased) == wanted).all()


def test_what_is_minus_infinity_stays_so():
    """A masked token gets no score by a penalty or a bias."""
    given = mx.full((1, SIZE), -mx.inf)
    for rows in (
        Penalties().open([row([3], [4], repetition_penalty=0.5, presence_penalty=-9.0)]),
        Bias().open([row(logit_bias={3: 100.0})]),
    ):
        assert np.isneginf(number(rows.apply(given))).all()


def test_bias_is_added_and_banned_tokens_are_gone():
    rows = [
        row(logit_bias={3: 1.5, 0: -2.0}),
        row(extra={"banned_tokens": (4, 4, 9)}),
        row(logit_bias={4: 5.0}, extra={"banned_tokens": [4]}),
    ]
    given = scores(3)
    wanted = number(given)
    wanted[0, [3, 0]] += np.float32([1.5, -2.0])
    wanted[1, [4, 9]] = wanted[2, 4] = -np.inf
    assert (number(Bias().open(rows).apply(given)) == wanted).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_no_ngram_comes_twice(n):
    """By the definition: what followed the last n - 1 tokens where they stood before."""
    rng = np.random.default_rng(n)
    rows = [
        row(rng.integers(0, 4, length).tolist(), rng.integers(0, 4, 5).tolist(), {"no_repeat_ngram": n})
        for length in (1, 2, 9, 300)
    ]
    given = scores(len(rows))
    wanted = number(given)
    for line, own in zip(wanted, rows, strict=True):
        known = [*own.prompt, *own.generated]
        for end in range(n, len(known) + 1):
            if known[end - n : end - 1] == known[len(known) - n + 1 :]:
                line[known[end - 1]] = -np.inf
    assert (number(Ngrams().open(rows).apply(given)) == wanted).all()
    assert np.isneginf(wanted).any() == (n < 9)


def test_a_row_takes_no_end_before_min_tokens():
    """And any from then on, also while others may not; where nobody is short scores are handed through."""
    asked = [
        row(min_tokens=2, stop_ids=frozenset({3, 5})),
        row(generated=[9], min_tokens=2, stop_ids=frozenset({7, SIZE + 3})),
    ]
    rows, given = MinTokens().open(asked), scores(2)
    for banned in ({(0, 3), (0, 5), (1, 7)}, {(0, 3), (0, 5)}, set()):
        got = rows.apply(given)
        assert {tuple(place) for place in np.argwhere(np.isneginf(number(got))).tolist()} == banned
        rows.push(mx.zeros((2, 1), dtype=mx.uint32), [1, 1])
    assert got is given
    assert not MinTokens().handles(row(generated=[1, 2], min_tokens=2, stop_ids=frozenset({3})))
    assert not MinTokens().handles(row(min_tokens=2))


# --- functions of one row --------------------------------------------------------------------------------------------


class Given:
    def __init__(self, *processors):
        self._processors = processors

    @hookimpl
    def register_processors(self, register):
        for processor in self._processors:
            register(processor)


def of_mlx_lm(options):
    (process,) = make_logits_processors(**options)
    return process


@pytest.mark.parametrize("pipeline", [True, False])
def test_mlx_lms_own_processors_give_mlx_lms_own_tokens(pipeline):
    """Rows with different ones, and with none, in one batch."""
    model, prompts = models.build("tiny-full"), models.prompts((5, 12, 9, 7), 60)
    options = [
        {"repetition_penalty": 1.7, "repetition_context_size": 6},
        {"logit_bias": {5: 4.0, 9: -3.0}},
        {"frequency_penalty": 1.5, "frequency_context_size": 8},
    ]
    params = [SamplingParams(extra={"theirs": each}) for each in options] + [SamplingParams()]
    asked = [
        Request(prompt_ids=prompt, max_tokens=14 - 3 * i, sampling=p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    wanted = [
        models.serial(
            model, request.prompt_ids, request.max_tokens, logits_processors=[of_mlx_lm(each)] if each else None
        )
        for request, each in zip(asked, [*options, None], strict=True)
    ]
    bare = [models.serial(model, request.prompt_ids, request.max_tokens).tokens for request in asked]
    assert [each.tokens == own for each, own in zip(wanted, bare, strict=True)] == [False, False, False, True]
    config = {"scheduler": {"pipeline": pipeline}}
    with Engine(model, plugins=[Given(per_row("theirs", of_mlx_lm))], config=config) as engine:
        said = [result.token_ids for result in engine.generate(asked)]
        with pytest.raises(errors.InvalidParameter, match="unexpected keyword argument 'strength'"):
            engine.submit(Request(prompt_ids=[1], sampling=SamplingParams(extra={"theirs": {"strength": 1}})))
    models.compare(said, [each.tokens for each in wanted], [each.gaps for each in wanted]).check()


def test_a_function_that_returns_something_else_fails_its_row_alone():
    model = models.build("tiny-full")
    half = per_row("half", lambda broken: lambda tokens, logits: logits[:, ::2] if broken else logits)
    with Engine(model, plugins=[Given(half)]) as engine:
        asked = [
            Request(prompt_ids=[3, 5], max_tokens=5, sampling=SamplingParams(extra={"half": broken}))
            for broken in (0, 1)
        ]
        good, bad = engine.generate(asked, return_errors=True)
        assert len(good.token_ids) == 5
        assert isinstance(bad, ValueError)
        assert "(1, 49)" in str(bad)
