"""`recurrent` beyond the kit: what models find in it, states kept whole or put back, and rows of several tails."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts.recurrent import RecurrentCache, RecurrentLayout

INFO = LayerInfo(index=0, path="0", kind="recurrent", slots=2, state_bytes=4 * (3 * 2 + 4))


def fold(tokens):
    """What a row's two states are after ``tokens``: the last three of them, doubled, and a decaying sum [4]."""
    tail = ([0.0] * 3 + [float(t) for t in tokens])[-3:]
    total = np.zeros(4)
    for token in tokens:
        total = total * 0.5 + np.array([token, token % 3, token % 5, 1.0])
    return np.stack([tail, tail], axis=1), total  # (3, 2), (4,)


def states(rows, dtype=mx.float32):
    folded = [fold(tokens) for tokens in rows]
    return [mx.array(np.stack([f[i] for f in folded])).astype(dtype) for i in range(2)]


class Mirror:
    """A cache, and the tokens that its rows stand for."""

    def __init__(self, rows=(), dtype=mx.float32):
        self.cache, self.lists, self.dtype = RecurrentLayout().open(INFO, None, slots=1, window=1), [], dtype
        self._next = 0
        for length in rows:
            other = Mirror(dtype=dtype)
            other._next = self._next
            other.add(1)
            if length:
                other.step([length])
            self._next = other._next
            self.join(other)

    def add(self, n):
        self.cache.add(n)
        self.lists += [[] for _ in range(n)]

    def step(self, widths, kept=None):
        """A model that ignores ``lengths``: whatever stands in a padded row's window enters its state."""
        kept = widths if kept is None else kept
        new = [[self._next + 10 * row + i + 1 for i in range(width)] for row, width in enumerate(widths)]
        self._next += 7
        self.cache.begin(widths, Positions(map(len, self.lists)))
        poisoned = [
            row + tokens + [999] * (max(widths) - len(tokens)) for row, tokens in zip(self.lists, new, strict=True)
        ]
        sound = [row + tokens for row, tokens in zip(self.lists, new, strict=True)]
        honest = self.cache.lengths is not None and all(kept)
        self.cache[0], self.cache[1] = states(sound if honest else poisoned, self.dtype)
        self.cache.commit(kept)
        self.lists = [row + tokens[:n] for row, tokens, n in zip(self.lists, new, kept, strict=True)]

    def join(self, other):
        first = len(self.lists)
        self.cache.join(other.cache, range(first, first + len(other.lists)))
        self.lists += other.lists

    def check(self):
        assert self.cache.tokens == tuple(map(len, self.lists))
        for row, tokens in enumerate(self.lists):
            state = self.cache.extract(row)
            assert (state.layout, state.tokens) == ("recurrent", len(tokens))
            for name, wanted in zip(("state0", "state1"), fold(tokens) if tokens else (), strict=False):
                np.testing.assert_allclose(np.array(state.arrays()[name].astype(mx.float32))[0], wanted, rtol=1e-2)
        held = [slot for slot in self.cache if slot is not None]
        assert all(slot.shape[0] == len(self.lists) and slot.dtype == self.dtype for slot in held)


def test_models_take_it_for_their_own():
    """They ask for the type, unpack it, index it, and test it for truth."""
    cache = Mirror([2, 0]).cache
    assert isinstance(cache, ArraysCache)
    assert cache
    assert not hasattr(type(cache), "__len__")
    first, second = cache
    assert (first is cache[0], second is cache[1]) == (True, True)
    assert RecurrentCache(2)
    assert not hasattr(cache, "offset")


def test_lengths_are_there_while_a_row_is_padded_and_then_only():
    mirror = Mirror([3, 1])
    starts = Positions((3, 1))
    mirror.cache.begin([2, 2], starts)
    assert mirror.cache.lengths is None
    assert mirror.cache.make_mask(2) is None
    mirror.cache.commit([0, 0])
    mirror.cache.begin([3, 0], starts)
    mirror.cache.advance(3)  # some models count down themselves
    assert mirror.cache.lengths.tolist() == [3, 0]
    assert mirror.cache.make_mask(3).tolist() == [[True] * 3, [False] * 3]
    mirror.cache.commit([3, 0])
    assert mirror.cache.lengths is None


def test_one_array_of_lengths_serves_all_layers_of_a_forward():
    caches, starts = [Mirror([3, 1]).cache for _ in range(2)], Positions((3, 1))
    for cache in caches:
        cache.begin([2, 1], starts)
    assert caches[0].lengths is caches[1].lengths


def test_a_row_keeps_all_or_nothing():
    mirror = Mirror([3, 1, 2])
    before = list(mirror.cache)
    mirror.step([2, 2, 2])
    mirror.check()
    mirror.step([2, 2, 2], [2, 0, 2])
    mirror.check()
    mirror.step([1, 3, 2], [0, 3, 0])
    mirror.check()
    mirror.step([4, 4, 4], [0, 0, 0])
    mirror.check()
    assert before[0].shape == (3, 3, 2)


