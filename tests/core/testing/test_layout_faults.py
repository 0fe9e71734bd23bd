"""The kit against layouts with one fault each: the clause that speaks of it must break, and say after what."""

import itertools
from typing import ClassVar

import attrs
import mlx.core as mx
import pytest

from oarlock.core.contracts.layout import Positions, RowState
from oarlock.core.testing.layouts import LayoutContract, violations
from oarlock.layouts.coded import CodedLayout
from oarlock.layouts.composite import CompositeCache, CompositeLayout
from oarlock.layouts.delayed import DelayedCache, DelayedLayout
from oarlock.layouts.full import FullCache, FullLayout
from oarlock.layouts.joins import check_cut
from oarlock.layouts.packed import KeysValues
from oarlock.layouts.planes import column_bytes
from oarlock.layouts.quantized import QuantizedCache, QuantizedLayout, QuantizedOptions, packed_of
from oarlock.layouts.reads import RowReads
from oarlock.layouts.recurrent import RecurrentCache, RecurrentLayout
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache, RotatingLayout
from oarlock.layouts.tables import Plan

# --- full --------------------------------------------------------------------------------------------------


class SeesPadding(FullCache):
    """Every row's mask is the longest row's."""

    def make_mask(self, N, return_array=False, window_size=None):
        if self._starts.equal:
            return super().make_mask(N, return_array, window_size)
        columns = mx.arange(self._starts.longest + N)
        return columns[-N:, None] >= columns


class DropsAColumn(FullCache):
    """Copies one token too few."""

    def _copy(self, indices):
        part = super()._copy(indices)
        for plane in part.planes.values():
            plane[:, :, max(0, max(map(self._held, indices), default=0) - 1) :] = 0
        return part


class MissesACommit(FullCache):
    """Keeps a whole window whenever some of it is kept."""

    def commit(self, kept):
        super().commit([self._written if n else 0 for n in kept])


class HandsOutItself(FullCache):
    """A stored row is the live buffers."""

    def extract(self, row):
        return RowState(layout="planted", tokens=self.tokens[row], arrays=dict(self.planes))


class ClearsNothing(FullCache):
    """What a slot held before stays there."""

    def _clear(self, slots, column):
        pass


class KeepsSorted(FullCache):
    """Believes that rows leave in order."""

    def keep(self, indices):
        super().keep(sorted(indices))


class KeepsInPlace(FullCache):
    """Moves row by row, overwriting rows that have yet to move."""

    def keep(self, indices):
        for new, old in enumerate(indices):
            self.keys[new], self.values[new] = self.keys[old], self.values[old]
        self._set_tokens(tuple(self._tokens[old] for old in indices))


class AlwaysArray(FullCache):
    """Gives an array where the serial cache gives none."""

    def make_mask(self, N, return_array=False, window_size=None):
        return super().make_mask(N, True, window_size) if N > 1 else mx.ones((1, 1), dtype=mx.bool_)


class CountsTheOthers(FullCache):
    """Where it holds nothing yet, makes a placeholder with as many rows as the joiner has."""

    def join(self, other, slots):
        if self.keys is None:
            self._set_tokens((0,) * other.rows)
        super().join(other, range(self.rows, self.rows + other.rows))


class FiltersBelowZero(FullCache):
    """Takes padding away from a row that has none yet."""

    def keep(self, indices):
        super().keep(indices)
        if self.keys is None:
            self._set_tokens(tuple(tokens - 3 for tokens in self._tokens))


class ForgetsTheLast(FullCache):
    """Of several joiners the last is a copy of the one before."""

    def join(self, other, slots):
        super().join(other, slots)
        if other.rows > 1 and self.planes:
            for plane in self.planes.values():
                plane[self.rows - 1] = plane[self.rows - 2]


class JoinsAnywhere(FullCache):
    """Asks nobody which slots are free."""

    def join(self, other, slots):
        super().join(other, range(self.rows, self.rows + other.rows))


class OnePosition(FullCache):
    """The longest row's position is everybody's."""

    @property
    def offset(self):
        return self._starts.longest + self._written


