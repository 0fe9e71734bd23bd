"""What `full` copies: never the whole cache in a step, a join, a leave or a rollback. Peak memory tells, not a clock."""

import gc
import io

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.full import FullCache

HEADS, SIZE, COLUMNS = 4, 64, 4096
ROW = HEADS * COLUMNS * SIZE * 4  # bytes of one row's keys: 4 MiB
SLOTS = 8


def filled(cache_type, lengths, slots=SLOTS, layers=1):
    """Caches whose buffers reach to COLUMNS: 64 MiB each with 8 slots."""
    caches = []
    for _ in range(layers):
        cache = cache_type(slots)
        cache.add(1)
        write(cache, COLUMNS - 64)
        cache.commit([lengths[0]])
        for row, length in enumerate(lengths[1:], start=1):
            cache.join(lone(length), [row])
        mx.eval(cache.arrays())
        caches.append(cache)
    return caches if layers > 1 else caches[0]


def lone(length):
    cache = FullCache(1)
    cache.add(1)
    write(cache, length)
    cache.commit([length])
    mx.eval(cache.arrays())
    return cache


def write(cache, width, scale=1.0):
    """Begin and append; return something that depends on all that is read."""
    cache.begin([width] * cache.rows, Positions(cache.tokens))
    mask = cache.make_mask(width)
    new = mx.full((cache.rows, HEADS, width, SIZE), 0.1) * scale
    keys, values = cache.update_and_fetch(new, new)
    return mx.fast.scaled_dot_product_attention(new[:, :, :1], keys, values, scale=0.1, mask=_last(mask))


def _last(mask):
    return mask[..., -1:, :] if isinstance(mask, mx.array) else None


def others(out):
    """The model's other layers, before and behind a cache's own.

    On the CPU async_eval returns with up to a hundred operations in flight, and one that still reads a buffer makes
    the next write copy it. In a model those are another layer's.
    """
    for _ in range(150):
        out = out * 1.0
    return out


