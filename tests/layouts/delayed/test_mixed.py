"""Attention over rows in several storages: every form of mask, columns on either side, sinks and head geometries."""

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import KeyValues
from oarlock.layouts.mixed import Share, SharedKeysValues, Shares
from oarlock.layouts.packed import Format, KeysValues

EIGHT = Format(bits=8, group_size=32)
COLUMNS = {"plain": 9, "packed": 6}
PLACES = {"plain": [3, 0], "packed": [1, 4, 2]}
ORDER = [1, 2, 4, 0, 3]


def shares(right):
    """Two plain rows of nine columns and three packed ones of six; and the arrays that they stand for."""
    mx.random.seed(5)
    each, arrays = [], []
    for name, places in PLACES.items():
        keys, values = (mx.random.normal((len(places), 2, COLUMNS[name], size)) for size in (64, 32))
        if name == "packed":
            planes = {**EIGHT.pack("keys", keys), **EIGHT.pack("values", values)}
            keys, values = (EIGHT.unpack(x, planes) for x in ("keys", "values"))
        arrays.append((keys, values))
        seen = KeysValues.pair(planes, EIGHT) if name == "packed" else (keys, values)
        each.append(Share(mx.array(places), *seen))
    more = [(0, 0), (0, 0), (3, 0) if right else (0, 3), (0, 0)]
    whole = [mx.concatenate([x, mx.pad(y, more)])[mx.array(ORDER)] for x, y in zip(*arrays, strict=True)]
    return Shares(each, mx.array(ORDER), right), whole


def masks(heads, width, right):
    """Masks over nine columns that show packed rows none but their own six."""
    column = mx.arange(9)
    own = mx.array([[place in PLACES["plain"]] for place in range(5)]) | (column >= 3 if right else column < 6)
    seen = (mx.random.uniform(shape=(5, 1, width, 9)) > 0.4) & own[:, None, None]
    first = column == (8 if right else 0)
    common = (mx.random.uniform(shape=(width, 9)) > 0.4) & (column >= 3 if right else column < 6) | first
    added = mx.random.normal((5, heads, width, 9)) + mx.where(own[:, None, None], 0.0, -mx.inf)
    each_head = mx.broadcast_to(common, (1, heads, width, 9))
    return {"rows": seen | first, "all rows": common, "one": common[None, None], "heads": each_head, "added": added}


def check(shares_of, heads, width, right, sinks):
    """Against plain attention over the stacked arrays."""
    made, whole = shares_of(right)
    handle, other = SharedKeysValues.pair(made)
    assert isinstance(handle, KeyValues)
    assert (handle.shape, other.shape) == (whole[0].shape, whole[1].shape)
    assert handle.dtype == other.dtype == mx.float32
    queries = mx.random.normal((5, heads, width, 64))
    sinks = mx.random.normal((heads,)) if sinks else None
    for name, mask in masks(heads, width, right).items():
        wanted = mx.fast.scaled_dot_product_attention(queries, *whole, scale=0.2, mask=mask, sinks=sinks)
        got = handle.attend(queries, 0.2, mask, sinks)
        assert got.shape == wanted.shape
        worst = mx.max(mx.abs(got - wanted)).item()
        assert worst < 2e-5, f"mask {name}: {worst}"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(2, 1), (8, 1), (4, 3)])
def test_attention_is_that_over_the_stacked_rows(heads, width, right, sinks):
    check(shares, heads, width, right, sinks)


@pytest.mark.parametrize("right", [False, True])
def test_arrays_are_filled_up_on_the_side_that_no_row_sees(right):
    made, whole = shares(right)
    plain = [Share(share.rows, x, y) for share, (x, y) in zip(made.each, unpacked(made), strict=True)]
    assert all(mx.array_equal(*pair) for pair in zip(Shares(plain, made.order, right).stacked(), whole, strict=True))


def unpacked(made):
    for share in made.each:
        pair = (share.keys, share.values)
        if not isinstance(share.keys, mx.array):
            pair = (EIGHT.unpack(name, share.keys._planes) for name in ("keys", "values"))
        yield pair


class FirstRows(Shares):
    """Gives every cache the mask's first rows."""

    def masked(self, share, mask):
        return super().masked(Share(mx.arange(share.rows.size), share.keys, share.values), mask)


class FirstColumns(Shares):
    """And its first columns."""

    def masked(self, share, mask):
        return Shares(self.each, self.order, not self.right).masked(share, mask)


@pytest.mark.parametrize("broken", [FirstRows, FirstColumns])
@pytest.mark.parametrize("right", [False, True])
def test_a_mask_cut_wrongly_is_found(broken, right):
    def planted(right):
        made, whole = shares(right)
        return broken(made.each, made.order, made.right), whole

    with pytest.raises(AssertionError):
        check(planted, 4, 3, right, False)