class GivesNothingBack(FullCache):
    """Is never compacted."""

    def compact(self):
        pass


class CopiesItAll(FullCache):
    """Makes a new buffer for every append."""

    def update_and_fetch(self, keys, values):
        fetched = super().update_and_fetch(keys, values)
        self.planes = {name: mx.concatenate([plane[:1], plane[1:]]) for name, plane in self.planes.items()}
        return fetched


class TakesCopies(FullCache):
    """Never by reference."""

    def take(self, indices):
        return self._copy(indices)


class ProjectsWhatIsNeeded(FullCache):
    """Forgets that buffers grow by more than is asked for."""

    def projected(self, tokens, *, exact=False):
        return super().projected(tokens, exact=True)


class ProjectsToday(FullCache):
    """Says of rows to come what there is."""

    def projected(self, tokens, *, exact=False):
        return super().projected(tokens, exact=True) if exact else max(self.nbytes, 1 << 21)


class ProjectsAtMost(FullCache):
    """Says what growth may come to where it is asked for the bytes of rows that are reserved for."""

    def projected(self, tokens, *, exact=False):
        return super().projected(tokens)


class ReservesForItsOwn(FullCache):
    """Makes no room for who will join."""

    def reserve(self, tokens):
        super().reserve(tokens[: self.rows])


class KeepsSlots(FullCache):
    """Makes room and gives no slot back."""

    def reserve(self, tokens):
        super().reserve([*tokens, *[0] * (self._reserve - len(tokens))])


class CutsTooShort(FullCache):
    """Loses tokens where it makes room."""

    def reserve(self, tokens):
        super().reserve(tokens)
        self.planes = {name: mx.array(plane) for name, plane in self.planes.items()}
        for plane in self.planes.values():
            plane[:, :, 20:] = 0
        mx.eval(self.arrays())


class CopiesToReserve(FullCache):
    """Copies all rows even where all is as asked."""

    def reserve(self, tokens):
        super().reserve(tokens)
        self.planes = {name: mx.concatenate([plane[:1], plane[1:]]) for name, plane in self.planes.items()}


class ReservesLess(FullCache):
    """Does not mind that less is asked for than there is."""

    def reserve(self, tokens):
        super().reserve([max(each) for each in itertools.zip_longest(tokens, self.tokens, fillvalue=0)])


class ReusesTooMuch(FullCache):
    """Promises what is not there."""

    def reusable(self, tokens):
        return tokens


class CutsNothing(FullCache):
    """Goes on behind what was cut off."""

    def cut(self, tokens):
        check_cut(tokens, self.reusable(tokens), self.tokens)


class CutsUnasked(FullCache):
    """Cuts rows to more than they have."""

    def cut(self, tokens):
        self._set_tokens((tokens,) * self.rows)


class TakesAnyGeometry(FullCache):
    """Does not look at what joins: one head is written to all."""

    def _agree(self, other):
        pass


class AsksTheLayer(FullCache):
    """Knows what a column takes only where a layer said so."""

    @property
    def column_bytes(self):
        return self._column


class Cached:
    """Makes layouts whose caches are of one type."""

    def __init__(self, cache):
        self.cache = cache

    def __call__(self):
        @attrs.frozen
        class Planted(FullLayout):
            name: str = "planted"
            cache_type: type = self.cache

            def open(self, layer, options, *, slots, window):
                return self.cache_type(slots).sized(column_bytes(layer))

            def restore(self, state):
                made = self.cache_type(1)
                made.adopt(state.arrays(), state.tokens)
                return made

        return Planted()


class CountsOneLess(FullLayout):
    """Says less than it takes."""

    def bytes_at(self, layer, options, tokens):
        return super().bytes_at(layer, options, max(1, tokens - 1))


class KnowsNoGeometry(FullLayout):
    """A cache without buffers cannot say what a row will take."""

    def open(self, layer, options, *, slots, window):
        return FullCache(slots)


