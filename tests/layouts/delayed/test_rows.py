"""Plain and packed rows side by side: what models read, what neighbours share, and how rows come and go."""

import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import Positions
from oarlock.layouts.delayed import DelayedCache, DelayedLayout
from oarlock.layouts.full import FullCache
from oarlock.layouts.mixed import SharedKeysValues
from oarlock.layouts.packed import KeysValues
from oarlock.layouts.rotating import RotatingCache

STOP = 5


# --- what models and neighbours see ------------------------------------------------------------------------------------


def fetched(cache, widths=None):
    """Return the mask and what attention gets in a forward that is undone."""
    widths = widths or [1] * cache.rows
    cache.begin(widths, Positions(cache.tokens))
    mask = cache.make_mask(max(widths))
    seen = cache.update_and_fetch(*(mx.ones((cache.rows, 2, max(widths), size)) for size in (32, 64)))
    cache.commit([0] * cache.rows)
    return mask, *seen


def test_rows_in_one_cache_are_read_as_there(mirror, delayed_kind):
    """17.11: plain arrays or packed handles, and no mask at equal lengths; a mixed batch gets a handle of both."""
    plain, packed = mirror(kind=delayed_kind(), lengths=(3, 3)), mirror(kind=delayed_kind(), lengths=(9, 9))
    mask, keys, _ = fetched(plain.cache)
    assert mask is None
    assert isinstance(keys, mx.array)
    mask, keys, _ = fetched(packed.cache)
    assert mask is None
    assert isinstance(keys, KeysValues)
    plain.join(packed)
    mask, keys, values = fetched(plain.cache)
    assert mask.shape == (4, 1, 1, 10)
    assert isinstance(keys, SharedKeysValues)
    assert (keys.shape, values.shape) == ((4, 2, 10, 32), (4, 2, 10, 64))
    assert isinstance(fetched(mirror(kind=delayed_kind(attends=False), lengths=(3, 9)).cache)[1], mx.array)


def test_rows_stand_in_order_once_all_are_packed(mirror, delayed_kind):
    rows = mirror(kind=delayed_kind(), lengths=(2, 3, 4))
    for _ in range(6):
        rows.step([1, 1, 1])
    assert isinstance(fetched(rows.cache)[1], KeysValues)
    rows.check()


def check_columns(make):
    """Beside a plain ring with the same past: so layers of both, and of other stops, share a mask."""
    delayed, plain = make(True), make(False)
    for step in range(20):
        widths = [1, 1, 1] if step % 5 else [4, 4, 4]
        for cache in (delayed, plain):
            cache.begin(widths, Positions(cache.tokens))
        assert delayed.columns(widths) == plain.columns(widths)
        masks = [cache.make_mask(widths[0]) for cache in (delayed, plain)]
        if isinstance(masks[1], mx.array):
            assert mx.array_equal(*masks)
        else:
            assert masks[0] == masks[1]
        for cache in (delayed, plain):
            cache.update_and_fetch(*(mx.ones((3, 2, widths[0], size)) for size in (32, 64)))
            cache.commit(widths)
        if step == 7:
            for cache in (delayed, plain):
                cache.keep([2, 0])
                cache.add(1)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("window", [None, 8])
def test_columns_are_those_of_a_plain_layer(mirror, delayed_kind, ring_kind, window, keep):
    """17.38: a ring that is packed keeps its columns and its phase."""
    kind = {True: delayed_kind(window, keep, stop=7), False: ring_kind(window, keep) if window else None}

    def make(delayed):
        caches = mirror(kind=kind[delayed]) if kind[delayed] else mirror()
        caches.cache.add(3)
        caches.cache.begin([2, 5, 1], Positions((0, 0, 0)))
        caches.cache.update_and_fetch(*(mx.ones((3, 2, 5, size)) for size in (32, 64)))
        caches.cache.commit([2, 5, 1])
        return caches.cache

    check_columns(make)


class LaysOutAnew(DelayedCache):
    """Packs a ring in temporal order."""

    def _pack(self, rows):
        if rows and isinstance(self.plain, RotatingCache):
            self.plain.ring, columns = self.plain.ring.relaid(self.plain.tokens, self.plain.ring.slack)
            columns = columns if isinstance(columns, mx.array) else mx.arange(columns.stop)[None]
            self.plain.planes = {
                name: mx.take_along_axis(plane, columns[:, None, :, None], axis=2)
                for name, plane in self.plain.planes.items()
            }
        super()._pack(rows)


