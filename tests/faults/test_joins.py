"""Kind F, for every storage, on real layers: rows with and without a past stand side by side, in their own dtype."""

import contextlib

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from oarlock.core.engine import Engine
from oarlock.core.forward import ForwardFailed, forward, settle
from oarlock.core.testing import models

PIECE = 6
"""No forward of these rows goes past a length at which `delayed` packs them, nor over two blocks of positions."""
HISTORIES, FRESH, TOKENS = (13, 8), (5, 1, 3), 5


class Rows:
    """Rows of a bound model and what each said last: what the core does with a group, row by row."""

    def __init__(self, of):
        self.of, self.caches, self.said = of, of.open_caches(slots=1, window=1), []

    def add(self, n):
        for cache in self.caches:
            cache.add(n)
        self.said += [None] * n
        return self

    def feed(self, tokens):
        """One forward of each row's tokens, padded to the widest."""
        widths = list(map(len, tokens))
        ids = mx.array([[*row, *[0] * (max(widths) - len(row))] for row in tokens], dtype=mx.uint32)
        best = mx.argmax(forward(self.of, self.caches, ids, widths), axis=-1).tolist()
        settle(self.of, self.caches, ids, widths, widths)
        self.said = [row[n - 1] if n else old for row, n, old in zip(best, widths, self.said, strict=True)]
        assert len({cache.tokens for cache in self.caches}) == 1
        assert {cache.rows for cache in self.caches} == {len(self.said)}

    def join(self, other):
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.join(theirs, range(mine.rows, mine.rows + theirs.rows))
        self.said += other.said

    def keep(self, indices):
        for cache in self.caches:
            cache.keep(indices)
        self.said = [self.said[i] for i in indices]

    def answers(self, n):
        """What each row says from here on."""
        found = [[said] for said in self.said]
        for _ in range(n - 1):
            self.feed([[said] for said in self.said])
            for row, said in zip(found, self.said, strict=True):
                row.append(said)
        return found


def past(of, prompt):
    """A row that has read all of a prompt but its last token."""
    row = Rows(of).add(1)
    for at in range(0, len(prompt) - 1, PIECE):
        row.feed([prompt[at : min(at + PIECE, len(prompt) - 1)]])
    return row


def compare(bench, key, answers, prompts):
    wanted = [bench.row_alone(key, tuple(prompt), TOKENS) for prompt in prompts]
    bench.compare(answers, *zip(*wanted, strict=True))


@pytest.fixture(scope="module")
def group():
    """The storage's model as an engine binds it; each once, and open as long as its attention is needed."""
    made = {}
    with contextlib.ExitStack() as stack:

        def get(bench, key):
            if key not in made:
                engine = Engine(bench.stored(key), config={"layouts": bench.STORAGES[key].layouts})
                made[key] = stack.enter_context(engine).bound
            return made[key]

        yield get


def check_join(bench, of, key, empty_first):
    """Three rows without a past and two with one, either way round; then a padded chunk, then steps."""
    prompts = bench.prompts((*HISTORIES, *FRESH), 97)
    filled, empty = Rows(of), Rows(of).add(len(FRESH))
    for prompt in prompts[:2]:
        filled.join(past(of, prompt))
    rest = [*[prompt[-1:] for prompt in prompts[:2]], *prompts[2:]]
    rows, other, order = (empty, filled, [2, 3, 4, 0, 1]) if empty_first else (filled, empty, range(5))
    rows.join(other)
    rows.feed([rest[i] for i in order])
    compare(bench, key, rows.answers(TOKENS), [prompts[i] for i in order])


def check_early_leave(bench, of, key):
    """Rows leave before their first token, and again with another row that has none."""
    prompts = bench.prompts(FRESH, 97)
    rows = Rows(of).add(3)
    rows.keep([2, 0])
    rows.add(2)
    rows.keep([3, 1, 0])
    rows.feed(prompts)
    compare(bench, key, rows.answers(TOKENS), prompts)


@pytest.mark.fault("F-04")
@pytest.mark.parametrize("empty_first", [True, False], ids=["empty first", "filled first"])
def test_rows_with_and_without_a_past_join(bench, group, storage, empty_first):
    check_join(bench, group(bench, storage), storage, empty_first)


