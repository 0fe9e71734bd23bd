"""Clauses on room: what a cache will take is known before it grows there, and what was reserved suffices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oarlock.core.testing.layouts.cases import Case
from oarlock.core.testing.layouts.forwards import DRAFT
from oarlock.core.testing.layouts.rows import Layers, Rows
from oarlock.core.testing.layouts.storage import LENGTHS, enter_unchecked, forward_unchecked, peak
from oarlock.core.testing.memory import SMALL

CHUNK = 150
"""The widest append of a row that grows."""
LOOSE = 16
"""How many times what its rows take at their longest a cache may come to on the way, and nobody would believe more."""
GROWN = (1300, 20, 300, 9, 40)
RESERVED = (310, 40, 12, 270, 5)


class Room:
    """Part of `LayoutContract`."""

    @pytest.mark.parametrize("window", [1, DRAFT])
    def test_growth_was_projected(self, case: Case, window: int) -> None:
        """Joins one by one, single tokens, chunks and leaves on the way: bytes are never over what was said before."""
        rows = case.layers(large=True).open(window=window)
        said = [cache.projected(GROWN) for cache in rows.caches]
        self._at_most(rows, said)
        for target in GROWN:
            enter_unchecked(rows, target // 3)
            self._at_most(rows, said)
            forward_unchecked(rows, [1] * rows.count)
            if rows.count in (3, 4):
                self._leaves_and_comes_back(rows, said, rows.count - 2)
            again = [cache.projected(GROWN) for cache in rows.caches]
            for bound, most in zip(rows.layers.bound, again, strict=True):
                sane = LOOSE * len(GROWN) * bound.layout.bytes_at(bound.info, bound.options, max(GROWN))
                rows.require(most <= sane, f"projected({GROWN}) is {most}, beyond all that such rows could take")
            _grow(rows, [min(target, n + 2) for n, target in zip(rows.lengths, GROWN, strict=False)])
            self._at_most(rows, said)
            self._at_most(rows, again)
        for target in (600, 950, GROWN[0]):
            _grow(rows, [target, *GROWN[1:]])
            self._at_most(rows, said)
        for cache in rows.caches:
            least = cache.projected(GROWN, exact=True)
            rows.require(cache.nbytes >= least, f"{GROWN} should take {least} bytes at least, there are {cache.nbytes}")

    def test_room_that_rows_left_is_projected(self, case: Case) -> None:
        """Rows of one length leave but one: as long as their room is there it counts, also while the last one grows."""
        rows = case.layers(large=True).open()
        for _ in range(6):
            enter_unchecked(rows, 9)
        forward_unchecked(rows, [1] * 6)
        rows.keep([3])
        said = [cache.projected([300]) for cache in rows.caches]
        self._at_most(rows, said)
        _grow(rows, [300])
        self._at_most(rows, said)

    @staticmethod
    def _at_most(rows: Rows, said: Sequence[int]) -> None:
        """Compare with what was said, and ask anew, of what there is."""
        for cache, most in zip(rows.caches, said, strict=True):
            rows.require(cache.nbytes <= most, f"rows of {rows.lengths} have {cache.nbytes} bytes, {most} were said")
            now = cache.projected(rows.lengths)
            rows.require(cache.nbytes <= now, f"projected({rows.lengths}) is {now}, there are {cache.nbytes} bytes")

    def _leaves_and_comes_back(self, rows: Rows, said: Sequence[int], row: int) -> None:
        length, last = rows.lengths[row], rows.count - 1
        rows.keep([*range(row), *range(row + 1, rows.count)])
        self._at_most(rows, said)
        enter_unchecked(rows, length)
        rows.keep([*range(row), last, *range(row, last)])
        self._at_most(rows, said)

    @pytest.mark.parametrize("fresh", [False, True], ids=["", "fresh"])
    @pytest.mark.parametrize("window", [1, DRAFT])
    def test_reserved_room_suffices(self, case: Case, window: int, fresh: bool) -> None:
        """Given at once where rows are, given back where none are: joins and appends up to there take nothing more."""
        rows = case.layers(large=True).open(slots=2, window=window)
        if not fresh:
            for length in (30, 7, 600, 8):
                enter_unchecked(rows, length)
            rows.keep([0, 1])
            self._reserve(rows, RESERVED[:2])
            rows.check()
        reserved = self._reserve(rows, RESERVED)
        for target in RESERVED[rows.count :]:
            enter_unchecked(rows, max(4, target // 2))
            self._suffices(rows, reserved)
        for part in (0.6, 0.8):
            _grow(rows, [max(n, int(part * target)) for n, target in zip(rows.lengths, RESERVED, strict=True)])
            self._suffices(rows, reserved)
        _grow(rows, [target - 1 for target in RESERVED])
        rows.step([1] * rows.count)
        self._suffices(rows, reserved)
        stays = not rows.layers.stops and case.kind != "chunked" and not hasattr(rows.caches[0], "parts")
        got = [cache.nbytes for cache in rows.caches]
        rows.require(not stays or got == reserved, f"{reserved} bytes were reserved, rows that fill them have {got}")

    @staticmethod
    def _reserve(rows: Rows, tokens: Sequence[int]) -> list[int]:
        """Reserve and return the bytes projected, and once more, which takes nothing; where all rows are there the bytes are at once what is said."""
        rows.log.append(f"reserve({list(tokens)})")
        reserved = [cache.projected(tokens, exact=True) for cache in rows.caches]
        for cache, said in zip(rows.caches, reserved, strict=True):
            cache.reserve(tokens)
            right = cache.nbytes == said if len(tokens) == rows.count else cache.nbytes <= said
            rows.require(right, f"reserve({list(tokens)}) left {cache.nbytes} bytes, projected were {said}")

        def again() -> None:
            for cache in rows.caches:
                cache.reserve(tokens)

        rows.evaluate()
        taken = peak(rows, again)
        rows.require(taken <= SMALL, f"a second reserve took {taken} bytes")
        return reserved

    @staticmethod
    def _suffices(rows: Rows, reserved: Sequence[int]) -> None:
        """Rows kept apart change caches on their way, so nothing can be reserved for where they will be."""
        for cache, most in [] if hasattr(rows.caches[0], "parts") else zip(rows.caches, reserved, strict=True):
            rows.require(
                cache.nbytes <= most, f"rows of {rows.lengths} have {cache.nbytes} bytes, {most} were reserved"
            )

    def test_compacted_is_reserved_for_what_there_is(self, case: Case) -> None:
        """`compact` leaves what `projected` says of the rows' own tokens; less cannot be asked for."""
        rows = case.layers(large=True).open(slots=4)
        for length in (300, 40, 600):
            enter_unchecked(rows, length)
        rows.keep([0, 1])
        for cache in rows.caches:
            for tokens in ([300], [300, 39], [299, 40, 7]):
                with pytest.raises(ValueError, match="300"):
                    cache.reserve(tokens)
        rows.compact()
        for cache in rows.caches:
            said = cache.projected(rows.lengths, exact=True)
            rows.require(cache.nbytes == said, f"compact left {cache.nbytes} bytes, projected were {said}")
        rows.step([1, 1])

    @pytest.mark.parametrize("length", [0, 40, 257])
    def test_a_row_that_comes_back_is_projected(self, case: Case, length: int) -> None:
        """Restored, it knows its own bytes and what it will take: no less than there is, no more than a new row beside."""
        rows = case.layers(large=True).open()
        rows.enter(length)
        back = rows.restored(rows.states(0), list(rows.pieces[0]))
        said = [cache.projected([400]) for cache in back.caches]
        for cache, new, most in zip(back.caches, rows.layers.open().caches, said, strict=True):
            beside = cache.nbytes + new.projected([400])
            rows.require(
                most <= beside, f"a row of {length} tokens that comes back is to take {most} bytes, not {beside}"
            )
        self._at_most(back, said)
        if length:
            _grow(back, [400])
            self._at_most(back, said)

    @pytest.mark.parametrize("sizes", [(48, 64), (64, 80), (32, 96)], ids=str)
    def test_heads_of_any_size_are_refused_or_held(self, case: Case, sizes: tuple[int, int]) -> None:
        """Keys and values of other sizes: a reason in one line at bind, or rows of the bytes that are said."""
        if case.attends:
            _held(case.by(case.subject.options, key_dim=sizes[0], value_dim=sizes[1]))

    def test_windows_without_room_are_refused(self, case: Case) -> None:
        """Sinks that leave no column for the newest token, or fewer than none: a reason in one line at bind."""
        for keep in (case.window, case.window + 1, -1) if case.kind == "rotating" else ():
            if case.by(case.subject.options, keep=keep) is not None:
                msg = f"a window of {case.window} with {keep} sinks is taken"
                raise AssertionError(msg)

    def test_allowed_options_are_refused_or_held(self, case: Case) -> None:
        """What an option's check lets pass can be bound, or is refused in one line for these layers."""
        for options in case.allowed():
            _held(case.by(options))

    def test_a_row_to_come_is_projected(self, case: Case) -> None:
        """Of caches without rows: exactly what `bytes_at` says, more only where a row is stored in two ways on its way."""
        rows = case.layers().open()
        for bound, cache in zip(rows.layers.bound, rows.caches, strict=True):
            for length in (*LENGTHS, GROWN[0], *rows.layers.stops):
                said, exact = (
                    bound.layout.bytes_at(bound.info, bound.options, length),
                    cache.projected([length], exact=True),
                )
                plain = not rows.layers.stops or length <= rows.layers.stops[0]
                rows.require(
                    exact == said if plain else exact >= said, f"bytes_at({length}) is {said}, projected {exact}"
                )
                rows.require(cache.projected([length]) >= exact, "less is projected at most than exactly")


def _held(layers: Layers | None) -> None:
    """Let a row stay of two that joined: it has the bytes that are said."""
    if layers is None:
        return
    rows = layers.open()
    for length in (3, 40):
        enter_unchecked(rows, length)
    rows.keep([1])
    rows.compact()
    for bound, cache in zip(layers.bound, rows.caches, strict=True):
        said = bound.layout.bytes_at(bound.info, bound.options, 40)
        rows.require(cache.nbytes == said, f"by {bound.options} bytes_at(40) is {said}, there are {cache.nbytes}")


def _grow(rows: Rows, targets: Sequence[int]) -> None:
    """Append to one row after the other, the longest last: no window reaches past it."""
    for row in sorted(range(rows.count), key=targets.__getitem__):
        while (left := targets[row] - rows.lengths[row]) > 0:
            width = rows.layers.longest(rows.lengths[row], min(left, CHUNK, max(targets) - max(rows.lengths) or left))
            forward_unchecked(rows, [width if place == row else 0 for place in range(rows.count)])