def test_a_ring_that_moves_when_it_is_packed_is_found(mirror, delayed_kind, ring_kind):
    with pytest.raises(AssertionError):
        test_columns_are_those_of_a_plain_layer(
            mirror, lambda *args, **named: delayed_kind(*args, **named, cache_type=LaysOutAnew), ring_kind, 8, 0
        )


@pytest.mark.parametrize("lengths", [(3, 2), (9, 2), (9, 12)])
def test_models_may_replace_the_keys_by_themselves(mirror, delayed_kind, lengths):
    """Some tie to them what nothing else reads, in whatever form they are."""
    rows = mirror(kind=delayed_kind(), lengths=lengths)
    for _ in range(3):
        rows.step([1, 1])
        rows.cache.keys = mx.depends(rows.cache.keys, [mx.zeros(1)])
        rows.cache.values = mx.depends(rows.cache.values, [mx.zeros(1)])
    rows.step([1, 1])
    rows.check()


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("length", [0, 3, STOP, 6, 20])
def test_a_state_says_in_which_form_it_is(mirror, delayed_kind, window, length):
    rows = mirror(kind=delayed_kind(window), lengths=(length, 2))
    state = rows.cache.extract(0)
    ring = {} if window is None else {"window": "8", "keep": "0"}
    said = {"stop": "5", "packed": str(int(length > STOP)), "bits": "4", "group_size": "32", "attends": "1", **ring}
    said["bytes"] = f"{rows.cache.plain.column_bytes} {rows.cache.packed.column_bytes}"
    assert state.meta() == said
    assert (state.layout, state.tokens) == ("delayed", length)
    assert (DelayedLayout().restore(state).extract(0).meta()) == said


def test_a_prefix_of_a_packed_row_is_not_taken_for_a_plain_one(mirror, delayed_kind):
    """17.36."""
    packed, plain = (mirror(kind=delayed_kind(), lengths=(n,)) for n in (9, 4))
    assert [packed.cache.reusable(n) for n in (0, 4, 5, 8, 9, 12)] == [0, 0, 5, 8, 9, 9]
    assert [plain.cache.reusable(n) for n in (0, 3, 4, 5)] == [0, 3, 4, 4]
    packed.join(plain)
    assert [packed.cache.reusable(n) for n in (3, 5)] == [0, 0]
    assert mirror(kind=delayed_kind(8), lengths=(20,)).cache.reusable(12) == 0
    assert mirror(kind=delayed_kind(stop=1), lengths=(9,)).cache.reusable(1) == 1


def test_rows_join_rows_of_their_own_storage_only(mirror, delayed_kind):
    """Another stop, other bits, a plain cache: refused, and nothing has changed."""
    rows = mirror(kind=delayed_kind(), lengths=(3, 9))
    others = [delayed_kind(stop=6), delayed_kind(bits=8), delayed_kind(8)]
    for other in [mirror(kind=kind, lengths=(9, 2)).cache for kind in others] + [FullCache(1)]:
        with pytest.raises(TypeError, match="cannot join"):
            rows.cache.join(other, range(2, 2 + other.rows))
        rows.step([1, 1])
        rows.check()
    with pytest.raises(ValueError, match="free ones"):
        rows.cache.join(mirror(kind=delayed_kind(), lengths=(1,)).cache, [1])
    with pytest.raises(ValueError, match="2 rows"):
        rows.cache.begin([1], Positions((3,)))


def test_a_leave_moves_no_more_than_a_row_in_each_cache(mirror, delayed_kind, monkeypatch):
    rows = mirror(kind=delayed_kind(), lengths=(3, 9, 1, 12, 2, 20, 4, 8))
    orders = []
    for cache in (rows.cache.plain, rows.cache.packed):
        kept = cache.keep
        monkeypatch.setattr(cache, "keep", lambda order, kept=kept: (orders.append(list(order)), kept(order)))
    rows.keep([7, 1, 2, 3, 4, 5, 6])
    assert all(sum(new != old for new, old in enumerate(order)) <= 1 for order in orders)
    rows.check()