class Holds(FullLayout):
    """Never lets go of what it opened."""

    opened: list = []  # noqa: RUF012 - the fault

    def open(self, layer, options, *, slots, window):
        cache = super().open(layer, options, slots=slots, window=window)
        self.opened.append(cache)
        return cache


# --- the other storages ------------------------------------------------------------------------------------


class OffByOne(RotatingLayout):
    """A window too wide by one, once it has wrapped."""

    def open(self, layer, options, *, slots, window):
        return RotatingCache(slots, Ring(window=layer.window + 1, keep=layer.keep, slack=window - 1))


class KeepsTheRejected(RotatingCache):
    """Once it has wrapped, a row keeps its whole draft."""

    def commit(self, kept):
        wrapped = [n > self.ring.window for n in self._starts]
        super().commit([self._written if n and past else n for n, past in zip(kept, wrapped, strict=True)])


class ShortWindow(RotatingCache):
    """Sees one token too few."""

    def make_mask(self, N, return_array=False, window_size=None):
        return super().make_mask(N, return_array, max(1, self.ring.window - 1))


class LateMask(RotatingCache):
    """The mask is that of the column before: one valid key is hidden, and one that is none is seen."""

    def make_mask(self, N, return_array=False, window_size=None):
        mask = super().make_mask(N, return_array, window_size)
        return mx.roll(mask, 1, axis=-1) if isinstance(mask, mx.array) else mask


class OneHead(RotatingCache):
    """One write head for all rows."""

    def update_and_fetch(self, keys, values):
        starts, self._starts = self._starts, Positions([self._starts.longest] * self.rows)
        fetched = super().update_and_fetch(keys, values)
        self._starts = starts
        return fetched


class KeepsPhases(RotatingCache):
    """Moves rows, and leaves their phases where they were."""

    def keep(self, indices):
        before = self.ring
        super().keep(indices)
        self.ring = before.pick(range(len(indices)))


class JoinsAtOnePhase(RotatingCache):
    """Believes that joiners begin where its own first row does."""

    def join(self, other, slots):
        super().join(other, slots)
        if self.rows > other.rows:
            self.ring = self.ring.pick([*range(self.rows - other.rows), *[0] * other.rows])


class RelaysNothing(RotatingCache):
    """Takes rows of another slack as they are."""

    def _relaid(self, slack):
        return self


class ReusesTheOverwritten(RotatingCache):
    """Believes that what was held once is there."""

    def reusable(self, tokens):
        return min(tokens, *self.tokens)


class ReusesOneBack(RotatingCache):
    """Believes that a window that has turned still has what its last token took the place of."""

    def reusable(self, tokens):
        return super().reusable(tokens) or (tokens if tokens == min(self.tokens) - 1 else 0)


class NoSlack(RotatingCache):
    """Has a window's columns and no more, whatever may be rolled back."""

    def update_and_fetch(self, keys, values):
        slack, self.ring = self.ring, attrs.evolve(self.ring, slack=0)
        new = self.encode(keys, values)
        self._reserve_columns(self.ring.extent(self._starts, keys.shape[2]), new)
        self._write(new, self.ring.places(self._starts, keys.shape[2]))
        self._written = keys.shape[2]
        fetched, self.ring = self.keys_and_values(), slack
        return fetched


class Ringed:
    """Makes rotating layouts whose caches are of one type."""

    def __init__(self, cache):
        self.cache = cache

    def __call__(self):
        class Planted(RotatingLayout):
            def open(planted, layer, options, *, slots, window):  # noqa: N805
                ring = Ring(window=layer.window, keep=layer.keep, slack=window - 1)
                return self.cache(slots, ring).sized(column_bytes(layer))

        return Planted()


class ProjectsNoSlack(RotatingCache):
    """Says what the window takes, not what a method's drafts take beside."""

    def projected(self, tokens, *, exact=False):
        ring, self.ring = self.ring, attrs.evolve(self.ring, slack=0)
        said = super().projected(tokens, exact=exact)
        self.ring = ring
        return said


class PadsTheState(RecurrentCache):
    """Never says which tokens are real."""

    def begin(self, widths, starts):
        super().begin(widths, starts)
        self.lengths = None


