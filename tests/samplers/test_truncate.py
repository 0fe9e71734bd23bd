"""The filters against their plain definitions: a stable sort and whole numbers, in numpy."""

import mlx.core as mx
import numpy as np
import pytest

from oarlock.samplers import truncate

SIZES = [1, 2, 97, 1000, 1024, 1025, 2049, 49152]


def lines(rng, rows, size):
    """Relative probabilities as bits: peaked, flat, full of ties, and mostly zero."""
    scores = rng.normal(size=(rows, size)) * rng.choice([0.01, 1, 8, 200], size=(rows, 1))
    coarse = rng.random((rows, 1)) < 0.5
    scores = np.where(coarse, np.round(scores * 2) / 2, scores)
    scores = (scores - scores.max(axis=-1, keepdims=True)).astype(np.float32)
    return truncate.exponential(mx.array(scores))


def plain_order(bits):
    """Ids from the most probable on, lower ids first among equals."""
    return np.argsort(-np.array(bits).astype(np.int64), kind="stable")


def plain_masses(bits):
    relative = np.array(bits).view(np.float32).astype(np.float64)
    return np.floor(relative * 2**truncate.MASS_BITS).astype(np.int64)


def kept(cut, bits):
    return [set(np.flatnonzero(line)) for line in np.array(cut.mask(bits))]


@pytest.mark.parametrize("size", SIZES)
def test_top_k_keeps_the_first_k_in_order(size):
    rng = np.random.default_rng(size)
    bits = lines(rng, 12, size)
    k = np.minimum(rng.choice([0, 1, 2, 5, 64, 3000], size=(12, 1)), size).astype(np.int32)
    cut, best = truncate.top_k(bits, mx.array(k), max(1, int(k.max())))
    for i, stays in enumerate(kept(cut, bits)):
        order = plain_order(bits[i])
        assert stays == set(order[: k[i, 0] or size])
        assert best[i].tolist() == np.array(bits[i])[order][: best.shape[-1]].tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_top_p_keeps_the_fewest_tokens_whose_mass_reaches_it(size, shuffled):
    rng = np.random.default_rng(size + shuffled)
    bits = lines(rng, 12, size)
    p = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24, 1.0], size=(12, 1)).astype(np.float32)
    masses = plain_masses(bits)
    total = masses.sum(axis=-1, keepdims=True)
    candidates = bits[:, mx.array(rng.permutation(size))] if shuffled else bits
    cut = truncate.top_p(bits, candidates, mx.array(p), mx.array(total))
    for i, stays in enumerate(kept(cut, bits)):
        order = plain_order(bits[i])
        target = min(max(int(np.float32(total[i, 0]) * p[i, 0]), 1), int(total[i, 0]))
        count = int((np.cumsum(masses[i][order]) < target).sum()) + 1
        assert stays == (set(order[:count]) if p[i, 0] < 1 else set(range(size)))


@pytest.mark.parametrize("size", [97, 49152])
def test_top_p_equals_a_float64_softmax_where_no_boundary_is_near(size):
    """An independent definition: nothing of ours but the scores goes in."""
    rng = np.random.default_rng(7)
    scores = (rng.normal(size=(8, size)) * 3).astype(np.float32)
    scores -= scores.max(axis=-1, keepdims=True)
    bits = truncate.exponential(mx.array(scores))
    total = truncate.masses(bits).sum(axis=-1, keepdims=True)
    cut = truncate.top_p(bits, bits, mx.full((8, 1), 0.9), total)
    for line, stays in zip(scores.astype(np.float64), kept(cut, bits), strict=True):
        order = np.argsort(-line, kind="stable")
        mass = np.cumsum(np.exp(line[order])) / np.exp(line).sum()
        near = mass[(mass > 0.9 - 2e-6) & (mass < 0.9 + 2e-6)].size
        assert abs(len(stays) - (int((mass < 0.9).sum()) + 1)) <= near
        assert stays == set(order[: len(stays)])


def test_min_p_keeps_equals():
    bits = mx.array([[1.0, 0.5, 0.25, 0.25, 0.2]]).view(mx.int32)
    stays = [kept(truncate.min_p(mx.array([[p]]), 5), bits)[0] for p in (0.0, 0.2, 0.25, 0.3, 1.0)]
    assert stays == [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 3}, {0, 1}, {0}]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_intersect_in_any_order(seed):
    rng = np.random.default_rng(seed)
    bits = lines(rng, 6, 300)
    k, p = rng.integers(0, 9, (6, 1)).astype(np.int32), rng.random((6, 1)).astype(np.float32)
    cuts = [
        truncate.top_k(bits, mx.array(k), 9)[0],
        truncate.top_p(bits, bits, mx.array(p), truncate.masses(bits).sum(axis=-1, keepdims=True)),
        truncate.min_p(mx.array(rng.random((6, 1)).astype(np.float32)), 300),
    ]
    alone = [kept(cut, bits) for cut in cuts]
    expected = [set.intersection(*sets) for sets in zip(*alone, strict=True)]
    for a, b, c in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        assert kept(cuts[a].intersect(cuts[b]).intersect(cuts[c]), bits) == expected
    assert all(expected)


def test_the_exponential_is_near_the_true_one_and_exact_at_the_best_token():
    values = mx.array(np.concatenate([[0.0, -0.0], -np.geomspace(1e-30, 86, 200_000)]).astype(np.float32))
    got = np.array(truncate.exponential(values)).view(np.float32)
    true = np.exp(np.array(values).astype(np.float64))
    assert got[:2].tolist() == [1.0, 1.0]
    assert np.abs(got / true - 1).max() < 6e-6
    assert np.abs(got / true - 1)[true > 1e-3].max() < 1e-6


def test_the_exponential_of_anything_lies_between_0_and_1():
    values = mx.array([np.inf, -np.inf, np.nan, 5.0, -1e38, 1e-45], dtype=mx.float32)
    got = np.array(truncate.exponential(values)).view(np.float32)
    assert ((got >= 0) & (got <= 1)).all()
    assert got[1] < 1e-37


@pytest.mark.fault("M-09")
@pytest.mark.parametrize("size", [97, 5000])
def test_every_stage_on_a_stack_equals_the_stage_on_each_row(size):
    """FAULTS M-09."""
    rng = np.random.default_rng(size)
    bits = lines(rng, 10, size)
    k = mx.array(rng.integers(0, 50, (10, 1)).astype(np.int32))
    p = mx.array(rng.random((10, 1)).astype(np.float32))
    total = truncate.masses(bits).sum(axis=-1, keepdims=True)
    together = [
        truncate.top_k(bits, k, 50)[0],
        truncate.top_p(bits, bits, p, total),
        truncate.min_p(p, size),
    ]
    for i in range(10):
        row = slice(i, i + 1)
        alone = [
            truncate.top_k(bits[row], k[row], max(1, k[i].item()))[0],
            truncate.top_p(bits[row], bits[row], p[row], total[row]),
            truncate.min_p(p[row], size),
        ]
        for one, many in zip(alone, together, strict=True):
            assert one.bound.item() == many.bound[i].item()
            assert one.mask(bits[row]).tolist()[0] == many.mask(bits)[i].tolist()
