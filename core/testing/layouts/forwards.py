"""Clauses on forwards: what a row reads, in company and alone, and what is left of a forward that is undone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from oarlock.core.contracts.layout import KeyValues, LayerInfo
from oarlock.core.testing.layouts.cases import Case
from oarlock.core.testing.layouts.rows import Layers, Rows
from oarlock.core.testing.layouts.toys import number

DRAFT = 5
"""The widest forward that is cut in the middle."""
MASKS = (
    {"return_array": False, "window_size": 3},
    {"return_array": True, "window_size": None},
    {"return_array": False, "window_size": None},
)
"""How models ask; the last is what attention gets here."""


class Forwards:
    """Part of `LayoutContract`."""

    def test_opened_it_holds_nothing(self, case: Case) -> None:
        """No rows, no bytes; true in a condition, since models ask ``if cache``."""
        rows = case.layers().open(slots=3, window=DRAFT)
        for cache in rows.caches:
            rows.require(bool(cache) and not hasattr(type(cache), "__len__"), "it is falsy or has a length")
            rows.require(not hasattr(cache, "bits"), "it has bits: mlx-lm would take it for its own quantized cache")
            rows.require((cache.rows, tuple(cache.tokens)) == (0, ()), "it has rows")
            rows.require((cache.nbytes, cache.live_bytes, cache.arrays()) == (0, 0, []), "it has bytes")
            rows.require(cache.reusable(5) == 0, "a prefix of no row can be reused")

    def test_a_lone_row_is_its_serial_cache(self, case: Case) -> None:
        """Masks, positions and reads are those of mlx-lm's cache of the kind, where it has one."""
        rows = case.layers().open()
        rows.add(1)
        _go_on(case, rows, (5, 3, 1, 1, 20, *[1] * (2 * case.window), 2, 1))

    def test_rows_of_one_length_read_as_one_does(self, case: Case) -> None:
        """No row is padded: mlx-lm's masks and reads again, and one integer is everybody's position."""
        rows = case.layers().open()
        rows.add(3)
        _go_on(case, rows, (6, 2, *[1] * (case.window + 3), 9, 1, 1))
        if case.attends:
            rows.begin([1, 1, 1])
            rows.require(isinstance(rows.caches[0].offset, int), "offset is no integer")  # type: ignore[attr-defined]
            rows.commit([0, 0, 0])

    def test_rows_of_different_lengths_do_not_mind_each_other(self, case: Case) -> None:
        """Ragged prompts, a padded window, a row without tokens in it, then steps past whatever wraps."""
        rows = case.layers().open()
        rows.enter(12, 3, 7, 1)
        rows.add(1)
        rows.step([3, 0, 2, 1, 5])
        rows.step([1, 4, 1, 0, 20])
        for _ in range(2 * case.window + 3):
            rows.step([1] * 5)

    def test_how_a_prompt_came_does_not_matter(self, case: Case) -> None:
        """In one forward, in two, token by token: what comes next reads the same, since company decides about chunks."""
        layers = case.layers()
        prompt = layers.open().new(2 * case.window)
        whole, *others = (_after(layers, prompt, most) for most in (len(prompt), 7, 1))
        for most, other in zip((7, 1), others, strict=True):
            off = max(float(np.abs((a - b) / (1 + np.abs(a))).max()) for a, b in zip(whole, other, strict=True))
            complaint = (
                f"the token behind {len(prompt)} reads what is off by {off:.3g} where they came by {most} at most"
            )
            assert off <= layers.rounding, complaint

    def test_positions_are_each_rows_own(self, case: Case) -> None:
        """``offset`` is where the next token stands: before the append, and behind it after."""
        if not case.attends:
            return
        rows = case.layers().open()
        rows.enter(9, 2)
        new = [rows.new(2), rows.new(2)]
        rows.begin([2, 2])
        for toy, cache in zip(rows.layers.toys, rows.caches, strict=True):
            mask = toy.mask(cache, 2)
            rows.require(_listed(cache.offset, 2) == [9, 2], f"offset is {_listed(cache.offset, 2)} at 9 and 2")  # type: ignore[attr-defined]
            toy.forward(cache, np.array(new), mask)
            rows.require(_listed(cache.offset, 2) == [11, 4], f"offset is {_listed(cache.offset, 2)} after two more")  # type: ignore[attr-defined]
        rows.commit([0, 0])

    def test_what_was_read_can_be_read_again(self, case: Case) -> None:
        """``keys_and_values()`` returns what the append returned: some models attend twice, or with another layer's."""
        if not case.attends:
            return
        rows = case.layers().open()
        rows.enter(9, 2)
        new = np.array([rows.new(2), rows.new(2)])
        rows.begin([2, 2])
        for toy, cache in zip(rows.layers.toys, rows.caches, strict=True):
            mask = toy.mask(cache, 2)
            first = toy.forward(cache, new, mask)
            again = toy.attend(new, *cache.keys_and_values(), mask)  # type: ignore[attr-defined]
            rows.require(bool(mx.array_equal(first, again)), "a second read differs from the first")
        rows.commit([0, 0])

    def test_what_is_held_can_be_replaced(self, case: Case) -> None:
        """Models tie to ``keys`` and ``values`` what nothing else reads; later steps read what they set.

        A layout without them is refused at bind by the models that do so.
        """
        rows = case.layers().open()
        if not (case.attends and hasattr(type(rows.caches[0]), "keys")):
            return
        rows.enter(20, 3)
        for _ in range(3):
            rows.step([1, 1])
            for cache in rows.caches:
                cache.keys = mx.depends(cache.keys, [mx.zeros(1)])  # type: ignore[attr-defined]
                cache.values = mx.depends(cache.values, [mx.zeros(1)])  # type: ignore[attr-defined]
        rows.step([2, 1])
        rows.check()

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
    def test_half_precision_stays_what_it_is(self, case: Case, dtype: Any) -> None:
        """Rows of 16 bits join, are cut, stored and put back as such, and what is read has their dtype."""
        if not case.attends:
            return
        rows = case.layers(dtype=dtype).open(window=DRAFT)
        rows.enter(12, 3, 0)
        rows.step([3, 5, 2], [1, 0, 2])
        states, pieces = rows.states(1), list(rows.pieces[1])
        rows.keep([2, 0])
        rows.join(rows.restored(states, pieces))
        for _ in range(case.window):
            rows.step([1, 1, 1])
        new = np.array([rows.new(1) for _ in range(3)])
        rows.begin([1, 1, 1])
        for toy, cache in zip(rows.layers.toys, rows.caches, strict=True):
            read = toy.append(cache, new)  # type: ignore[attr-defined]
            rows.require({each.dtype for each in read} == {dtype}, f"{read[0].dtype} is read of {dtype}")
        rows.commit([0, 0, 0])

    def test_rows_grow_past_what_was_reserved(self, case: Case) -> None:
        """Buffers grow in steps: cross one in a step of ragged rows, in a prompt and in a draft."""
        rows = case.layers().open(slots=2, window=DRAFT)
        rows.enter(254, 3)
        for _ in range(4):
            rows.step([1, 1])
        rows.step([0, 300])
        rows.step([1, 1])
        rows.check()

    def test_a_window_is_cut_anywhere(self, case: Case) -> None:
        """Each row keeps what it likes of a draft (recurrent ones all or nothing), again and again, past every wrap."""
        rows = case.layers().open(window=DRAFT)
        rows.enter(12, 3, 7)
        some = range(DRAFT + 1) if rows.cuts else (0, DRAFT)
        counts = itertools.cycle(some)
        for _ in range(3 * case.window):
            rows.step([DRAFT] * 3, [next(counts), next(counts), next(counts)])
            next(counts)
        rows.step([1] * 3)
        for _ in range(case.window):
            rows.step([DRAFT, 1, 2], [0, 1, 2] if not rows.cuts else [1, 0, 2])
        rows.check()

    def test_a_cut_window_leaves_nothing_behind(self, case: Case) -> None:
        """A row cut back beside one that goes on; then widths in which each is padded."""
        rows = case.layers().open(window=DRAFT)
        rows.enter(6, 6)
        for widths, kept in (([5, 5], [5, 0]), ([1, 5], [1, 5]), ([5, 0], [0, 0]), ([2, 5], [2, 0]), ([1, 1], [1, 1])):
            rows.step(widths, kept)

    def test_a_forward_is_undone_wherever_it_failed(self, case: Case) -> None:
        """Before any layer ran, behind the first, behind the last, before it was begun; narrow, wide, into empty rows."""
        for lengths, width in itertools.product(([0, 0], [12, 3], [case.window, 300]), (1, DRAFT, 2 * case.window + 4)):
            rows = case.layers().open()
            rows.enter(*lengths)
            for until in (0, 1, None):
                rows.abort(width, until)
                rows.commit([0, 0])
                rows.check()
            rows.step([1, 1])
            rows.step([2, 1])

    def test_columns_describe_what_is_read(self, case: Case) -> None:
        """Layers of one history agree, whoever made them; a forward that reads more is another description."""
        first, second = case.layers().open(), case.layers().open()
        for rows in (first, second):
            rows.enter(9, 4)
            rows.step([1, 1])
        described = {cache.columns([1, 1]) for rows in (first, second) for cache in rows.caches}
        first.require(len(described) == 1, f"the columns of one history are described as {described}")
        if case.kind == "full":
            read = [first.caches[0].columns(widths) for widths in ([1, 1], [2, 2], [3, 3], [1, 4], [9, 9])]
            first.step([4, 4])
            read += [first.caches[0].columns([width, width]) for width in (1, 6)]
            first.require(len(set(read)) == len(read), f"wider or later forwards are described as {read}")


