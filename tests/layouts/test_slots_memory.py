"""What layouts with one slot a row copy: never all rows in a step, a join, a leave or a rollback. Peak memory tells."""

import io

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import Positions
from oarlock.core.testing.memory import peak_bytes
from oarlock.layouts.full import FullCache
from oarlock.layouts.packed import Format
from oarlock.layouts.quantized import QuantizedCache, QuantizedRing
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache

HEADS, SIZE, COLUMNS, SLOTS = 4, 64, 1024, 8


def ring(slots):
    """Slack for windows of five: with none, 1,024 columns are the window."""
    return RotatingCache(slots, Ring(window=COLUMNS - 4, slack=4))


def packed(slots):
    return QuantizedCache(slots, Format(bits=8, group_size=64), attends=True)


def packed_ring(slots):
    return QuantizedRing(slots, Ring(window=COLUMNS - 4, slack=4), Format(bits=8, group_size=64), attends=True)


OPENERS = {"full": FullCache, "rotating": ring, "quantized": packed, "quantized ring": packed_ring}


@pytest.fixture(params=OPENERS)
def opened(request):
    return OPENERS[request.param]


def filled(make, lengths):
    """Rows of these lengths in a cache whose planes reach to COLUMNS, of 8 slots; those past it have wrapped."""
    cache = make(SLOTS)
    for row, length in enumerate([COLUMNS, *lengths]):
        cache.join(lone(make, length), [row])
        mx.eval(cache.arrays())
    cache.keep(range(1, len(lengths) + 1))
    return cache


def lone(make, length):
    cache = make(1)
    cache.add(1)
    write(cache, length)
    cache.commit([length])
    for _ in range(3):  # not in temporal order
        write(cache, 1)
        cache.commit([1])
    mx.eval(cache.arrays())
    return cache


def write(cache, width, scale=1.0):
    """Begin and append; return something that depends on all that is read."""
    cache.begin([width] * cache.rows, Positions(cache.tokens))
    mask = cache.make_mask(width)
    new = mx.full((cache.rows, HEADS, width, SIZE), 0.1) * scale
    keys, values = cache.update_and_fetch(new, new)
    queries, mask = new[:, :, :1], mask[..., -1:, :] if isinstance(mask, mx.array) else None
    if isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask=mask)
    # Not by attending: on the CPU MLX copies packed planes that are a part of a buffer to multiply by them.
    return sum(mx.sum(plane.astype(mx.uint8)) for plane in keys._planes.values()).astype(mx.float32) * 1e-9


def others(out):
    """The model's other layers: one that still reads a buffer would make the next write copy it."""
    for _ in range(150):
        out = out * 1.0
    return out


def step(cache, previous=None):
    """One pipelined decode step: dispatched before the previous one is read."""
    scale = mx.array(1.0) if previous is None else previous.reshape(-1)[0]
    out = others(write(cache, 1, others(scale)))
    cache.commit([1] * cache.rows)
    mx.async_eval(out)
    if previous is not None:
        previous.tolist()
    return out


def row_bytes(cache):
    return cache.nbytes // cache.planes["keys"].shape[0]


def check_steps(make, lengths):
    cache = filled(make, lengths)
    step(cache, step(cache)).tolist()

    def run():
        out = None
        for _ in range(8):
            out = step(cache, out)
        out.tolist()

    assert peak_bytes(run) < 1.5 * row_bytes(cache)  # masks and, for packed planes, scores of one step


def check_join(make):
    """A wrapped row and a short one join a running batch, between two pipelined steps."""
    cache = filled(make, [750, 2250, 20])

    def run(joiner):
        out = step(cache)
        cache.join(joiner, [cache.rows])
        step(cache, out).tolist()

    for length in (250, 2250):
        joiner = lone(make, length)
        assert peak_bytes(lambda joiner=joiner: run(joiner)) < 2 * row_bytes(cache)


def check_leave(make, indices):
    cache = filled(make, [750, 2250, 20, 175, 50])

    def run():
        step(cache).tolist()
        cache.keep(indices)
        step(cache).tolist()

    assert peak_bytes(run) < 2 * row_bytes(cache)


def check_rollback(make, kept):
    """A window of five, of which some or none are kept, then a step."""
    cache = filled(make, [750, 2250, 20])

    def run():
        out = others(write(cache, 5))
        cache.commit(kept)
        mx.async_eval(out)
        step(cache).tolist()

    assert peak_bytes(run) < 1.5 * row_bytes(cache)