def peak_of(work):
    """Bytes that ``work`` needs beside what is there when it starts."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return max(0, mx.get_peak_memory() - before)  # the peak is 0 where nothing was allocated


def step(caches, previous=None):
    """One pipelined decode step over all layers: dispatched before the previous one is read."""
    scale = mx.array(1.0) if previous is None else previous.reshape(-1)[0]
    for cache in caches:
        out = others(write(cache, 1, others(scale)))
        cache.commit([1] * cache.rows)
        scale = out.reshape(-1)[0]
    mx.async_eval(out)
    if previous is not None:
        previous.tolist()
    return out


def check_steps(cache_type, lengths):
    """Twelve pipelined steps over two layers of 64 MiB."""
    caches = filled(cache_type, lengths, layers=2)

    def run():
        out = None
        for _ in range(12):
            out = step(caches, out)
        out.tolist()

    run()  # whatever is made once
    assert peak_of(run) < ROW


def check_join(cache_type):
    """A row of 1,000 tokens joins a running batch, between two pipelined steps."""
    cache, joiner = filled(cache_type, [3000, 900, 20]), lone(1000)

    def run():
        out = step([cache])
        cache.join(joiner, [cache.rows])
        step([cache], out).tolist()

    assert peak_of(run) < ROW


def check_leave(cache_type, indices):
    """Rows leave, and others move into their places, between two pipelined steps."""
    cache = filled(cache_type, [3000, 900, 20, 700, 50])

    def run():
        out = step([cache])
        out.tolist()
        cache.keep(indices)
        step([cache]).tolist()

    assert peak_of(run) < 2 * ROW  # of 8 rows' keys and 8 rows' values


def check_rollback(cache_type, kept):
    """A window of five, of which some or none are kept, then a step."""
    cache = filled(cache_type, [3000, 900, 20])

    def run():
        out = others(write(cache, 5))
        cache.commit(kept)
        mx.async_eval(out)
        step([cache]).tolist()

    assert peak_of(run) < ROW


def check_extract(cache_type):
    """A row is stored while its batch goes on: its own bytes and no more."""
    cache = filled(cache_type, [3000, 900, 20])
    states = []

    def run():
        out = step([cache])
        states.append(cache.extract(1))
        step([cache], out).tolist()

    assert peak_of(run) < ROW


@pytest.mark.parametrize("lengths", [[3000] * 4, [3000, 900, 20, 7]], ids=["equal", "ragged"])
def test_a_step_copies_nothing(lengths):
    check_steps(FullCache, lengths)


def test_a_join_copies_its_row_only():
    check_join(FullCache)


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [4, 1, 2, 3], [0, 4, 2, 3], [4, 3, 2]])
def test_a_leave_copies_what_moves_only(indices):
    check_leave(FullCache, indices)


@pytest.mark.parametrize("kept", [[5, 5, 5], [0, 3, 5], [0, 0, 0]])
def test_a_rollback_copies_nothing(kept):
    check_rollback(FullCache, kept)


def test_an_extract_copies_its_row_only():
    check_extract(FullCache)


def test_adopting_a_lone_row_moves_no_bytes():
    """It is the same object with the same arrays, and nothing is allocated for it."""
    cache = filled(FullCache, [3000], slots=1)
    arrays = cache.arrays()

    def run():
        assert cache.take([0]) is cache
        cache.keep([0])

    assert peak_of(run) == 0
    assert all(before is after for before, after in zip(arrays, cache.arrays(), strict=True))


def check_graph(cache_type):
    """Edges behind what a row owns, early and after 600 pipelined steps."""
    cache, out, edges = cache_type(2), None, []
    cache.join(lone(30), [0])
    cache.join(lone(9), [1])
    for count in range(600):
        out = step([cache], out)
        if count in (5, 599):
            out.tolist()
            graph = io.StringIO()
            mx.export_to_dot(graph, *cache.arrays(), out)
            edges.append(graph.getvalue().count("->"))
    assert edges[0] == edges[1], f"edges grew from {edges[0]} to {edges[1]}"


@pytest.mark.fault("K-02")
def test_600_steps_leave_no_graph():
    """Lists, lengths and offsets that nobody evaluates would grow a graph without end."""
    check_graph(FullCache)


# --- twins ---------------------------------------------------------------------------------------------------


def copied(buffer):
    return mx.concatenate([buffer[:1], buffer[1:]])


class Copies(FullCache):
    """Writes into new buffers, as a cache that concatenates does."""

    def update_and_fetch(self, keys, values):
        super().update_and_fetch(keys, values)
        self.keys = copied(self.keys)
        return self.keys_and_values()


class CopiesOnJoin(FullCache):
    def join(self, other, slots):
        super().join(other, slots)
        self.keys = copied(self.keys)


class MovesLazily(FullCache):
    """Moves rows without evaluating them first, so that source and target share the buffer."""

    def keep(self, indices):
        at = mx.array(list(indices))
        self.keys[: len(indices)] = self.keys[at]
        self.values[: len(indices)] = self.values[at]
        self._set_tokens(tuple(self._tokens[old] for old in indices))


class CopiesOnRollback(FullCache):
    def commit(self, kept):
        if self.keys is not None and any(n < self._written for n in kept):
            self.keys = copied(self.keys)
        super().commit(kept)


class CountsLazily(FullCache):
    """Keeps a device array of its own that no step reads."""

    steps = mx.zeros((1,))

    def commit(self, kept):
        self.steps = self.steps + 1
        super().commit(kept)

    def arrays(self):
        return [*super().arrays(), self.steps]


class ExtractsLazily(FullCache):
    """Leaves a pending reader of the buffer behind."""

    def extract(self, row):
        return self.keys[row : row + 1] * 1.0, self.values[row : row + 1] * 1.0


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (lambda cache_type: check_steps(cache_type, [3000, 900, 20, 7]), Copies),
        (check_join, CopiesOnJoin),
        (lambda cache_type: check_leave(cache_type, [4, 1, 2, 3]), MovesLazily),
        (lambda cache_type: check_rollback(cache_type, [0, 3, 5]), CopiesOnRollback),
        (check_extract, ExtractsLazily),
    ],
    ids=["step", "join", "leave", "rollback", "extract"],
)
def test_a_cache_that_copies_is_found(check, broken):
    """The same checks on caches that copy must fail."""
    with pytest.raises(AssertionError):
        check(broken)


@pytest.mark.fault("K-02", twin=True)
def test_a_cache_whose_graph_grows_is_found():
    with pytest.raises(AssertionError):
        check_graph(CountsLazily)