class CountsOneState(RecurrentCache):
    """Says of several rows what one takes."""

    def projected(self, tokens, *, exact=False):
        return super().projected(tokens[:1], exact=exact)


class PutsNothingBack(RecurrentCache):
    """An aborted forward stays."""

    def commit(self, kept):
        self._before = list(self.cache)
        super().commit(kept)


class Recurrent:
    """Makes recurrent layouts whose caches are of one type."""

    def __init__(self, cache):
        self.cache = cache

    def __call__(self):
        class Planted(RecurrentLayout):
            def open(planted, layer, options, *, slots, window):  # noqa: N805
                return self.cache(layer.slots, layer.state_bytes)

        return Planted()


class RoundsTwice(QuantizedLayout):
    """Stores other codes than it was given options for."""

    def open(self, layer, options, *, slots, window):
        return super().open(layer, attrs.evolve(options, bits=2), slots=slots, window=window)


class HeedsBooleans(KeysValues):
    """Takes a mask that is added for none."""

    def attend(self, queries, scale, mask, sinks):
        added = isinstance(mask, mx.array) and mask.dtype != mx.bool_
        return super().attend(queries, scale, None if added else mask, sinks)


class HandsOutBooleans(QuantizedCache):
    """Its handles do not know all masks."""

    def decode(self, planes):
        return HeedsBooleans.pair(planes, self.format) if self.attends else super().decode(planes)


class AddsNoMask(QuantizedLayout):
    """Opens such caches for full layers."""

    def open(self, layer, options, *, slots, window):
        cache = super().open(layer, options, slots=slots, window=window)
        if layer.kind == "rotating":
            return cache
        return HandsOutBooleans(slots, cache.format, attends=cache.attends).sized(cache.column_bytes)


class RefusesNothing(QuantizedLayout):
    """Is asked for heads that its groups do not divide."""

    def refuses(self, layer, options):
        return None


class JoinsByHalves(CompositeCache):
    """Leaves the rows in those parts that took them where a later part refuses."""

    def join(self, other, slots):
        if not isinstance(other, CompositeCache):
            super().join(other, slots)
        for part, theirs in zip(self.caches, other.caches, strict=True):
            part.join(theirs, slots)


class Composed(CompositeLayout):
    """Opens such caches."""

    def open(self, layer, options, *, slots, window):
        return JoinsByHalves(super().open(layer, options, slots=slots, window=window).caches)