def _after(layers: Layers, prompt: Sequence[int], most: int) -> list[np.ndarray]:
    """Return what one more token sees behind a prompt that came in pieces of ``most`` tokens."""
    pieces: list[tuple[int, ...]] = []
    start = 0
    while start < len(prompt):
        width = layers.longest(start, min(most, len(prompt) - start))
        pieces.append(tuple(prompt[start : start + width]))
        start += width
    return layers.alone((*pieces, (prompt[0],)))


def _serial(info: LayerInfo) -> Any:
    """Return mlx-lm's cache. None with sinks: its mask of several tokens hides them behind a wrap."""
    if info.kind == "full":
        return KVCache()
    return RotatingKVCache(max_size=info.window) if info.kind == "rotating" and not info.keep else None


def _go_on(case: Case, rows: Rows, widths: Sequence[int]) -> None:
    """Forward rows of one length, beside mlx-lm's cache where there is one."""
    serial = [_serial(bound.info) if case.attends else None for bound in rows.layers.bound]
    for most in widths:
        width = rows.layers.longest(rows.lengths[0], most)
        if case.kind == "recurrent" and not hasattr(rows.caches[0], "parts"):
            rows.begin([width] * rows.count)
            rows.require(rows.caches[0].make_mask(width) is None, "there is a mask where no row is padded")  # type: ignore[attr-defined]
            rows.commit([0] * rows.count)
        if serial[0] is not None:
            _compare_reads(rows, serial, width)
        rows.step([width] * rows.count)


