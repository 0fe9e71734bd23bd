"""Clauses on rows: they join, leave, move and are copied, and never see what another row left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from oarlock.core.testing.layouts.cases import Case
from oarlock.core.testing.layouts.forwards import DRAFT
from oarlock.core.testing.layouts.rows import Rows
from oarlock.core.testing.layouts.storage import enter_unchecked, forward_unchecked
from oarlock.core.testing.layouts.toys import KEY, KV_HEADS

ORDERS: Sequence[Sequence[int]] = (
    [0, 1, 2, 3, 4],
    [],
    [4],
    [4, 3, 2, 1, 0],
    [1, 2, 3, 4],
    [0, 4, 2],
    [2, 0, 1],
    [3, 1],
    [1, 0, 4, 3],
)


class Membership:
    """Part of `LayoutContract`."""

    @pytest.mark.parametrize("first", [(), (0, 0, 0), (4, 12)])
    @pytest.mark.parametrize("second", [(0,), (0, 0, 0), (3, 15), (300,)])
    def test_rows_join(self, case: Case, first: tuple[int, ...], second: tuple[int, ...]) -> None:
        """Empty rows, filled ones and long ones, either way round; then a padded window and steps."""
        rows = case.layers().open()
        rows.enter(*first)
        rows.enter(*second, pieces=2)
        rows.check()
        rows.step([1 + i % 3 for i in range(rows.count)])
        for _ in range(3):
            rows.step([1] * rows.count)

    def test_rows_join_together(self, case: Case) -> None:
        """Several at once, from caches in which they stood side by side, opened to be cut; each goes on at its place."""
        rows, others = case.layers().open(slots=2), None
        rows.enter(20)
        others = rows.layers.open(window=DRAFT)
        others.fresh = rows.fresh
        others.enter(5, 0, 17)
        others.step([2, 1, 3])
        rows.fresh = others.fresh
        rows.join(others)
        for _ in range(case.window + 2):
            rows.step([1] * rows.count)

    def test_what_joined_was_borrowed(self, case: Case) -> None:
        """Both go on, and neither sees the other's tokens."""
        rows = case.layers().open()
        rows.enter(4)
        others = rows.layers.open()
        others.fresh = rows.fresh
        others.enter(3, 5)
        rows.join(others)
        for _ in range(3):
            rows.step([1, 1, 1])
            others.step([2, 2])
        rows.check()
        others.check()

    def test_a_join_that_cannot_be_changes_nothing(self, case: Case) -> None:
        """Slots that are taken or leave a hole, a stranger, another geometry: ValueError or TypeError, and all goes on."""
        rows = case.layers().open()
        rows.enter(4, 2)
        other = rows.layers.open()
        other.enter(3)
        for slots in ([0], [3], [2, 3], []):
            self._refused(rows, other.caches[0], slots)
        self._refused(rows, object(), [2])
        strange: list[dict[str, Any]] = []
        if case.attends:
            strange = [{"kv_heads": 2 * KV_HEADS}, {"kv_heads": 1}, {"value_dim": KEY}, {"dtype": mx.float16}]
        if case.attends and case.kind == "rotating":
            strange += [{"window": case.window + 1}, {"keep": 1}]
        if case.kind == "composite":
            *first, last = case.changes["parts"]
            strange += [{"parts": (*first, kind)} for kind in ("full", "rotating") if kind != last]
        if case.kind == "recurrent":
            for states in (1, 3):
                stranger = case.layers(slots=states).open()
                stranger.add(1)
                self._refused(rows, stranger.caches[0], [2])
        for layers in case.others() if case.attends else []:
            stranger = layers.open()
            stranger.add(1)
            self._refused(rows, stranger.caches[0], [2])
        for changes in strange:
            stranger = case.layers(**changes).open()
            stranger.enter(3)
            self._refused(rows, stranger.caches[0], [2])
        rows.enter(1)
        rows.step([1, 1, 1])

    @staticmethod
    def _refused(rows: Rows, other: Any, slots: list[int]) -> None:
        with pytest.raises((ValueError, TypeError)):
            rows.caches[0].join(other, slots)
        rows.log.append(f"a join into {slots} was refused")
        rows.check()

    def test_rows_of_other_options_are_refused_or_stored_as_here(self, case: Case) -> None:
        """The layout's options and its default ones, either way round: ValueError or TypeError, or the bytes of here."""
        mine, default = case.layers(), case.by({}) if case.subject.options else None
        for here, there in ((mine, default), (default, mine)) if default else ():
            for length in (3, 40):
                rows, other = here.open(), there.open()
                enter_unchecked(other, length)  # what is exact enough is said of the layout's own options
                try:
                    rows.join(other)
                except (ValueError, TypeError):
                    rows.check_counts()
                    continue
                rows.compact()
                for bound, cache in zip(here.bound, rows.caches, strict=True):
                    said = bound.layout.bytes_at(bound.info, bound.options, length)
                    rows.require(cache.nbytes == said, f"a row of other options has {cache.nbytes} bytes, not {said}")

    @pytest.mark.parametrize("indices", ORDERS, ids=lambda indices: "".join(map(str, indices)) or "none")
    def test_rows_are_kept_in_any_order(self, case: Case, indices: list[int]) -> None:
        """Whatever order is asked for; they go on, and others join."""
        rows = case.layers().open(window=DRAFT)
        rows.enter(12, 3, 9, 1, 0)
        rows.step([1] * 5)
        rows.keep(indices)
        rows.check()
        if indices:
            rows.step([1] * len(indices))
            rows.step([3] * len(indices), [3 * (i % 2) for i in range(len(indices))])
        rows.enter(2)
        for _ in range(case.window):
            rows.step([1] * rows.count)

    @pytest.mark.parametrize("indices", [[9, 1], [1, 7, 13], [13, 7, 1], [4, 7, 6]], ids=str)
    def test_what_rows_of_one_length_left_is_not_read(self, case: Case, indices: list[int]) -> None:
        """They stand side by side in no more room than they need; those that stay have others' room between them."""
        rows = case.layers().open()
        rows.add(14)
        while (done := rows.lengths[0]) < 40:
            forward_unchecked(rows, [rows.layers.longest(done, 40 - done)] * 14)
        rows.compact()
        rows.keep(indices)
        rows.check()
        rows.step([1] * len(indices))

    def test_rows_leave_before_their_first_token(self, case: Case) -> None:
        """Filtered right after they were made, then prefilled."""
        rows = case.layers().open()
        rows.add(3)
        rows.keep([2, 0])
        rows.check_counts()
        rows.step([3, 5])
        rows.keep([1])
        rows.add(1)
        rows.keep([1, 0])
        rows.step([2, 2])
        rows.check()

    def test_all_rows_taken_in_order_are_the_same_cache(self, case: Case) -> None:
        """Adopting is an assignment."""
        rows = case.layers().open()
        rows.enter(4, 2)
        rows.require(all(cache.take([0, 1]) is cache for cache in rows.caches), "take([0, 1]) of two rows is a copy")

    @pytest.mark.parametrize("indices", [[1], [1, 0], [2, 0], [3], [], [0, 1, 2]], ids=str)
    def test_taken_rows_are_caches_of_their_own(self, case: Case, indices: list[int]) -> None:
        """Both sides go on, each with its own tokens."""
        rows = case.layers().open()
        rows.enter(14, 2, 14, 0)
        rows.step([1] * 4)
        part = rows.take(indices)
        part.check()
        for _ in range(case.window):
            if indices:
                part.step([2] * len(indices))
            rows.step([1] * 4)
        part.check()

    @pytest.mark.parametrize("broken", [0, 1, 2])
    def test_what_a_broken_row_left_is_never_seen(self, case: Case, broken: int) -> None:
        """A row of NaN is rejected: neither those that stay, nor those that move or join into its place, mind it."""
        rows = case.layers().open(slots=4)
        rows.enter(20, 3, 9)
        rows.add(1)
        rows.poison(broken)
        rows.keep([row for row in (3, 2, 1, 0) if row != broken])
        rows.check()
        rows.enter(2)
        rows.add(1)
        rows.step([1, 1, 1, 1, 2])
        for _ in range(2 * case.window):
            rows.step([1] * 5)

    def test_the_last_row_may_have_been_the_broken_one(self, case: Case) -> None:
        """Nobody is left; who comes next starts clean."""
        rows = case.layers().open(slots=2)
        rows.enter(20)
        rows.poison(0)
        rows.keep([])
        rows.enter(3, 1)
        rows.step([2, 1])
        rows.step([1, 1])