@pytest.mark.fault("F-06")
def test_rows_leave_before_their_first_token(bench, group, storage):
    check_early_leave(bench, group(bench, storage), storage)


PLANTED = ["full", "rings", "packed", "delayed", "blocks", "states", "parts", "chunks"]
"""One storage for each type of cache."""


def patched(monkeypatch, of, name, make):
    """Plant ``make(method)`` in every type of cache that the model has."""
    for kind in {type(cache) for cache in of.open_caches(slots=1, window=1)}:
        monkeypatch.setattr(kind, name, make(getattr(kind, name)))


def counts_the_others(join):
    """A placeholder with as many rows as the joiner has."""

    def planted(self, other, slots):
        if self.rows and not any(self.tokens):
            self.keep([])
            self.add(other.rows)
        join(self, other, range(self.rows, self.rows + other.rows))

    return planted


def ignores_the_empty(keep):
    """What holds nothing yet is not filtered."""
    return lambda self, indices: keep(self, indices) if any(self.tokens) else None


@pytest.mark.fault("F-04", twin=True)
@pytest.mark.parametrize("storage", PLANTED)
def test_twin_a_placeholder_of_the_others_row_count_is_noticed(bench, planted, monkeypatch, group, storage):
    of = group(bench, storage)
    patched(monkeypatch, of, "join", counts_the_others)
    with planted(ForwardFailed, ValueError, IndexError):
        check_join(bench, of, storage, empty_first=True)


@pytest.mark.fault("F-06", twin=True)
@pytest.mark.parametrize("storage", PLANTED)
def test_twin_rows_that_stay_behind_are_noticed(bench, planted, monkeypatch, group, storage):
    of = group(bench, storage)
    patched(monkeypatch, of, "keep", ignores_the_empty)
    with planted(ForwardFailed, ValueError, IndexError):
        check_early_leave(bench, of, storage)


# --- dtypes ------------------------------------------------------------------------------------------------------


def dtypes(rows):
    """Of every array of every row, by layer and name."""
    states = [[cache.extract(row) for cache in rows.caches] for row in range(len(rows.said))]
    return [[{name: a.dtype for name, a in state.arrays().items()} for state in layers] for layers in states]


def check_dtypes(bench, key, dtype, plant=lambda of: None):
    """Joined, moved, taken out and put back, a row's arrays have the dtypes that they had alone."""
    storage = bench.STORAGES[key]
    model = models.build(storage.name, **storage.changes)
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    of = bench.engine(model, layouts=storage.layouts, verify=False).bound
    plant(of)
    prompts = models.prompts((13, 8), 97)
    (wanted,), rows = dtypes(past(of, prompts[0])), Rows(of).add(1)
    for prompt in prompts:
        rows.join(past(of, prompt))
    rows.feed([prompts[0][:2], *[prompt[-1:] for prompt in prompts]])
    rows.keep([2, 1, 0])
    back, states = Rows(of), [cache.extract(1) for cache in rows.caches]
    back.caches = [layer.layout.restore(state) for layer, state in zip(of.layers, states, strict=True)]
    back.said = [1]
    rows.join(back)
    rows.feed([[1]] * 4)
    for found in dtypes(rows):
        for layer, (mine, alone) in enumerate(zip(found, wanted, strict=True)):
            assert mine == {name: alone.get(name, mine[name]) for name in mine}, layer
    assert dtype in {kind for layer in wanted for kind in layer.values()}


@pytest.mark.fault("F-08")
@pytest.mark.parametrize("key", ["full", "rings", "packed rings", "blocks", "states", "parts"])
def test_no_change_turns_a_cache_into_float32(bench, key):
    for dtype in (mx.bfloat16, mx.float16) if key == "packed rings" else (mx.bfloat16,):
        check_dtypes(bench, key, dtype)


@pytest.mark.fault("F-08", twin=True)
@pytest.mark.parametrize("key", ["rings", "packed rings"])
def test_twin_a_join_that_widens_is_noticed(bench, planted, monkeypatch, key):
    with planted(ForwardFailed, ValueError):
        check_dtypes(bench, key, mx.bfloat16, lambda of: patched(monkeypatch, of, "join", widens))


def widens(join):
    def planted(self, other, slots):
        join(self, other, slots)
        self.planes = {n: p if p.dtype == mx.uint32 else p.astype(mx.float32) for n, p in self.planes.items()}

    return planted