def _compare_reads(rows: Rows, serial: list[Any], width: int) -> None:
    """Forward once more through both, undo it here and keep it there."""
    ids = np.array([rows.new(width) for _ in range(rows.count)])
    rows.fresh -= width * rows.count
    rows.begin([width] * rows.count)
    for toy, cache, other in zip(rows.layers.toys, rows.caches, serial, strict=True):
        mask, wanted = cache.make_mask(width), other.make_mask(width, **MASKS[-1])  # type: ignore[attr-defined]
        rows.require(_same_mask(mask, wanted), f"the mask of {width} is {mask}, mlx-lm's {wanted}")
        for asked in MASKS:
            mask, wanted = (each.make_mask(width, **asked) for each in (cache, other))  # type: ignore[union-attr]
            rows.require(_same_mask(mask, wanted), f"the mask of {width}, {asked}, is {mask}, mlx-lm's {wanted}")
        rows.require(cache.offset == other.offset, f"offset is {cache.offset}, mlx-lm's {other.offset}")  # type: ignore[attr-defined]
        read, expected = (toy.append(each, ids) for each in (cache, other))  # type: ignore[attr-defined]
        for mine, its in zip(read, expected, strict=True):
            rows.require(tuple(mine.shape) == its.shape, f"{tuple(mine.shape)} is read, {its.shape} by mlx-lm")
            rows.require(mine.dtype == its.dtype, f"{mine.dtype} is read where {its.dtype} was given")
            rows.require(isinstance(mine, mx.array | KeyValues), f"{type(mine).__name__} is no array and no KeyValues")
            if isinstance(mine, mx.array):
                off = (np.abs(number(mine) - number(its)) / (1 + np.abs(number(its)))).max()
                rows.require(off <= rows.layers.tolerance, f"columns are off by {off:.3g} from those of mlx-lm")
    rows.commit([0] * rows.count)


def _same_mask(one: Any, other: Any) -> bool:
    if isinstance(one, mx.array) and isinstance(other, mx.array):
        other = other.reshape(-1, other.shape[-1])  # a ring's mask of one token is a line
        return one.shape[-2:] == other.shape and bool(mx.all(one == other))
    return type(one) is type(other) and one == other


def _listed(offset: Any, rows: int) -> list[int]:
    listed: Any = offset.tolist() if isinstance(offset, mx.array) else [offset] * rows
    return list(listed)