def check_extract(make):
    """A row is stored while its batch goes on: its own bytes and no more."""
    cache = filled(make, [750, 2250, 20])
    states = []

    def run():
        out = step(cache)
        states.append(cache.extract(1))
        step(cache, out).tolist()

    assert peak_bytes(run) < 2.5 * row_bytes(cache)


def check_graph(make):
    """Edges behind what a row owns, early and after 600 pipelined steps."""
    cache, out, edges = make(2), None, []
    for row, length in enumerate((30, 9)):
        cache.join(lone(make, length), [row])
    for count in range(600):
        out = step(cache, out)
        if count in (5, 599):
            out.tolist()
            graph = io.StringIO()
            mx.export_to_dot(graph, *cache.arrays(), out)
            edges.append(graph.getvalue().count("->"))
    assert edges[0] == edges[1], f"edges grew from {edges[0]} to {edges[1]}"


@pytest.mark.parametrize("lengths", [[1250] * 4, [1250, 2250, 20, 7]], ids=["equal", "ragged"])
def test_a_step_copies_nothing(opened, lengths):
    check_steps(opened, lengths)


def test_a_join_copies_its_row_only(opened):
    check_join(opened)


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [4, 1, 2, 3], [4, 3, 2]])
def test_a_leave_copies_what_moves_only(opened, indices):
    check_leave(opened, indices)


@pytest.mark.parametrize("kept", [[5, 5, 5], [0, 3, 5], [0, 0, 0]])
def test_a_rollback_copies_nothing(opened, kept):
    check_rollback(opened, kept)


def test_an_extract_copies_its_row_only(opened):
    check_extract(opened)


@pytest.mark.fault("K-02")
def test_600_steps_leave_no_graph(opened):
    """Lists, lengths and offsets that nobody evaluates would grow a graph without end."""
    check_graph(opened)


def test_adopting_a_lone_row_moves_no_bytes(opened):
    cache = lone(opened, 2250)
    arrays = cache.arrays()
    assert peak_bytes(lambda: cache.take([0]).keep([0])) == 0
    assert all(before is after for before, after in zip(arrays, cache.arrays(), strict=True))
    assert cache.take([0]) is cache


# --- twins ---------------------------------------------------------------------------------------------------------


def copied(cache):
    cache.planes = {name: mx.concatenate([plane[:1], plane[1:]]) for name, plane in cache.planes.items()}


class Copies(RotatingCache):
    def _write(self, new, at):
        super()._write(new, at)
        copied(self)


class CopiesOnJoin(RotatingCache):
    def join(self, other, slots):
        super().join(other, slots)
        copied(self)


class MovesLazily(RotatingCache):
    def keep(self, indices):
        at = mx.array(list(indices))
        for plane in self.planes.values():
            plane[: len(indices)] = plane[at]
        self._set_tokens(tuple(self._tokens[old] for old in indices))
        self.ring = self.ring.pick(indices)


class CopiesOnRollback(RotatingCache):
    """Saves what it may have to restore."""

    def begin(self, widths, starts):
        super().begin(widths, starts)
        self.saved = dict(self.planes) if max(widths) == 5 else None
        if self.saved:
            self.planes = {name: plane[:] for name, plane in self.planes.items()}


class ExtractsLazily(RotatingCache):
    def extract(self, row):
        return [plane[row : row + 1] * 1.0 for plane in self.planes.values()]


class CountsLazily(RotatingCache):
    steps = mx.zeros((1,))

    def commit(self, kept):
        self.steps = self.steps + 1
        super().commit(kept)

    def arrays(self):
        return [*super().arrays(), self.steps]


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (lambda make: check_steps(make, [1250, 2250, 20, 7]), Copies),
        (check_join, CopiesOnJoin),
        (lambda make: check_leave(make, [4, 1, 2, 3]), MovesLazily),
        (lambda make: check_rollback(make, [0, 3, 5]), CopiesOnRollback),
        (check_extract, ExtractsLazily),
    ],
    ids=["step", "join", "leave", "rollback", "extract"],
)
def test_a_ring_that_copies_is_found(check, broken):
    """The same checks on rings that copy must fail."""
    with pytest.raises(AssertionError):
        check(lambda slots: broken(slots, Ring(window=COLUMNS - 4, slack=4)))


@pytest.mark.fault("K-02", twin=True)
def test_a_cache_whose_graph_grows_is_found():
    with pytest.raises(AssertionError):
        check_graph(lambda slots: CountsLazily(slots, Ring(window=COLUMNS - 4, slack=4)))
