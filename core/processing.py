"""Processors for the rows of a group: who asks for which, the unread history, and blame for one that raises.

What becomes of the scores is the processors' business. Where no row asks for one, scores pass through untouched.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import attrs
import mlx.core as mx

from oarlock.core.contracts.sampler import Drafted, ProcessedRow, Processor, ProcessorRows
from oarlock.core.lines import Lines
from oarlock.core.row import Row

Errors = list[BaseException | None]


def in_order(processors: Iterable[Processor]) -> tuple[Processor, ...]:
    """Order processors by name: what rows get does not depend on what was installed first."""
    return tuple(sorted(processors, key=operator.attrgetter("name")))


def same(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Return whether these are the same rows in the same order."""
    return len(rows) == len(others) and all(map(operator.is_, rows, others))


def seen_by_processors(row: Row) -> ProcessedRow:
    """Return what processors learn of a row."""
    return ProcessedRow(
        params=row.request.sampling,
        prompt=row.prompt_ids,
        generated=row.token_ids,
        stop_ids=row.stop_ids,
        min_tokens=row.request.min_tokens,
    )


@attrs.define(eq=False)
class _Opened:
    """A processor opened for some rows of the group: its row i is the group's row ``places[i]``."""

    rows: ProcessorRows
    places: list[int]

    def lines(self, of: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return which lines are its own, where line i is the group's row ``of[i]``, and its row of each."""
        mine = {place: own for own, place in enumerate(self.places)}
        lines = [line for line, place in enumerate(of) if place in mine]
        return lines, [mine[of[line]] for line in lines]

    def apply(self, logits: mx.array, errors: Errors, of: Sequence[int], drafted: Drafted | None) -> mx.array:
        """Rewrite its own lines all at once; if that raises, row by row."""
        lines, own = self.lines(of)
        try:
            return self._rewritten(logits, lines, own, drafted)
        except Exception:  # noqa: BLE001 - the row by row repetition finds whose it is
            for row, place in enumerate(self.places):
                one = [line for line, whose in zip(lines, own, strict=True) if whose == row]
                try:
                    logits = self._rewritten(logits, one, [row] * len(one), drafted)
                except Exception as error:  # noqa: BLE001 - rejected with it, alone
                    errors[place] = errors[place] or error
            return logits

    def _rewritten(self, logits: mx.array, lines: list[int], own: list[int], drafted: Drafted | None) -> mx.array:
        """Return ``logits`` with these lines, of the rows ``own``, rewritten, in its dtype: company must not change it."""
        if not lines:
            return logits
        each = drafted is None and own == list(range(len(self.places)))
        rows = None if each else mx.array(own, dtype=mx.int32)
        if len(lines) == logits.shape[0]:
            return self.rows.apply(logits, rows, drafted).astype(logits.dtype)
        at = mx.array(lines, dtype=mx.int32)
        if drafted is not None:
            drafted = Drafted(drafted.tokens[at], [drafted.counts[line] for line in lines])
        scores = self.rows.apply(logits[at], rows, drafted).astype(logits.dtype)
        of = {line: place for place, line in enumerate(lines)}
        every = range(logits.shape[0])
        mine = mx.array([[line in of] for line in every])  # (R, 1)
        return mx.where(
            mine, scores[mx.array([of.get(line, 0) for line in every])], logits
        )  # a scatter takes far longer

    def push(self, tokens: mx.array, counts: Sequence[int], errors: Errors) -> None:
        """Append to the histories of its own rows all at once; if that raises, row by row."""
        if self.places != list(range(tokens.shape[0])):
            tokens = tokens[mx.array(self.places, dtype=mx.int32)]
        own = [counts[place] for place in self.places]
        try:
            self.rows.push(tokens, own)
        except Exception:  # noqa: BLE001 - the row by row repetition finds whose it is
            for row, place in enumerate(self.places):
                try:
                    self.rows.push(tokens, [count * (other == row) for other, count in enumerate(own)])
                except Exception as error:  # noqa: BLE001 - rejected with it, alone
                    errors[place] = errors[place] or error


class ProcessorGroup:
    """The processors opened for the rows of a group; reopened when rows join, kept in lockstep when some leave."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = processors
        self._rows: list[Row] = []
        self._opened: list[_Opened] = []
        self._failed: dict[int, BaseException] = {}

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Open for ``rows`` in this order, unless it is open for them already. Nothing of theirs may be unread."""
        if same(rows, self._rows):
            return
        self._rows, self._opened, self._failed = list(rows), [], {}
        seen = [seen_by_processors(row) for row in rows]
        for processor in self._processors:
            places = [place for place, row in enumerate(seen) if _asks(processor, row)]
            if places:
                self._open(processor, seen, places)

    def _open(self, processor: Processor, seen: Sequence[ProcessedRow], places: list[int]) -> None:
        """Open for several rows at once; if that raises, for each by itself: whoever it raises for fails alone."""
        try:
            self._opened.append(_Opened(processor.open([seen[place] for place in places]), places))
        except Exception as error:  # noqa: BLE001 - a processor may raise anything; it costs the guilty row
            if len(places) == 1:
                self._failed[places[0]] = error
                return
            for place in places:
                self._open(processor, seen, [place])

    def keep(self, rows: Sequence[Row]) -> None:
        """Go on with ``rows``, in this order; what they have unread stays. Rows that joined since are opened later."""
        old = {id(row): place for place, row in enumerate(self._rows)}
        if not all(id(row) in old for row in rows):
            self.set_rows(())
            return
        now = [old[id(row)] for row in rows]
        opened, self._opened, self._rows = self._opened, [], list(rows)
        self._failed = {place: self._failed[was] for place, was in enumerate(now) if was in self._failed}
        for each in opened:
            places, own = each.lines(now)
            if not places:
                continue
            try:
                if own != list(range(len(each.places))):
                    each.rows.keep(own)
            except Exception as error:  # noqa: BLE001 - its rows' histories are lost, and nobody else's
                self._failed |= dict.fromkeys(places, error)
                continue
            self._opened.append(_Opened(each.rows, places))

    @property
    def active(self) -> bool:
        """Whether any row asks for a processor."""
        return bool(self._opened or self._failed)

    def apply(self, logits: mx.array, errors: Errors, lines: Lines | None = None) -> mx.array:
        """Return the scores ``[R, V]`` after all processors; lines of rows for which one raises get its error in ``errors``.

        Without ``lines``, line i is row i.
        """
        if not self.active:
            return logits
        blamed: Errors = [self._failed.get(place) for place in range(len(self._rows))]
        of, drafted = (range(len(self._rows)), None) if lines is None else (lines.whose, lines.drafted)
        for opened in self._opened:
            logits = opened.apply(logits, blamed, of, drafted)
        for line, place in enumerate(of):
            errors[line] = errors[line] or blamed[place]
        return logits

    def push(self, tokens: mx.array, counts: Sequence[int], errors: Errors | None = None) -> None:
        """Append the first ``counts[i]`` tokens of line i, of uint32 ``[B, W]``, to row i; nobody needs to have read them.

        Without ``errors``, the rows for which a processor raises are told of it when scores are next rewritten.
        """
        blamed: Errors = errors if errors is not None else [None] * len(self._rows)
        for opened in self._opened:
            opened.push(tokens, counts, blamed)
        if errors is None:
            self._failed |= {place: error for place, error in enumerate(blamed) if error is not None}

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last ``counts[i]`` pushed tokens of row i."""
        for opened in self._opened:
            opened.rows.rollback([counts[place] for place in opened.places])


def _asks(processor: Processor, row: ProcessedRow) -> bool:
    return not (row.params.greedy and processor.is_argmax_invariant) and processor.handles(row)
