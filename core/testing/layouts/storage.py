"""Clauses on what is stored: rows are copied out and come back, bytes are counted, given back and not copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.layout import RowState
from oarlock.core.testing.layouts.cases import Case
from oarlock.core.testing.layouts.rows import Rows, through_file
from oarlock.core.testing.layouts.toys import Attention
from oarlock.core.testing.memory import SMALL, active_bytes, peak_bytes

LENGTHS = (0, 1, 17, 256, 257)
LONG = 400


class Storage:
    """Part of `LayoutContract`."""

    def test_a_stored_row_is_owned(self, case: Case) -> None:
        """Its bytes stay as they are while its batch decodes, grows, gains and loses rows, and is gone."""
        rows = case.layers().open()
        rows.enter(5, 14)
        stored = [state for row in range(2) for state in rows.states(row)]
        before = [_bytes(state) for state in stored]
        for step in range(2 * case.window):
            rows.step([1] * rows.count)
            if step % 5 == 1:
                rows.enter(step * 20)
            if step % 5 == 3:
                rows.keep([rows.count - 1, *range(1, rows.count - 1)])
        rows.keep([])
        rows.compact()
        rows.require([_bytes(state) for state in stored] == before, "a stored row's bytes changed")

    def test_a_stored_row_says_what_it_is(self, case: Case) -> None:
        """The name it is restored by, its tokens, and texts beside the arrays; of a row's own bytes and no more."""
        rows = case.layers().open()
        rows.enter(5, 40, 0)
        for row, tokens in enumerate(rows.lengths):
            for bound, state in zip(rows.layers.bound, rows.states(row), strict=True):
                rows.require((state.layout, state.tokens) == (bound.layout.name, tokens), f"it says {state}")
                rows.require(
                    all(isinstance(text, str) for text in state.meta().values()), "meta() has other than texts"
                )
                most = bound.layout.bytes_at(bound.info, bound.options, tokens)
                rows.require(state.nbytes <= most, f"a row of {tokens} tokens is stored in {state.nbytes} bytes")

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_restored_row_goes_on(self, case: Case, length: int) -> None:
        """Twice at once, each its own way, in company too; the state stays what it was."""
        rows = case.layers().open()
        rows.enter(length, 3)
        rows.step([1, 1])
        pieces, states = list(rows.pieces[0]), rows.states(0)
        before = [_bytes(state) for state in states]
        first, second = rows.restored(states, pieces), rows.restored(states, pieces)
        for bound, cache in zip(rows.layers.bound, first.caches, strict=True):
            said = [bound.layout.bytes_at(bound.info, bound.options, cache.tokens[0] + more) for more in (0, 1)]
            rows.require(cache.nbytes <= 2 * max(said), f"a restored row has {cache.nbytes} bytes, {said} were said")
        for width in (3, *[1] * (case.window + 1)):
            first.step([width])
            second.step([1])
        rows.join(rows.restored(states, pieces))
        for _ in range(3):
            rows.step([1, 1, 1])
        rows.require([_bytes(state) for state in states] == before, "a restored state's bytes changed")

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_stored_row_survives_a_file(self, case: Case, length: int, tmp_path: Path) -> None:
        """Arrays and texts are all there is: what safetensors keep is enough, once the caches are gone."""
        rows = case.layers().open()
        rows.enter(length, 3)
        rows.step([1, 2])
        pieces, states = list(rows.pieces[0]), rows.states(0)
        back = rows.restored([through_file(state, tmp_path) for state in states], pieces)
        back.step([2])
        rows.join(back)
        for _ in range(case.window):
            rows.step([1, 1, 1])

    @pytest.mark.parametrize("large", [False, True], ids=["", "large"])
    @pytest.mark.parametrize("length", [3, 9, 256, 257, 600])
    def test_bytes_are_what_was_said(self, case: Case, length: int, large: bool) -> None:
        """`bytes_at` is what a lone row's arrays come to; what tokens need is no more."""
        if large and case.kind != "rotating":
            return
        rows = case.layers(large=large).open()
        rows.enter(length)
        for cache in rows.caches:
            arrays = sum(int(array.nbytes) for array in cache.arrays())
            rows.require(cache.nbytes == arrays, f"nbytes is {cache.nbytes}, its arrays have {arrays}")
            live = cache.live_bytes
            rows.require(0 < live <= cache.nbytes, f"live_bytes is {live} of {cache.nbytes}")
        rows.compact()
        for bound, cache in zip(rows.layers.bound, rows.caches, strict=True):
            said = bound.layout.bytes_at(bound.info, bound.options, length)
            rows.require(cache.nbytes == said, f"bytes_at({length}) is {said}, a lone row has {cache.nbytes}")
        lone = case.layers().open()
        lone.add(1)
        while lone.lengths[0] < length:
            forward_unchecked(lone, [lone.layers.longest(lone.lengths[0], length - lone.lengths[0])])
        for bound, cache in zip(lone.layers.bound, lone.caches, strict=True):
            said = bound.layout.bytes_at(bound.info, bound.options, length)
            fits = cache.nbytes < 2 * said or case.kind == "chunked"  # which keeps a prompt until a block is over
            lone.require(fits, f"bytes_at({length}) is {said}, {cache.nbytes} were allocated")

    def test_bytes_change_behind_a_stop(self, case: Case) -> None:
        """A row that stands where its storage is to change has the bytes of before, and with one more token those after."""
        for length in (n for stop in case.layers().stops for n in (stop, stop + 1)):
            rows = case.layers().open()
            enter_unchecked(rows, length)
            rows.compact()
            for bound, cache in zip(rows.layers.bound, rows.caches, strict=True):
                said = bound.layout.bytes_at(bound.info, bound.options, length)
                rows.require(cache.nbytes == said, f"bytes_at({length}) is {said}, a lone row has {cache.nbytes}")

    def test_the_device_counts_the_same_bytes(self, case: Case) -> None:
        """What was said of a row is within a tenth of what the device has more for it."""
        layers = case.layers()
        before = active_bytes()
        rows = layers.open()
        enter_unchecked(rows, LONG)
        rows.evaluate()
        rows.compact()
        more = active_bytes() - before
        said = sum(b.layout.bytes_at(b.info, b.options, LONG) for b in layers.bound)
        rows.require(abs(more - said) <= max(said // 10, SMALL), f"bytes_at({LONG}) is {said}, the device has {more}")

    def test_bytes_of_tokens_add_up(self, case: Case) -> None:
        """Rows of one length need the same; a row without tokens needs none, where rows begin at columns of their own."""
        one, two = case.layers().open(), case.layers().open()
        one.enter(9)
        two.enter(9, 9)
        if case.kind != "chunked":
            two.add(1)
        for lone, both in zip(one.caches, two.caches, strict=True):
            live = (lone.live_bytes, both.live_bytes)
            one.require(live[1] == 2 * live[0], f"live_bytes of a row are {live[0]}, of two such {live[1]}")

    def test_what_is_not_needed_is_given_back(self, case: Case) -> None:
        """Compacted, few short rows have no more than they had alone; without rows nothing is left."""
        rows = case.layers(large=True).open(slots=4)
        rows.enter(600, 3, 7, 5)
        rows.keep([1, 2])
        rows.step([1, 1])
        rows.compact()
        for bound, cache in zip(rows.layers.bound, rows.caches, strict=True):
            most = 2 * max(bound.layout.bytes_at(bound.info, bound.options, n) for n in (4, 8))
            rows.require(cache.nbytes <= most, f"two rows of 4 and 8 tokens have {cache.nbytes} bytes, not {most}")
            rows.require(cache.live_bytes <= cache.nbytes, "more bytes are live than there are")
        for _ in range(3):
            rows.step([1, 1])
        rows.keep([0])
        rows.compact()
        for bound, cache in zip(rows.layers.bound, rows.caches, strict=True):
            most = bound.layout.bytes_at(bound.info, bound.options, 7)
            rows.require(cache.nbytes <= most, f"a row of 7 tokens has {cache.nbytes} bytes, not {most}")
        rows.enter(5)
        rows.enter(700, 2)
        rows.step([1] * 4)
        rows.keep([])
        rows.compact()
        for cache in rows.caches:
            rows.require((cache.nbytes, cache.live_bytes, cache.arrays()) == (0, 0, []), "bytes are left without rows")
        rows.enter(4)
        rows.step([1])

    def test_everything_is_released(self, case: Case) -> None:
        """When the caches and what was stored of them are gone, so are their bytes."""

        def live() -> None:
            rows = case.layers().open(slots=2)
            rows.enter(300, 20, 5)
            states = rows.states(0)
            rows.join(rows.restored(states, list(rows.pieces[0])))
            rows.keep([3, 1])
            rows.step([1, 1])

        live()
        before = active_bytes()
        live()
        left = active_bytes() - before
        assert left <= SMALL, f"{left} bytes are left of caches that are gone"

    def test_growth_is_amortised(self, case: Case) -> None:
        """Rows that join one by one make the cache grow now and then, by a share of what it is, not each time."""
        rows = case.layers().open()
        rows.enter(2)
        taken = _grown_by_joins(rows, 40)
        whole = sum(cache.nbytes for cache in rows.caches)
        rows.require(taken <= max(4 * whole, 40 * SMALL), f"40 joins took {taken} bytes for {whole} in the end")

    @pytest.mark.parametrize("change", ["step", "join", "leave", "cut", "undo"])
    def test_no_change_copies_all_rows(self, case: Case, change: str) -> None:
        """A step writes, a join adds, a leave moves, a rollback forgets: none takes memory like one plane of a layer."""
        rows = case.layers(large=True).open(slots=8, window=5)
        for _ in range(6):
            enter_unchecked(rows, LONG)
        forward_unchecked(rows, [1] * 6)
        joiner = rows.layers.open(window=5)
        enter_unchecked(joiner, LONG + 1)
        rows.evaluate()
        joiner.evaluate()
        work: dict[str, Callable[[], None]] = {
            "step": lambda: _append(rows, 1, [1] * 6),
            "join": lambda: rows.join(joiner),
            "leave": lambda: rows.keep([0, 5, 2, 3, 4]),
            "cut": lambda: _append(rows, 5, [5, 0] * 3),
            "undo": lambda: _append(rows, 5, [0] * 6),
        }
        whole = sum(cache.nbytes for cache in rows.caches)
        most = peak(rows, work[change])
        rows.require(most <= max(whole // 5, SMALL), f"{change} took {most} bytes beside the {whole} of all rows")


def _grown_by_joins(rows: Rows, count: int) -> int:
    """Let so many short rows join one after the other; return the bytes that all the joins took together."""
    taken = 0
    for _ in range(count):
        joiner = rows.layers.open()
        enter_unchecked(joiner, 2)
        joiner.evaluate()
        taken += peak(rows, functools.partial(rows.join, joiner))
    return taken


def _bytes(state: RowState) -> dict[str, bytes]:
    return {name: np.array(array.view(mx.uint8)).tobytes() for name, array in state.arrays().items()}


def enter_unchecked(rows: Rows, length: int) -> None:
    """Let a row join that was prefilled alone, and look at nothing that it saw."""
    alone = rows.layers.open(window=rows.window)
    alone.add(1)
    while alone.lengths[0] < length:
        forward_unchecked(alone, [rows.layers.longest(alone.lengths[0], length - alone.lengths[0])])
    rows.join(alone)


def forward_unchecked(rows: Rows, widths: list[int]) -> None:
    """Forward so many fresh tokens of each row and keep them, unseen."""
    new = [rows.new(width) for width in widths]
    rows.forward(new)
    rows.commit(widths)
    for pieces, fresh in zip(rows.pieces, new, strict=True):
        if fresh:
            pieces.append(tuple(fresh))


def _append(rows: Rows, width: int, kept: list[int]) -> None:
    """Write a window, layer by layer; attention does not read it where it need not, since reading may copy."""
    new = [rows.new(width) for _ in kept]
    if all(isinstance(toy, Attention) for toy in rows.layers.toys) and not hasattr(rows.caches[0], "parts"):
        rows.begin([width] * rows.count)
        for toy, cache in zip(rows.layers.toys, rows.caches, strict=True):
            toy.mask(cache, width)
            toy.append(cache, np.array(new))  # type: ignore[attr-defined]
            mx.eval(cache.arrays())  # what one layer computes on the way is not counted beside another's
    else:
        rows.forward(new)
    rows.commit([n if rows.cuts or n == width else 0 for n in kept])


def peak(rows: Rows, work: Callable[[], None]) -> int:
    """Return the bytes that ``work`` needs, what must be evaluated at a boundary included."""

    def evaluated() -> None:
        work()
        rows.evaluate()

    return peak_bytes(evaluated)
