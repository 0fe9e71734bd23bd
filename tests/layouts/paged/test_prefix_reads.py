"""Rows that share a prefix read it once for all of them, where it lies: nothing is gathered, and nobody sees anything else."""

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.layouts.blocks import Blocks
from oarlock.layouts.paged import PagedLayout, PagedOptions
from oarlock.layouts.pages import Pages
from oarlock.layouts.reads import MERGED_WIDTH
from oarlock.layouts.tables import Plan


@pytest.fixture
def attends():
    return True


@pytest.fixture
def gathers(monkeypatch):
    """Every gather of a row that is read, by its blocks."""
    seen, apart = [], Pages.apart
    monkeypatch.setattr(Pages, "apart", lambda self, ids, n: seen.append(ids.tolist()) or apart(self, ids, n))
    return seen


def family(pool, length, count, *others):
    """``count`` rows that go on from one of ``length`` tokens, behind rows of their own."""
    parent, group = pool.group(length), pool.group(*others)
    for _ in range(count):
        group.join(parent)
    parent.keep([])
    return group


def test_a_rows_blocks_behind_a_prefix_are_not_taken_for_all_of_them(pool):
    """One forward may ask for both: a model that masks some layers and not others."""
    plan = plan_of(family(pool(), 40, 2))
    own = plan.rows[0].ids
    assert plan.row(0, 1).tolist() == own[1:].tolist()
    assert plan.row(0).tolist() == own.tolist()


@pytest.mark.parametrize("length", [16, 40, 100])
def test_nothing_is_gathered_and_every_row_sees_its_own(pool, gathers, length):
    group = family(pool(), length, 4)
    for _ in range(20):
        group.step([1] * 4)
    assert gathers == []
    group.check()
    group.check_blocks()


def test_rows_without_company_read_as_ever_beside_those_that_share(pool, gathers):
    """Two families, a lone row between them, in an order of their own, and rows that rest."""
    pool = pool()
    group = family(pool, 50, 3, 21)
    group.join(family(pool, 35, 2))
    group.keep([4, 0, 5, 1, 3, 2])
    for widths in ([1] * 6, [1, 0, 1, 0, 1, 1], [1] * 6):
        group.step(widths)
    assert [prefix.rows for prefix in plan_of(group).prefixes()] == [(0, 2), (3, 4, 5)]
    assert gathers == []
    group.step([0, 1, 1, 1, 0, 0])  # each alone in its family: as a row that lies apart
    assert plan_of(group).prefixes()
    group.check()


def plan_of(group):
    widths = [1] * len(group.lists)
    return Plan(group.blocks, group.tables[0], widths, Positions(map(len, group.lists)))


@pytest.mark.parametrize("width", [2, 5, MERGED_WIDTH, MERGED_WIDTH + 1])
def test_windows_see_no_token_of_their_future(pool, width):
    """Rows keep other counts each time, so ragged windows begin at ragged places."""
    group = family(pool(), 37, 3)
    for kept in ([width, 1, 0], [2, width - 1, width], [0, 0, 1]):
        group.step([width, width - 1, width], [min(n, width - (row == 1)) for row, n in enumerate(kept)])
    group.check()


def test_a_longer_prefix_of_some_is_read_by_each(pool, gathers):
    """Of prefixes within prefixes the outer one is read once: what lies behind it is gathered where it must be."""
    pool = pool()
    group = family(pool, 32, 3)
    group.step([16, 16, 1])
    grown = group.take([0])
    group.join(grown)
    group.join(grown)
    gathers.clear()  # wider windows attend row by row
    for _ in range(3):
        group.step([1] * 5)
    (prefix,) = plan_of(group).prefixes()
    assert (prefix.rows, prefix.blocks) == ((0, 1, 2, 3, 4), 2)
    assert all(len(ids) <= 2 for ids in gathers)
    group.check()


def test_only_what_is_gathered_counts_towards_a_new_arrangement(pool, monkeypatch):
    noted, note = [], Blocks.note
    monkeypatch.setattr(Blocks, "note", lambda self, apart: noted.append(apart) or note(self, apart))
    group = family(pool(), 100, 4)
    group.step([1] * 4)
    assert noted[-1] == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bits", [None, 4])
def test_two_softmaxes_make_one(dtype, with_sinks, width, bits):
    """Three heads on each of two key heads: it errs no more than twice what one softmax errs in that precision."""
    heads, kv_heads, size, rows, tokens = 6, 2, 32, 3, 70
    mx.random.seed(3)
    layer = LayerInfo(
        index=0, path="0", kind="full", kv_heads=kv_heads, key_dim=size, value_dim=size, dtype=dtype, attendable=True
    )
    layout, options = PagedLayout(), PagedOptions(block_size=16, bits=bits, group_size=32)
    draw = lambda *shape: (2 * mx.random.normal(shape)).astype(dtype)  # noqa: E731
    parent, cache = (layout.open(layer, options, slots=1, window=1) for _ in range(2))
    parent.add(1)
    parent.begin([tokens], Positions([0]))
    parent.update_and_fetch(draw(1, kv_heads, tokens, size), draw(1, kv_heads, tokens, size))
    parent.commit([tokens])
    for row in range(rows):
        cache.join(parent, [row])
    cache.begin([width] * rows, Positions([tokens] * rows))
    mask = cache.make_mask(width)
    keys, _ = cache.update_and_fetch(draw(rows, kv_heads, width, size), draw(rows, kv_heads, width, size))
    assert len(cache._opened.prefixes()) == 1
    queries, sinks = draw(rows, heads, width, size), draw(heads) if with_sinks else None
    seen = keys.attend(queries, size**-0.5, mask, sinks)
    whole = cache._pages.decode(cache._pages.gathered(cache._opened))
    options = {"scale": size**-0.5, "mask": mask, "sinks": sinks}
    usual = mx.fast.scaled_dot_product_attention(queries, *whole, **options)
    queries, *whole = (x.astype(mx.float32) for x in (queries, *whole))
    exact = mx.fast.scaled_dot_product_attention(queries, *whole, **options)
    errors = [mx.max(mx.abs(x.astype(mx.float32) - exact)).item() for x in (seen, usual)]
    assert (seen.dtype, seen.shape) == (dtype, usual.shape)
    assert errors[0] <= 2 * errors[1] + 1e-5


# --- twins -------------------------------------------------------------------------------------------------


def test_a_prefix_that_is_one_block_too_long_is_found(pool, monkeypatch):
    """The twin: rows read a block of the first one as theirs."""
    prefixes = Plan._prefixes

    def longer(self):
        for prefix in prefixes(self):
            yield type(prefix)(prefix.rows, prefix.first, prefix.blocks + 1, prefix.rests)

    monkeypatch.setattr(Plan, "_prefixes", longer)
    group = family(pool(), 40, 3)
    with pytest.raises((AssertionError, ValueError)):
        group.step([1] * 3)