PLANTED = [
    (Cached(SeesPadding), "test_rows_of_different_lengths"),
    (Cached(DropsAColumn), "test_a_stored_row_survives"),
    (Cached(MissesACommit), "test_a_window_is_cut"),
    (Cached(HandsOutItself), "test_a_stored_row_is_owned"),
    (Cached(ClearsNothing), "test_what_a_broken_row_left"),
    (Cached(KeepsSorted), "test_rows_are_kept"),
    (Cached(KeepsInPlace), "test_rows_are_kept"),
    (Cached(AlwaysArray), "test_a_lone_row"),
    (Cached(AlwaysArray), "test_rows_of_one_length"),
    (Cached(ForgetsTheLast), "test_rows_join_together"),
    (Cached(CountsTheOthers), "test_rows_join"),
    (Cached(FiltersBelowZero), "test_rows_leave_before"),
    (Cached(JoinsAnywhere), "test_a_join_that_cannot_be"),
    (Cached(TakesAnyGeometry), "test_a_join_that_cannot_be"),
    (Composed, "test_a_join_that_cannot_be"),
    (Cached(OnePosition), "test_positions_are"),
    (Cached(GivesNothingBack), "test_what_is_not_needed"),
    (Cached(CopiesItAll), "test_no_change_copies"),
    (Cached(TakesCopies), "test_all_rows_taken"),
    (Cached(ReusesTooMuch), "test_what_can_be_reused"),
    (AddsNoMask, "test_masks_of_the_models_own"),
    (Ringed(ReusesTheOverwritten), "test_what_can_be_reused"),
    (Ringed(ReusesOneBack), "test_a_prefix_that_is_reused"),
    (Cached(CutsNothing), "test_a_prefix_that_is_reused"),
    (Cached(CutsUnasked), "test_what_cannot_be_reused"),
    (Cached(AsksTheLayer), "test_a_row_that_comes_back"),
    (Cached(ProjectsWhatIsNeeded), "test_growth_was"),
    (Cached(ProjectsToday), "test_growth_was"),
    (Ringed(ProjectsNoSlack), "test_growth_was"),
    (Recurrent(CountsOneState), "test_growth_was"),
    (Cached(ReservesForItsOwn), "test_reserved_room"),
    (Cached(KeepsSlots), "test_reserved_room"),
    (Cached(CutsTooShort), "test_reserved_room"),
    (Cached(CopiesToReserve), "test_reserved_room"),
    (Ringed(ProjectsNoSlack), "test_reserved_room"),
    (Cached(GivesNothingBack), "test_compacted_is"),
    (Cached(ReservesLess), "test_compacted_is"),
    (RefusesNothing, "test_heads_of_any"),
    (KnowsNoGeometry, "test_a_row_to_come"),
    (Cached(ProjectsAtMost), "test_a_row_to_come"),
    (CountsOneLess, "test_a_row_to_come"),
    (CountsOneLess, "test_bytes_are"),
    (Holds, "test_everything_is_released"),
    (OffByOne, "test_a_lone_row"),
    (Ringed(KeepsTheRejected), "test_a_window_is_cut"),
    (Ringed(NoSlack), "test_a_window_is_cut"),
    (Ringed(RelaysNothing), "test_rows_join_together"),
    (Ringed(ShortWindow), "test_a_lone_row"),
    (Ringed(LateMask), "test_rows_of_different_lengths"),
    (Ringed(OneHead), "test_rows_of_different_lengths"),
    (Ringed(KeepsPhases), "test_rows_are_kept"),
    (Ringed(JoinsAtOnePhase), "test_rows_join"),
    (Recurrent(PadsTheState), "test_rows_of_different_lengths"),
    (Recurrent(PutsNothingBack), "test_a_forward_is_undone"),
]


@pytest.mark.parametrize(("make", "clause"), PLANTED, ids=lambda value: _named(value))
def test_the_clause_on_a_fault_breaks(make, clause):
    class Planted(LayoutContract):
        layout = make()

    name, error = next(violations(Planted, clause), (None, None))
    assert name is not None, f"{clause} passed"
    assert str(error)


def _named(value):
    return value if isinstance(value, str) else getattr(getattr(value, "cache", value), "__name__", "")


@pytest.mark.parametrize("cache", [SeesPadding, MissesACommit, KeepsSorted])
def test_random_lives_find_it_too_and_show_the_shortest(cache):
    """What is left of a life is a few operations, each as one could type it."""

    class Planted(LayoutContract):
        layout = Cached(cache)()

    _, error = next(violations(Planted, "test_any_order"))
    assert "; after open(" in str(error)
    assert str(error).count("(") < 30, error


class PacksEarly(DelayedCache):
    """Packs a row that comes to its stop, not when it gets another token."""

    def commit(self, kept):
        super().commit(kept)
        self._pack([row for row, n in enumerate(self.plain.tokens) if n == self.stop])


class JoinsWhatWasPacked(DelayedCache):
    """Takes rows that are packed at other lengths."""

    def join(self, other, slots):
        super().join(DelayedCache(other._parts, self.stop), slots)


class ProjectsEarly(DelayedCache):
    """Counts a row twice at its stop already."""

    def rooms(self, tokens):
        return super().rooms([n + (n == self.stop) for n in tokens])


@pytest.mark.parametrize(
    ("cache", "clause"),
    [
        (PacksEarly, "test_bytes_change"),
        (JoinsWhatWasPacked, "test_rows_of_other_options"),
        (ProjectsEarly, "test_a_row_to_come"),
    ],
)
def test_a_fault_of_a_storage_that_changes_shows(cache, clause):
    class Opens(DelayedLayout):
        def open(self, layer, options, *, slots, window):
            opened = super().open(layer, options, slots=slots, window=window)
            return cache(opened._parts, opened.stop)

    class Planted(LayoutContract):
        layout = Opens()
        options: ClassVar = {"start": 18}

    assert next(violations(Planted, clause), None)


