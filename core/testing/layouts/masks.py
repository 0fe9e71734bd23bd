"""Clauses on what a model gives attention beside its queries: sinks, and masks of its own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.testing.layouts.cases import Case
from oarlock.core.testing.layouts.forwards import DRAFT
from oarlock.core.testing.layouts.toys import QUERY_HEADS, number


class Masks:
    """Part of `LayoutContract`."""

    def test_attention_sinks_take_their_share(self, case: Case) -> None:
        """Handles attend with sinks as arrays do, narrow and wide."""
        if not case.attends:
            return
        layers = case.layers()
        for toy in layers.toys:
            toy.sinks = mx.array([0.5, -1.0, 2.0, 0.0]).astype(toy.info.dtype)  # type: ignore[attr-defined]
        rows = layers.open()
        rows.enter(12, 3)
        rows.step([3, 5])
        for _ in range(3):
            rows.step([1, 1])

    @pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
    def test_masks_of_the_models_own_are_heeded(self, case: Case, added: bool) -> None:
        """A mask for each head, boolean or added to the scores: here they all say what the cache's own says."""
        if not case.attends:
            return
        rows = case.layers().open(window=DRAFT)
        rows.enter(9, 2)
        for width in (1, 3):
            new, seen = [rows.new(width), rows.new(width)], []
            rows.begin([width] * 2)
            for toy, cache in zip(rows.layers.toys, rows.caches, strict=True):
                mask = _per_head(cache.make_mask(width, return_array=True), added)  # type: ignore[attr-defined]
                fetched = toy.append(cache, np.array(new))  # type: ignore[attr-defined]
                for read, size in zip(fetched, (toy.info.key_dim, toy.info.value_dim), strict=True):
                    shape = (2, toy.info.kv_heads, mask.shape[-1], size)
                    rows.require(tuple(read.shape) == shape, f"what is read has shape {read.shape}, not {shape}")
                seen.append(number(toy.attend(np.array(new), *fetched, mask)))  # type: ignore[attr-defined]
            rows.check_seen(new, seen)
            rows.commit([0, 0])

    @pytest.mark.parametrize("together", [False, True], ids=["as they are", "cut"])
    def test_masks_as_arrays_are_heeded(self, case: Case, together: bool) -> None:
        """In prompts, drafts, padded windows, where one of like rows waits; as they are, and where a model hides more."""
        if not case.attends:
            return
        layers = case.layers()
        for toy in layers.toys:
            toy.arrays, toy.together = True, together  # type: ignore[attr-defined]
        rows = layers.open(window=DRAFT)
        rows.enter(9, 2)
        rows.step([3, 3], [1, 3])
        rows.step([1, 4])
        rows = layers.open(window=DRAFT)
        rows.enter(*[min(layers.stops, default=9)] * 2)
        rows.step([0, 1], [0, 0])
        rows.step([0, 3])

    def test_a_mask_is_an_array_where_that_is_asked(self, case: Case) -> None:
        """Drafts of rows of one length that see all there is: else in a word, as mlx-lm's caches say it."""
        if not case.attends:
            return
        rows = case.layers().open(window=DRAFT)
        rows.enter(3, 3)
        for width in (2, DRAFT):
            rows.begin([width] * 2)
            for cache in rows.caches:
                said, asked = (cache.make_mask(width, return_array=array) for array in (False, True))  # type: ignore[attr-defined]
                rows.require(
                    isinstance(asked, mx.array), f"the mask of {width} is {asked} where an array was asked for"
                )
                rows.require(
                    isinstance(said, str) and said == "causal", f"the mask of {width} is {said}, mlx-lm's causal"
                )
            rows.commit([0, 0])


def _per_head(mask: mx.array, added: bool) -> mx.array:
    """Return a boolean mask for each head [B, QUERY_HEADS, N, S]; ``added``: as numbers, which a constant leaves the same."""
    each = mx.broadcast_to(mask, (mask.shape[0], QUERY_HEADS, *mask.shape[2:]))
    heads = mx.arange(QUERY_HEADS, dtype=mx.float32)[:, None, None]
    return mx.where(each, 0.0, mx.finfo(mx.float32).min) + heads if added else each