def test_an_abort_gives_the_very_arrays_back():
    mirror = Mirror([3, 1])
    before = list(mirror.cache)
    mirror.step([2, 2], [0, 0])
    assert [a is b for a, b in zip(before, mirror.cache, strict=True)] == [True, True]


def test_a_row_without_tokens_keeps_its_state_whatever_the_model_wrote():
    mirror = Mirror([3, 1, 2])
    mirror.step([1, 0, 1])
    mirror.check()


@pytest.mark.parametrize("kept", [[1, 2], [2, 1], [3, 2], [-1, 2]])
def test_a_row_cut_in_the_middle_is_refused_before_anything_changes(kept):
    mirror = Mirror([3, 1])
    mirror.cache.begin([2, 2], Positions((3, 1)))
    mirror.cache[0], mirror.cache[1] = states([[1], [2]])
    with pytest.raises(ValueError, match="whole or not at all"):
        mirror.cache.commit(kept)
    mirror.cache.commit([0, 0])
    mirror.check()


def test_a_forward_that_failed_before_this_layer_changes_nothing():
    mirror = Mirror([3, 1])
    mirror.cache.commit([0, 0])
    mirror.check()
    mirror.cache.begin([2, 2], Positions((3, 1)))  # the model raised behind its first state
    mirror.cache[0] = states([[7], [7]])[0]
    mirror.cache.commit([0, 0])
    mirror.check()


def test_an_empty_row_is_none_where_nothing_is_and_zeros_beside_others():
    mirror = Mirror()
    mirror.add(2)
    assert list(mirror.cache) == [None, None]
    full = Mirror([3])
    full.add(1)
    assert [float(mx.abs(slot[1]).max()) for slot in full.cache] == [0, 0]
    full.check()
    mirror.join(full)
    assert [float(mx.abs(slot[:2]).max()) for slot in mirror.cache] == [0, 0]
    mirror.check()
    mirror.step([2, 2, 2, 2], [2, 2, 0, 2])
    mirror.check()


def test_a_first_forward_can_be_kept_by_some_rows_only():
    mirror = Mirror()
    mirror.add(2)
    mirror.step([2, 2], [0, 2])
    mirror.check()
    assert float(mx.abs(mirror.cache[1][0]).max()) == 0


def test_a_tail_shorter_than_others_begins_with_zeros():
    """A row of one token may have a shorter tail than a row of many: what is missing is nothing."""
    short, long = RecurrentCache(1), RecurrentCache(1)
    for cache, length in ((short, 1), (long, 3)):
        cache.add(1)
        cache.begin([length], Positions((0,)))
        cache[0] = mx.arange(1, length + 1)[None]
        cache.commit([length])
    long.join(short, [1])
    assert long[0].tolist() == [[1, 2, 3], [0, 0, 1]]
    long.begin([1, 0], Positions((3, 1)))
    long[0] = mx.array([[1, 2, 3, 4], [9, 9, 9, 9]])
    long.commit([1, 0])
    assert long[0].tolist() == [[1, 2, 3, 4], [0, 0, 0, 1]]


def test_nothing_changes_where_a_join_is_refused():
    mirror = Mirror([2, 3])
    other = Mirror([1], mx.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        mirror.cache.join(other.cache, [2])
    with pytest.raises(ValueError, match="free"):
        mirror.cache.join(Mirror([1]).cache, [3])
    with pytest.raises(TypeError, match="2 states"):
        mirror.cache.join(RecurrentCache(3), [])
    mirror.check()


@pytest.mark.parametrize(("tokens", "wanted"), [(3, 0), (4, 4), (9, 4), (0, 0)])
def test_a_state_is_reused_at_exactly_its_own_length(tokens, wanted):
    assert Mirror([4]).cache.reusable(tokens) == wanted
    assert Mirror([4, 3]).cache.reusable(tokens) == 0


@pytest.mark.fault("K-02")
def test_600_steps_leave_a_constant_graph(tmp_path):
    """With a row that never takes part, and a leave and a join every now and then."""
    mirror = Mirror([3, 1])
    sizes = []
    for step in range(600):
        mirror.cache.begin([1, 0], Positions(mirror.cache.tokens))
        mirror.cache[0], mirror.cache[1] = mirror.cache[0] * 0.5 + 1, mirror.cache[1] * 0.5
        mirror.cache.commit([1, 0])
        if step % 50 == 49:
            sizes.append(graph(mirror.cache.arrays(), tmp_path))
        mx.eval(mirror.cache[0].sum() + mirror.cache[1].sum())  # what a step reads
    assert len(set(sizes)) == 1
    assert graph(mirror.cache.arrays(), tmp_path) == 0


def graph(arrays, folder):
    """Edges of what is still to be computed."""
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("->")
