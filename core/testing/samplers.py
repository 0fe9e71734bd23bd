"""The conformance kit for samplers: shapes, distributions, keys, and that company changes nothing.

    class TestMine(SamplerContract):
        sampler = MySampler()

in a test file, or ``pytest --oarlock-sampler NAME`` for one that is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.sampler import Sampler, SamplerRows
from oarlock.core.request import SamplingParams
from oarlock.core.testing.subjects import resolved

__all__ = ["SamplerContract"]

VOCABULARIES = (8, 1000)
DRAWS = 4000
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def usual() -> list[SamplingParams]:
    """Return parameters as users give them: greedy, and every filter on and off."""
    grid = itertools.product((0.3, 1.0, 2.0), (0, 1, 5), (1.0, 0.9, 1e-9), (0.0, 0.2))
    return [SamplingParams(), *(SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in grid)]


class SamplerContract:
    """What a sampler promises, clause by clause; subclass it, name a ``sampler``, and let pytest find the subclass.

    ``params``: the parameters to try, for a sampler that asks for some of its own; those of `usual` that it handles
    where none are given, with ``options`` as their `SamplingParams.extra`.
    """

    sampler: ClassVar[Sampler | str]
    options: ClassVar[Mapping[str, Any]] = {}
    params: ClassVar[Sequence[SamplingParams]] = ()

    @classmethod
    def opened(cls) -> tuple[Sampler, list[SamplingParams]]:
        """Return the sampler and what it handles."""
        sampler: Sampler = resolved("sampler", cls.sampler)
        params = cls.params or [attrs.evolve(each, extra=cls.options) for each in usual()]
        return sampler, [each for each in params if sampler.handles(each)]

    @classmethod
    def check_subject(cls) -> None:
        """Raise what makes it impossible to begin."""
        cls.opened()

    def test_it_says_what_it_is(self) -> None:
        """A name, a fact about greedy rows, and some parameters that it handles."""
        sampler, params = self.opened()
        assert isinstance(sampler.name, str)
        assert sampler.name
        assert isinstance(sampler.is_argmax_invariant, bool)
        assert params, "it handles none of the parameters"

    @pytest.mark.parametrize("size", VOCABULARIES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_densities_are_distributions(self, size: int, dtype: Any) -> None:
        """Float32 log-probabilities that come to one, with a token at least in every line."""
        sampler, params = self.opened()
        logits = _scores(len(params), size, dtype)
        density = sampler.open(params).density(logits)
        assert density.dtype == mx.float32
        assert density.shape == logits.shape
        total = np.exp(np.array(density, dtype=np.float64)).sum(axis=-1)
        np.testing.assert_allclose(total, 1, atol=2e-3)
        assert np.isfinite(np.array(density)).any(axis=-1).all()

    @pytest.mark.parametrize("size", VOCABULARIES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_row_does_not_mind_its_company(self, size: int, dtype: Any) -> None:
        """Alone, together and in another order: the same bits, the same tokens."""
        sampler, params = self.opened()
        logits, keys = _scores(len(params), size, dtype), _keys(len(params))
        together = sampler.open(params)
        density, tokens = together.density(logits), together.sample(logits, keys)
        assert tokens.dtype == mx.uint32
        assert tokens.shape == (len(params),)
        order = np.random.default_rng(1).permutation(len(params)).tolist()
        at = mx.array(order)
        shuffled = sampler.open([params[i] for i in order])
        assert _bits(shuffled.density(logits[at])) == _bits(density[at])
        assert shuffled.sample(logits[at], keys[at]).tolist() == tokens[at].tolist()
        for i, own in enumerate(params):
            alone, line = sampler.open([own]), slice(i, i + 1)
            assert _bits(alone.density(logits[line])) == _bits(density[line]), own
            assert alone.sample(logits[line], keys[line]).tolist() == tokens[line].tolist(), own

    @pytest.mark.parametrize("size", VOCABULARIES)
    def test_a_sample_is_a_draw_from_the_density(self, size: int) -> None:
        """The shorter way leads to the same tokens, and to none that the filters left out."""
        sampler, params = self.opened()
        rows = sampler.open(params)
        for seed in range(10):
            logits, keys = _scores(len(params), size, seed=seed), _keys(len(params), seed)
            density, tokens = rows.density(logits), rows.sample(logits, keys)
            assert rows.draw(density, keys).tolist() == tokens.tolist()
            chosen = mx.take_along_axis(density, tokens[:, None].astype(mx.int32), axis=-1)
            assert np.isfinite(np.array(chosen)).all()

    def test_draws_follow_the_density(self) -> None:
        """Over many keys each token comes as often as its probability says, within six standard errors."""
        sampler, params = self.opened()
        for own in params:
            logits = mx.broadcast_to(_scores(1, 8, seed=3), (DRAWS, 8))
            rows, keys = sampler.open([own] * DRAWS), _keys(DRAWS, 5)
            wanted = np.exp(np.array(rows.density(logits[:1], mx.zeros((1,), dtype=mx.int32)), dtype=np.float64))[0]
            counts = np.bincount(np.array(rows.sample(logits, keys)), minlength=8) / DRAWS
            error = np.sqrt(wanted * (1 - wanted) / DRAWS)
            assert (np.abs(counts - wanted) <= 6 * error + 1e-6).all(), f"{own}: {counts} instead of {wanted}"

    def test_the_same_key_draws_the_same(self) -> None:
        """Nothing but the key is random, and nothing is left of an earlier draw."""
        sampler, params = self.opened()
        logits, keys = _scores(len(params), 100), _keys(len(params))
        rows = sampler.open(params)
        first = rows.sample(logits, keys).tolist()
        rows.sample(logits, _keys(len(params), 9))
        assert rows.sample(logits, keys).tolist() == first
        assert sampler.open(params).sample(logits, keys).tolist() == first

    @pytest.mark.parametrize("seed", range(5))
    def test_rows_are_kept_in_any_order(self, seed: int) -> None:
        """What is kept draws as if it had been opened so."""
        sampler, params = self.opened()
        draw = np.random.default_rng(seed)
        indices = draw.permutation(len(params))[: draw.integers(1, len(params) + 1)].tolist()
        rows, anew = sampler.open(params), sampler.open([params[i] for i in indices])
        rows.keep(indices)
        logits, keys = _scores(len(indices), 100, seed=seed), _keys(len(indices), seed)
        assert _bits(rows.density(logits)) == _bits(anew.density(logits))
        assert rows.sample(logits, keys).tolist() == anew.sample(logits, keys).tolist()

    def test_lines_may_be_of_any_row(self) -> None:
        """A window has several lines of one row: ``rows`` says whose each is."""
        sampler, params = self.opened()
        lines = [i for i in range(len(params)) for _ in range(2)][::-1]
        logits, keys = _scores(len(lines), 100), _keys(len(lines))
        rows, at = sampler.open(params), mx.array(lines, dtype=mx.int32)
        each = sampler.open([params[i] for i in lines])
        assert _bits(rows.density(logits, at)) == _bits(each.density(logits))
        assert rows.sample(logits, keys, at).tolist() == each.sample(logits, keys).tolist()

    def test_what_is_masked_is_never_drawn(self) -> None:
        """Scores of minus infinity stay out, whatever the temperature; a lone token left is drawn."""
        sampler, params = self.opened()
        scores = np.array(_scores(len(params), 100))
        scores[:, ::2] = -np.inf
        scores[0, :], scores[0, 7] = -np.inf, -50.0
        rows = sampler.open(params)
        for seed in range(10):
            tokens = _tokens(rows, mx.array(scores), _keys(len(params), seed))
            assert all(token % 2 for token in tokens)
            assert tokens[0] == 7

    def test_a_line_that_is_no_number_spoils_no_other(self) -> None:
        """A broken row's scores are NaN: the others draw what they draw."""
        sampler, params = self.opened()
        several = [params[i % len(params)] for i in range(3)]
        scores, keys = np.array(_scores(3, 100)), _keys(3)
        wanted = _tokens(sampler.open(several), mx.array(scores), keys)
        scores[1] = np.nan
        got = _tokens(sampler.open(several), mx.array(scores), keys)
        assert [got[0], got[2]] == [wanted[0], wanted[2]]

    def test_greedy_rows_get_the_best_token(self) -> None:
        """Where it says that it never changes a greedy row's token."""
        sampler, _ = self.opened()
        greedy = SamplingParams()
        if not (sampler.is_argmax_invariant and sampler.handles(greedy)):
            return
        logits = _scores(4, 1000)
        tokens = sampler.open([greedy] * 4).sample(logits, _keys(4))
        assert tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def _scores(rows: int, size: int, dtype: Any = mx.float32, seed: int = 0) -> mx.array:
    drawn = np.random.default_rng(100 + seed).normal(size=(rows, size)) * 2
    return mx.array(drawn.astype(np.float32)).astype(dtype)


def _tokens(rows: SamplerRows, logits: mx.array, keys: mx.array) -> list[int]:
    tokens: Any = rows.sample(logits, keys).tolist()
    return list(tokens)


def _keys(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32))


def _bits(array: mx.array) -> bytes:
    return np.array(array.astype(mx.float32)).tobytes()
