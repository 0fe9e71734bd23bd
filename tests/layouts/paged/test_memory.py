"""What `paged` copies: nothing in a step, a join, a leave or a rollback, one block in a write that shares. Peak memory tells."""

import attrs
import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import KeyValues, LayerInfo, Positions
from oarlock.core.testing.memory import peak_bytes
from oarlock.layouts.blocks import Blocks
from oarlock.layouts.paged import PagedCache, PagedLayout, PagedOptions
from oarlock.layouts.pages import Pages

HEADS, SIZE, TOKENS, LAYERS = 4, 64, 2048, 2
ROW = HEADS * TOKENS * SIZE * 4  # bytes of one row's keys at TOKENS: 2 MiB
INFO = LayerInfo(
    index=0, path="0", kind="full", kv_heads=HEADS, key_dim=SIZE, value_dim=SIZE, dtype=mx.float32, attendable=True
)


@pytest.fixture
def engine():
    """Layers whose pool holds six rows of 2,048 tokens beside: a copy of one plane costs 12 MiB."""
    layers = [attrs.evolve(INFO, index=i, path=str(i)) for i in range(LAYERS)]
    layout = PagedLayout()

    def group(*lengths):
        caches = [layout.open(layer, PagedOptions(), slots=1, window=1) for layer in layers]
        for length in lengths:
            row = [layout.open(layer, PagedOptions(), slots=1, window=1) for layer in layers]
            for cache in row:
                cache.add(1)
            write(row, length)
            commit(row, [length])
            for cache, joiner in zip(caches, row, strict=True):
                cache.join(joiner, [cache.rows])
        mx.eval([array for cache in caches for array in cache.arrays()])
        return caches

    filler = group(*[TOKENS] * 6)
    yield group
    del filler


def write(caches, width, scale=1.0):
    """Begin and append on every layer; return something that depends on all that is read."""
    starts = Positions(caches[0].tokens)
    for cache in caches:
        cache.begin([width] * cache.rows, starts)
    mask = caches[0].make_mask(width)
    for cache in caches:
        new = mx.full((cache.rows, HEADS, width, SIZE), 0.1) * others(scale)
        keys, values = cache.update_and_fetch(new, new)
        if width > 64:
            continue  # a prompt: what it reads is not the point here
        if isinstance(keys, KeyValues):
            out = keys.attend(new, 0.1, mask, None)
        else:
            out = mx.fast.scaled_dot_product_attention(new, keys, values, scale=0.1, mask=mask)
        scale = others(out.reshape(-1)[0])
    return scale


def others(out):
    """The model's other layers: an operation in flight that still reads a buffer makes the next write copy it."""
    for _ in range(150):
        out = mx.array(out) * 1.0
    return out


def commit(caches, kept):
    for cache in caches:
        cache.commit(kept)


def step(caches, previous=None):
    """One pipelined decode step: dispatched before the previous one is read."""
    out = write(caches, 1, 1.0 if previous is None else previous)
    commit(caches, [1] * caches[0].rows)
    mx.async_eval(out)
    if previous is not None:
        previous.tolist()
    return out


def check_steps(engine, lengths):
    """Twelve pipelined steps, in which rows open new blocks, and none of which makes the pool grow."""
    caches = engine(*lengths)
    room(caches)

    def run():
        out = None
        for _ in range(12):
            out = step(caches, out)
        out.tolist()

    run()
    assert peak_bytes(run) < ROW


def room(caches):
    """Give the pool room, as its last growth left it."""
    blocks = caches[0]._blocks
    blocks.arrange(blocks.used + 64, caches[0]._table.rows, [4] * caches[0].rows)
    mx.eval([array for cache in caches for array in cache.arrays()])


@pytest.mark.parametrize("lengths", [[1500] * 4, [1500, 450, 20, 7], [1000]], ids=["equal", "ragged", "lone"])
def test_a_step_copies_nothing(engine, lengths):
    check_steps(engine, lengths)


def test_a_join_and_a_leave_move_nothing(engine):
    """A row of 1,000 tokens joins, others leave and change places, between pipelined steps."""
    caches, joiner = engine(1500, 450, 20, 350), engine(1000)
    room(caches)

    def run():
        out = step(caches)
        for cache, other in zip(caches, joiner, strict=True):
            cache.join(other, [cache.rows])
            cache.keep([4, 1, 2])
            other.keep([])
        step(caches, out).tolist()

    assert peak_bytes(run) < ROW / 4


@pytest.mark.parametrize("kept", [[5, 5, 5], [0, 3, 5], [0, 0, 0]])
def test_a_rollback_copies_nothing(engine, kept):
    caches = engine(1500, 450, 20)
    room(caches)

    def run():
        out = write(caches, 5)
        commit(caches, kept)
        mx.async_eval(out)
        step(caches).tolist()

    assert peak_bytes(run) < ROW / 2


def check_share(engine):
    """Rows are stored between pipelined steps: their last blocks are copied and nothing else, then or later."""
    caches, states = engine(1500, 450, 30), []
    room(caches)

    def run():
        out = step(caches)
        states.extend(cache.extract(row) for row in range(3) for cache in caches)
        step(caches, step(caches, out)).tolist()

    assert peak_bytes(run) < ROW / 2
    return states


def test_a_stored_row_costs_one_block(engine):
    assert len(check_share(engine)) == 6


def check_growth(engine):
    """A long row grows by 2,000 tokens: the pool is copied now and then, not in every step."""
    caches = engine(1000)
    blocks, moves = caches[0]._blocks, 0
    for _ in range(125):
        before = blocks.arrangement
        write(caches, 16)
        commit(caches, [16])
        moves += blocks.arrangement is not before
    assert moves <= 6


def test_growth_is_amortised(engine):
    check_growth(engine)


# --- twins ---------------------------------------------------------------------------------------------------


def test_reads_that_gather_are_found(engine, monkeypatch):
    monkeypatch.setattr(
        PagedCache, "keys_and_values", lambda self: self._pages.decode(self._pages.gathered(self._opened))
    )
    with pytest.raises(AssertionError):
        check_steps(engine, [1500] * 4)


def test_a_copy_that_is_left_pending_is_found(engine, monkeypatch):
    """A block that is copied lazily is read when the plane is written: MLX copies the plane."""

    def lazily(self, ids):
        size = self.blocks.size
        slices = [slice(block * size, block * size + size) for block in ids.tolist()]
        copies = {name: [plane[:, :, at] for at in slices] for name, plane in self.planes.items()}
        return {name: mx.concatenate(parts, axis=2) for name, parts in copies.items()}

    monkeypatch.setattr(Pages, "blocks_of", lazily)
    with pytest.raises(AssertionError):
        check_share(engine)


def test_growth_by_one_block_is_found(engine, monkeypatch):
    def exactly(self, rows, wants, extra=0):
        if (needed := self.used + sum(wants) + extra) > self.capacity:
            self.arrange(needed, rows, wants)

    monkeypatch.setattr(Blocks, "reserve", exactly)
    caches = engine(1000)
    for cache in caches:
        cache.compact()
    with pytest.raises(AssertionError):
        check_growth(lambda *_: caches)
