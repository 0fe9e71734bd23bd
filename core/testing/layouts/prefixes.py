"""Clauses on prefixes: which of them a row can be cut to, and that it is then a row of that length."""

from __future__ import annotations

import pytest

from oarlock.core.testing.layouts.cases import Case


class Prefixes:
    """Part of `LayoutContract`."""

    def test_what_can_be_reused_is_a_prefix(self, case: Case) -> None:
        """At most what is asked for and held, no longer for less, all of it for all; the same asked again.

        A layer that forgets can go back no further than what it still holds.
        """
        rows, one = case.layers().open(), case.layers().open()
        rows.enter(30)
        one.enter(1)
        for cache in rows.caches:
            found = [cache.reusable(tokens) for tokens in range(40)]
            within = all(0 <= n <= min(tokens, 30) for tokens, n in enumerate(found))
            rows.require(within, f"reusable(0..39) of 30 tokens are {found}")
            rows.require(found == sorted(found) and set(found[30:]) == {30}, f"reusable(0..39) are {found}")
            rows.require(all(cache.reusable(n) == n for n in found), f"reusable(0..39) are {found}")
            if case.kind in ("rotating", "chunked"):
                back, held = len({*found} - {0}), cache.live_bytes // one.caches[0].live_bytes
                rows.require(back <= held + 1, f"{back} prefixes can be reused, of tokens there are {held}")

    @pytest.mark.parametrize("length", [4, 13, 30])
    def test_a_prefix_that_is_reused_goes_on(self, case: Case, length: int) -> None:
        """Cut to whatever length they can be, rows are of that length: that ran, that were stored, that never moved."""
        layers = case.layers()
        for tokens in sorted({*range(1, length, 4), *range(length - 1, length + 3)}):
            rows = layers.open(window=3)
            rows.enter(length, length + 2, pieces=13)
            rows.step([3, 3], [2, 1] if rows.cuts else [3, 3])
            back, stays = rows.restored(rows.states(0), rows.pieces[0]), layers.open()
            stays.add(1)
            for _ in range(length):
                stays.step([1])
            for cut in (each for each in (rows, back, stays) if each.reusable(tokens)):
                cut.cut(tokens)
                for width in (1, 4, *[1] * case.window):
                    cut.step([width] * cut.count)
            rows.join(back)
            rows.step([2, 1, 1])

    def test_what_cannot_be_reused_is_refused(self, case: Case) -> None:
        """A length that `reusable` did not name, and none, is an error that changes nothing; without rows, any is."""
        rows = case.layers().open()
        with pytest.raises(ValueError, match="cut"):
            rows.caches[0].cut(1)
        rows.enter(30)
        for cache in rows.caches:
            for tokens in (0, -1, 31, *(n for n in range(1, 30) if cache.reusable(n) != n)):
                with pytest.raises(ValueError, match="cut"):
                    cache.cut(tokens)
        rows.step([1])
