"""top-n-sigma, typical and XTC against their plain definitions in float64, and among rows that ask for none of them."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, errors
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.core.testing.samplers import SamplerContract
from oarlock.samplers.categorical import Categorical

EXTRAS = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.2},
    {"typical_p": 0.5},
    {"typical_p": 0.95},
    {"xtc_probability": 1.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"xtc_probability": 0.25, "xtc_threshold": 0.5},
    {"top_n_sigma": 2.1, "typical_p": 0.9, "xtc_probability": 0.7, "xtc_threshold": 0.05},
]


def params(**fields):
    return SamplingParams(**{"temperature": 1.0, **fields})


class TestNarrowed(SamplerContract):
    """The conformance kit, with these filters alone and beside all others."""

    sampler = "categorical"
    params = (
        SamplingParams(),
        params(),
        *(params(extra=extra) for extra in EXTRAS),
        *(params(extra=extra, temperature=0.7, top_k=6, top_p=0.9, min_p=0.01) for extra in EXTRAS),
    )


def plain(line, asked):
    """Probabilities by the definitions."""
    x = line.astype(np.float64)
    z = (x - x.max()) / asked.temperature
    p = np.exp(z)
    extra, stays = asked.extra, np.isfinite(x)
    if asked.top_k:
        stays &= x >= np.sort(x)[-asked.top_k]
    if "top_n_sigma" in extra:
        stays &= x >= x.max() - extra["top_n_sigma"] * x[np.isfinite(x)].std()
    p = np.where(stays, p, 0)
    p /= p.sum()
    if "typical_p" in extra:
        information = -np.log(np.where(p > 0, p, 1))
        apart = np.where(p > 0, np.abs(information - (p * information).sum()), np.inf)
        order = np.argsort(apart)
        count = int((np.cumsum(p[order]) < extra["typical_p"]).sum()) + 1
        p = np.where(apart <= apart[order[count - 1]], p, 0)
        p /= p.sum()
    above = p >= extra.get("xtc_threshold", 0.1)
    if "xtc_probability" in extra and above.sum() > 1:
        rest = np.where(above & (p > p[above].min()), 0, p)
        p = (1 - extra["xtc_probability"]) * p + extra["xtc_probability"] * rest / rest.sum()
    return p


@pytest.mark.parametrize("size", [5, 97, 3000])
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_the_density_is_the_definitions(make, size, extra):
    rng = np.random.default_rng(size)
    asked = [params(extra=extra), params(extra=extra, temperature=0.6, top_k=4), params(extra=extra, temperature=1.7)]
    lines = np.concatenate([np.array(make.logits(rng, 3, size, spread=spread)) for spread in (0.3, 1.0, 4.0)])
    lines[2, :: size // 2] = -np.inf
    density = np.array(Categorical().open(asked * 3).density(mx.array(lines)))
    for i, line in enumerate(density):
        np.testing.assert_allclose(np.exp(line.astype(np.float64)), plain(lines[i], (asked * 3)[i]), atol=3e-5)


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_rows_that_ask_for_none_of_it_do_not_notice(make, extra):
    """The same bits beside a row that does."""
    rng = np.random.default_rng(3)
    others = [make.params(rng) for _ in range(6)]
    logits, keys = make.logits(rng, 7, 500), make.keys(rng, 7)
    beside, without = Categorical().open([*others, params(extra=extra)]), Categorical().open(others)
    first = np.array(beside.density(logits))[:6]
    assert (first.view(np.int32) == np.array(without.density(logits[:6])).view(np.int32)).all()
    assert beside.sample(logits, keys)[:6].tolist() == without.sample(logits[:6], keys[:6]).tolist()


def test_xtc_drops_the_best_tokens_as_often_as_it_says(make):
    """By the one number that the key gives."""
    line = np.full((1, 20), -3.0, dtype=np.float32)
    line[0, [4, 7, 11]] = (3.0, 2.0, 1.0)
    draws = 4000
    logits = mx.broadcast_to(mx.array(line), (draws, 20))
    rows = Categorical().open([params(extra={"xtc_probability": 0.3, "xtc_threshold": 0.05})] * draws)
    counts = np.bincount(np.array(rows.sample(logits, make.keys(np.random.default_rng(5), draws))), minlength=20)
    p = np.exp(line[0].astype(np.float64))
    p /= p.sum()
    expected = 0.7 * p[4]
    assert abs(counts[4] / draws - expected) < 6 * np.sqrt(expected * (1 - expected) / draws)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"top_n_sigma": 0}, "top_n_sigma"),
        ({"top_n_sigma": float("inf")}, "top_n_sigma"),
        ({"top_n_sigma": "1"}, "top_n_sigma"),
        ({"typical_p": 1.1}, "typical_p"),
        ({"typical_p": True}, "typical_p"),
        ({"xtc_probability": -0.1}, "xtc_probability"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, "xtc_threshold"),
        ({"xtc_threshold": 0.1}, "xtc_probability"),
    ],
)
def test_bad_values_name_themselves(extra, name):
    with pytest.raises(errors.InvalidParameter) as caught:
        Categorical().check(params(extra=extra), 97)
    assert caught.value.name == name


@pytest.fixture(scope="module")
def engine():
    with Engine(models.build("tiny-full")) as opened:
        yield opened


@pytest.mark.parametrize("key", ["typical_p", "xtc_probability"])
def test_what_may_drop_the_best_token_is_refused_for_greedy_rows(engine, key):
    with pytest.raises(errors.InvalidParameter, match=key):
        engine.submit(Request(prompt_ids=[1], sampling=SamplingParams(extra={key: 0.5})))


def test_the_engine_takes_them(engine):
    """Also top-n-sigma for a greedy row, whose token it never changes."""
    greedy = Request(prompt_ids=[3, 5], max_tokens=6)
    same = Request(prompt_ids=[3, 5], max_tokens=6, sampling=SamplingParams(extra={"top_n_sigma": 0.1}))
    single = params(extra={"top_n_sigma": 1e-6}, seed=1)
    drawn = Request(prompt_ids=[3, 5], max_tokens=6, sampling=single)
    rows = [result.token_ids for result in engine.generate([greedy, same, drawn])]
    assert rows[0] == rows[1] == rows[2]