def test_other_codes_show_beside_the_tolerance():
    class Planted(LayoutContract):
        layout = RoundsTwice(name="planted")
        levels = False
        tolerance = 0.02

    assert next(violations(Planted, "test_a_lone_row"), None)


@attrs.frozen
class Steps:
    """8 bits, in steps that some tokens have in common: those of a forward, or also those of all its rows."""

    axes: str = "rows"

    def encode(self, name, array):
        largest = mx.abs(array).max(axis=(1, 2, 3) if self.axes == "tokens" else None, keepdims=True)
        steps = mx.maximum(mx.broadcast_to(largest, (*array.shape[:3], 1)) / 127, 1e-9)
        return {"numbers": mx.round(array / steps).astype(mx.int8), "steps": steps}

    def decode(self, name, codes, dtype):
        return (codes["numbers"] * codes["steps"]).astype(dtype)


@pytest.mark.parametrize(
    ("axes", "clause"), [("rows", "test_rows_of_different_lengths"), ("tokens", "test_how_a_prompt_came")]
)
def test_codes_that_tokens_have_in_common_show(axes, clause):
    """Beside a tolerance that hides them from exact storage."""

    class Planted(LayoutContract):
        layout = CodedLayout("planted", Steps)
        options: ClassVar = {"axes": axes}
        tolerance = 0.05

    assert next(violations(Planted, clause), None)


def test_a_handle_of_another_shape_shows(monkeypatch):
    """Uneven rows of `paged` are read row by row, so nothing but the kit looks at the shape."""

    class Planted(LayoutContract):
        layout = "paged"

    made = RowReads.__init__

    def narrow(self, pages, plan, name):
        made(self, pages, plan, name)
        self.shape = (*self.shape[:2], plan.starts.longest, self.shape[3])

    monkeypatch.setattr(RowReads, "__init__", narrow)
    assert next(violations(Planted, "test_masks_of"), None)


def test_a_view_past_the_last_block_shows(monkeypatch):
    class Planted(LayoutContract):
        layout = "paged"

    def anywhere(plan):
        first, *others = (share.first for share in plan.rows)
        return (first, others[0] - first if others else 1) if plan.starts.equal else None

    monkeypatch.setattr(Plan, "_spacing", anywhere)
    assert next(violations(Planted, "test_what_rows_of_one_length_left"), None)


def test_a_mask_that_nobody_heeds_shows(monkeypatch):
    class Planted(LayoutContract):
        layout = "paged"

    attend = RowReads.attend
    monkeypatch.setattr(RowReads, "attend", lambda self, q, scale, mask, sinks: attend(self, q, scale, "causal", sinks))
    assert next(violations(Planted, "test_masks_as_arrays"), None)
    assert next(violations(Planted, "test_rows_of_different"), None) is None


@attrs.frozen
class AnyBits(QuantizedOptions):
    """Allows what MLX cannot."""

    bits: int = attrs.field(default=8, validator=attrs.validators.in_((7, 8)))


def test_an_option_that_is_allowed_and_does_not_work_shows():
    class Planted(LayoutContract):
        layout = QuantizedLayout(name="planted", options=AnyBits)

    assert next(violations(Planted, "test_allowed_options"), None)


def test_a_handle_where_none_is_taken_shows(monkeypatch):
    """A row that comes back must not forget that its layer takes arrays."""

    class Planted(LayoutContract):
        layout = "quantized"

    monkeypatch.setattr(QuantizedLayout, "restore", lambda self, state: _attending(packed_of(state.meta()), state))
    assert "-arrays" in next(violations(Planted, "test_a_restored_row_goes_on"))[0]


def _attending(cache, state):
    cache.adopt(state.arrays(), state.tokens)
    cache.attends = True
    return cache
