"""The conformance kit for processors: histories, windows, and that company changes nothing.

    class TestMine(ProcessorContract):
        processor = MyProcessor()

in a test file, or ``pytest --oarlock-processor NAME`` for one that is installed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core.contracts.sampler import Drafted, Extending, ProcessedRow, Processor, ProcessorRows
from oarlock.core.request import SamplingParams
from oarlock.core.testing.subjects import resolved

__all__ = ["ProcessorContract"]

SIZES = (11, 1000)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
FEW = 7
"""Histories are of so many different tokens, so that they repeat themselves."""


def usual() -> list[SamplingParams]:
    """Return parameters as users give them, of every field that processors apply."""
    return [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5),
        SamplingParams(presence_penalty=0.7, temperature=1.0),
        SamplingParams(frequency_penalty=0.4, presence_penalty=0.2),
        SamplingParams(logit_bias={1: 5.0, 3: -100.0}),
        SamplingParams(logit_bias={0: -0.25, 2: 1.0, 4: 100.0}, repetition_penalty=1.1, frequency_penalty=-0.3),
    ]


class ProcessorContract:
    """What a processor promises, clause by clause; subclass it, name a ``processor``, and let pytest find the subclass.

    ``params``: the parameters to try, for a processor that asks for some of its own; those of `usual` that it handles
    where none are given, with ``options`` as their `SamplingParams.extra`.
    """

    processor: ClassVar[Processor | str]
    options: ClassVar[Mapping[str, Any]] = {}
    params: ClassVar[Sequence[SamplingParams]] = ()

    @classmethod
    def opened(cls) -> tuple[Processor, list[ProcessedRow]]:
        """Return the processor and rows that ask for it."""
        processor: Processor = resolved("processor", cls.processor)
        params = cls.params or [attrs.evolve(each, extra=cls.options) for each in usual()]
        draw = np.random.default_rng(0)
        lengths = [(1, 0), (3, 2), (40, 0), (9, 5), (300, 30), (250, 4)]
        rows = [
            ProcessedRow(
                params=each,
                prompt=_some(draw, prompt),
                generated=_some(draw, generated),
                stop_ids=frozenset({2, 5}),
                min_tokens=generated + 2,
            )
            for number, each in enumerate(params)
            for prompt, generated in (lengths[number % 6], lengths[(number + 3) % 6])
        ]
        return processor, [row for row in rows if processor.handles(row)]

    @classmethod
    def check_subject(cls) -> None:
        """Raise what makes it impossible to begin."""
        cls.opened()

    def test_it_says_what_it_is(self) -> None:
        """A name, a fact about greedy rows, the fields that it applies, and rows that ask for it."""
        processor, rows = self.opened()
        assert isinstance(processor.name, str)
        assert processor.name
        assert isinstance(processor.is_argmax_invariant, bool)
        assert isinstance(processor.fields, frozenset)
        assert rows, "none of the rows asks for it; give parameters that do, as options of the command line"
        assert not processor.handles(ProcessedRow(params=SamplingParams())), "a row without parameters asks for it"
        if isinstance(processor, Extending):
            for row in rows:
                if not processor.extra.isdisjoint(row.params.extra):
                    processor.check(row.params, SIZES[0])

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_row_does_not_mind_its_company(self, size: int, dtype: Any) -> None:
        """Alone, together and in another order, before and after tokens are pushed: the same bits, in the given dtype."""
        processor, rows = self.opened()
        order = np.random.default_rng(1).permutation(len(rows)).tolist()
        at, logits = mx.array(order), _scores(len(rows), size, dtype)
        given = _bits(logits)
        together, shuffled = processor.open(rows), processor.open([rows[i] for i in order])
        each = [processor.open([row]) for row in rows]
        for step in range(3):
            scores = together.apply(logits)
            assert scores.dtype == dtype
            assert scores.shape == logits.shape
            assert _bits(shuffled.apply(logits[at])) == _bits(scores[at])
            for i, alone in enumerate(each):
                assert _bits(alone.apply(logits[i : i + 1])) == _bits(scores[i : i + 1]), rows[i]
            tokens = _drawn(len(rows), 1, step)
            together.push(tokens, [1] * len(rows))
            shuffled.push(tokens[at], [1] * len(rows))
            for i, alone in enumerate(each):
                alone.push(tokens[i : i + 1], [1])
        assert _bits(logits) == given, "the scores that it was given have changed"

    def test_lines_may_be_of_any_row(self) -> None:
        """``rows`` says whose each line is."""
        processor, rows = self.opened()
        lines = [i for i in range(len(rows)) for _ in range(2)][::-1]
        logits, opened = _scores(len(lines), SIZES[1]), processor.open(rows)
        wanted = processor.open([rows[i] for i in lines]).apply(logits)
        assert _bits(opened.apply(logits, mx.array(lines, dtype=mx.int32))) == _bits(wanted)

    @pytest.mark.parametrize("size", SIZES)
    def test_a_window_is_the_tokens_one_by_one(self, size: int) -> None:
        """Each line is rewritten as if its drafted tokens had been pushed, whatever stands behind the real ones."""
        processor, rows = self.opened()
        width, count = 4, len(rows)
        tokens = _drawn(count, width, 3)
        whole, step = processor.open(rows), processor.open(rows)
        places = mx.array([row for row in range(count) for _ in range(width + 1)], dtype=mx.int32)
        counts = list(range(width + 1)) * count
        logits = _scores(len(counts), size)
        window = whole.apply(logits, places, Drafted(tokens[places], counts))
        for taken in range(width + 1):
            at = mx.array([row * (width + 1) + taken for row in range(count)])
            assert _bits(window[at]) == _bits(step.apply(logits[at])), f"after {taken} tokens"
            if taken < width:
                step.push(tokens[:, taken : taken + 1], [1] * count)

    def test_a_window_changes_nothing(self) -> None:
        """Drafted tokens are forgotten."""
        processor, rows = self.opened()
        logits, opened = _scores(len(rows), SIZES[1]), processor.open(rows)
        before = _bits(opened.apply(logits))
        each = mx.arange(len(rows), dtype=mx.int32)
        opened.apply(logits, each, Drafted(_drawn(len(rows), 3, 4), [3] * len(rows)))
        assert _bits(opened.apply(logits)) == before

    def test_a_history_is_what_was_pushed(self) -> None:
        """Several tokens at once, of some rows more than of others: as if the rows had been opened with them."""
        processor, rows = self.opened()
        opened, counts = processor.open(rows), [i % 4 for i in range(len(rows))]
        tokens = _drawn(len(rows), 3, 5)
        opened.push(tokens, counts)
        self._equal(opened, processor, _extended(rows, tokens, counts))

    def test_pushed_tokens_are_taken_back(self) -> None:
        """After a rollback the row is where it was, and goes on from there."""
        processor, rows = self.opened()
        opened, kept = processor.open(rows), [i % 4 for i in range(len(rows))]
        tokens = _drawn(len(rows), 3, 6)
        opened.push(tokens, [3] * len(rows))
        opened.apply(_scores(len(rows), SIZES[1]))
        opened.rollback([3 - count for count in kept])
        now = _extended(rows, tokens, kept)
        self._equal(opened, processor, now)
        more = _drawn(len(rows), 1, 7)
        opened.push(more, [1] * len(rows))
        self._equal(opened, processor, _extended(now, more, [1] * len(rows)))

    @pytest.mark.parametrize("seed", range(5))
    def test_rows_are_kept_in_any_order(self, seed: int) -> None:
        """What is kept goes on from its own history."""
        processor, rows = self.opened()
        draw = np.random.default_rng(seed)
        indices = draw.permutation(len(rows))[: draw.integers(1, len(rows) + 1)].tolist()
        opened, tokens = processor.open(rows), _drawn(len(rows), 1, seed)
        opened.apply(_scores(len(rows), SIZES[1]))
        opened.push(tokens, [1] * len(rows))
        opened.keep(indices)
        now = _extended(rows, tokens, [1] * len(rows))
        self._equal(opened, processor, [now[i] for i in indices])

    def test_nothing_waits_for_the_device(self) -> None:
        """Tokens and scores have no values yet when they are pushed and rewritten."""
        processor, rows = self.opened()
        opened = processor.open(rows)

        def step(logits: mx.array, tokens: mx.array) -> mx.array:
            opened.push(tokens, [1] * len(rows))
            return opened.apply(logits)

        logits, tokens = _scores(len(rows), SIZES[1]), _drawn(len(rows), 1, 8)
        traced = mx.compile(step)(logits, tokens)
        again = processor.open(rows)
        again.push(tokens, [1] * len(rows))
        assert traced.shape == again.apply(logits).shape

    def test_pushes_do_not_pile_up(self) -> None:
        """The work of a step is that step's, however many went before."""
        processor, rows = self.opened()
        opened, logits, sizes = processor.open(rows), _scores(len(rows), SIZES[0]), []
        for step in range(12):
            scores = opened.apply(logits)
            graph = io.StringIO()
            mx.export_to_dot(graph, scores)
            sizes.append(len(graph.getvalue().splitlines()))
            mx.eval(scores)
            opened.push(_drawn(len(rows), 1, step), [1] * len(rows))
        assert sizes[11] <= sizes[3], f"operations that wait, step by step: {sizes}"

    def test_a_line_that_is_no_number_spoils_no_other(self) -> None:
        """A broken row's scores are NaN: the others get what they get."""
        processor, rows = self.opened()
        several = [rows[i % len(rows)] for i in range(3)]
        scores = np.array(_scores(3, SIZES[1]))
        wanted = processor.open(several).apply(mx.array(scores))
        scores[1] = np.nan
        got = processor.open(several).apply(mx.array(scores))
        ends = mx.array([0, 2])
        assert _bits(got[ends]) == _bits(wanted[ends])

    def test_the_best_token_stays_the_best_where_it_says_so(self) -> None:
        """Greedy rows may skip it."""
        processor, rows = self.opened()
        for size in SIZES if processor.is_argmax_invariant else ():
            logits = _scores(len(rows), size)
            best = mx.argmax(processor.open(rows).apply(logits), axis=-1)
            assert best.tolist() == mx.argmax(logits, axis=-1).tolist()

    @staticmethod
    def _equal(opened: ProcessorRows, processor: Processor, rows: Sequence[ProcessedRow]) -> None:
        logits = _scores(len(rows), SIZES[1])
        assert _bits(opened.apply(logits)) == _bits(processor.open(rows).apply(logits))


def _extended(rows: Sequence[ProcessedRow], tokens: mx.array, counts: Sequence[int]) -> list[ProcessedRow]:
    """Return rows that have generated the first ``counts[i]`` of ``tokens`` [B, W] as well."""
    more: Any = tokens.tolist()
    return [
        attrs.evolve(row, generated=[*row.generated, *line[:count]])
        for row, line, count in zip(rows, more, counts, strict=True)
    ]


def _some(draw: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in draw.integers(0, FEW, count)]


def _drawn(rows: int, width: int, seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, FEW, (rows, width), dtype=np.uint32))


def _scores(rows: int, size: int, dtype: Any = mx.float32, seed: int = 0) -> mx.array:
    drawn = np.random.default_rng(100 + seed).normal(size=(rows, size)) * 2
    return mx.array(drawn.astype(np.float32)).astype(dtype)


def _bits(array: mx.array) -> bytes:
    return np.array(array.astype(mx.float32)).tobytes()
