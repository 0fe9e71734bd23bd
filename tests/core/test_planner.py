"""Where a prompt's next forward ends. The numbers are those of SPEC 5.2 to 5.8 and its check A6."""

from __future__ import annotations

import random

import pytest

from oarlock.core.planner import Chunk, plan, shared_width


def walk(length, position, chunk, *, tail_split=True, snapshot=None):
    """Return every chunk of a prompt."""
    chunks = []
    while position < length:
        chunks.append(plan(length, position, chunk, tail_split=tail_split, snapshot=snapshot))
        position = chunks[-1].end
    return chunks


def ends(*given, **options):
    return [chunk.end for chunk in walk(*given, **options)]


# --- A6 ------------------------------------------------------------------------------------------------------


def test_a_prompt_of_nine_in_chunks_of_three():
    """A6: the last forward is the last token alone."""
    chunks = walk(9, 0, 3)
    assert [chunk.end for chunk in chunks] == [3, 6, 8, 9]
    assert [chunk.yields for chunk in chunks] == [True, True, False, False]
    assert [chunk.final for chunk in chunks] == [False, False, False, True]
    assert [chunk.drain for chunk in chunks] == [True, True, True, False]


def test_a_snapshot_position_ends_a_chunk():
    """A6: from 2 to 12 in fours, with a snapshot at 7."""
    chunks = walk(12, 2, 4, snapshot=7)
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(2, 6), (6, 7), (7, 11), (11, 12)]
    assert [chunk.snapshot for chunk in chunks] == [False, True, False, False]
    assert [chunk.yields for chunk in chunks[:2]] == [True, True]


def test_without_tail_split_the_final_chunk_is_what_is_left():
    """A6."""
    chunks = walk(10, 0, 4, tail_split=False)
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 4), (4, 8), (8, 10)]
    assert chunks[-1] == Chunk(start=8, end=10, drain=False, snapshot=False, final=True, yields=False)
    assert all(chunk.yields for chunk in chunks[:-1])


# --- the rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "position", "chunk", "snapshot"),
    [(0, 0, 1, None), (5, 5, 1, None), (5, 6, 1, None), (5, -1, 1, None), (5, 0, 0, None), (5, 0, -3, None),
     (5, 0, 1, -1), (5, 0, 1, 6), (5.0, 0, 1, None), (5, 0.0, 1, None), (5, 0, 1.5, None), (5, True, 1, None),
     (5, 0, 1, 2.0), ("5", 0, 1, None)],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(length, position, chunk, snapshot):
    """5.2."""
    with pytest.raises(ValueError, match="allowed"):
        plan(length, position, chunk, tail_split=True, snapshot=snapshot)


@pytest.mark.parametrize("tail_split", [True, False])
@pytest.mark.parametrize("snapshot", [None, 0, 4, 20])
def test_a_snapshot_behind_or_at_the_end_splits_nothing(tail_split, snapshot):
    """5.3: at or before the position, at the length, or absent."""
    assert ends(20, 4, 6, tail_split=tail_split, snapshot=snapshot) == ends(20, 4, 6, tail_split=tail_split)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7])
def test_a_prompt_of_at_most_chunk_and_one_tokens_never_yields(length):
    """5.7: its drain and its last token run in one advance."""
    assert not any(chunk.yields for chunk in walk(length, 0, 6))


def test_any_prompt_is_covered_once_and_ends_with_its_last_token():
    """5.2, 5.3, over random numbers."""
    rng = random.Random(5)
    for _ in range(2000):
        length = rng.randint(1, 60)
        position, chunk, split = rng.randrange(length), rng.randint(1, 70), rng.random() < 0.5
        snapshot = rng.choice((None, rng.randint(0, length)))
        chunks = walk(length, position, chunk, tail_split=split, snapshot=snapshot)
        assert [c.start for c in chunks] == [position, *(c.end for c in chunks[:-1])]
        assert all(0 < c.end - c.start <= chunk for c in chunks)
        assert [c.final for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].end == length
        assert not split or chunks[-1].end - chunks[-1].start == 1
        taken = [c.end for c in chunks if c.snapshot]
        assert taken == ([snapshot] if snapshot is not None and position < snapshot < length else [])


# --- shared forwards -------------------------------------------------------------------------------------------


def share(rows, joins, *, budget=None):
    """Forward rows of (length, chunk); ``joins[i]``: after how many forwards row i joins. Return the shapes."""
    here, chunks, shapes = {}, {}, []
    while len(here) < len(rows) or any(here[i] < rows[i][0] for i in here):
        for i, when in enumerate(joins):
            if i not in here and when <= len(shapes):
                here[i] = 0
        going = [i for i in sorted(here) if here[i] < rows[i][0]]
        for i in going:
            if i not in chunks or chunks[i].end == here[i]:
                chunks[i] = plan(rows[i][0], here[i], rows[i][1], tail_split=True)
        width = shared_width([here[i] for i in going], [chunks[i] for i in going], budget)
        shapes.append([len(going), width])
        for i in going:
            here[i] += width
    return shapes


def test_rows_keep_their_own_chunk_ends_whoever_joins():
    """5.5, 5.6, 5.8, trap 30: chunks 5, 3, 4 and lengths 18, 13, 9; the others join after one and two forwards."""
    assert share([(18, 5), (13, 3), (9, 4)], [0, 1, 2])[:3] == [[1, 5], [2, 3], [3, 2]]


def test_a_shared_forward_is_never_padded():
    """5.6, trap 31: as wide as the nearest planned end, so that nobody's part is filled up."""
    chunks = [plan(18, 0, 5, tail_split=True), plan(13, 0, 3, tail_split=True)]
    assert shared_width([0, 0], chunks) == 3
    assert shared_width([2, 0], chunks) == 3
    assert shared_width([4, 0], chunks) == 1


@pytest.mark.parametrize(("budget", "width"), [(None, 3), (100, 3), (4, 2), (3, 1), (2, 1), (1, 1), (0, 1)])
def test_a_budget_narrows_the_forward_but_never_stalls_it(budget, width):
    """5.6: at least one token a row, trap 31."""
    chunks = [plan(18, 0, 5, tail_split=True), plan(13, 0, 3, tail_split=True)]
    assert shared_width([0, 0], chunks, budget) == width
