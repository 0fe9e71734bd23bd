"""`composite`: the parts of a layer do everything together, and each is chosen, stored and restored by itself."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import errors, hookimpl
from oarlock.core.bind import bind
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import LayerInfo, Positions, RowState
from oarlock.core.manager import build
from oarlock.core.testing import models
from oarlock.layouts.composite import CompositeCache, CompositeLayout
from oarlock.layouts.full import FullCache, FullLayout, FullOptions
from oarlock.layouts.recurrent import RecurrentCache, RecurrentLayout, RecurrentOptions

PARTS = (
    BoundLayer(
        info=LayerInfo(index=3, path="3.0", kind="recurrent", slots=1, state_bytes=8),
        layout=RecurrentLayout(),
        options=RecurrentOptions(),
        reason="",
    ),
    BoundLayer(
        info=LayerInfo(index=3, path="3.1", kind="full", kv_heads=1, key_dim=2, value_dim=2, dtype=mx.float32),
        layout=FullLayout(),
        options=FullOptions(),
        reason="",
    ),
)
LAYOUT = CompositeLayout().compose(PARTS)
INFO = LayerInfo(index=3, path="3", kind="composite", parts=tuple(part.info for part in PARTS))


def step(cache, widths, kept=None):
    """Add tokens as a model does: the state is the sum of the row's keys."""
    cache.begin(widths, Positions(cache.tokens))
    width = max(widths)
    keys = mx.arange(1, len(widths) * width + 1, dtype=mx.float32).reshape(len(widths), 1, width, 1) * mx.ones(2)
    cache[1].update_and_fetch(keys, keys)
    before = cache[0][0] if cache[0][0] is not None else mx.zeros((len(widths), 2))
    cache[0][0] = before + keys[:, 0].sum(axis=1)
    cache.commit(widths if kept is None else kept)


def rows(*lengths):
    cache = LAYOUT.open(INFO, None, slots=1, window=1)
    for length in lengths:
        other = LAYOUT.open(INFO, None, slots=1, window=1)
        other.add(1)
        step(other, [length])
        cache.join(other, [cache.rows])
    return cache


def contents(cache, row):
    state = cache.extract(row)
    return state.tokens, {name: np.array(array).tolist() for name, array in state.arrays().items()}


def test_models_reach_the_parts_by_index():
    cache = rows(3, 1)
    assert isinstance(cache[0], RecurrentCache)
    assert isinstance(cache[1], FullCache)
    assert cache
    first, second = cache
    assert (first, second) == (cache[0], cache[1])
    assert cache.caches == (first, second)
    assert not hasattr(type(cache), "__len__")


def test_it_rewinds_where_all_parts_do():
    assert not rows(1).rewinds
    assert CompositeCache([FullCache(1), FullCache(1)]).rewinds


def test_a_join_that_one_part_refuses_changes_no_part():
    cache, other = rows(2), rows(1)
    other.caches[1].planes = {name: plane.astype(mx.bfloat16) for name, plane in other.caches[1].planes.items()}
    before = contents(cache, 0)
    with pytest.raises(ValueError, match="bfloat16"):
        cache.join(other, [1])
    assert (cache.tokens, contents(cache, 0)) == ((2,), before)
    with pytest.raises(TypeError, match="2 caches"):
        cache.join(FullCache(1), [])


def test_a_row_is_stored_under_the_names_of_its_parts_and_restored_by_their_layouts():
    cache = rows(3, 2)
    state = cache.extract(0)
    assert state.layout == "composite"
    assert set(state.arrays()) == {"0.state0", "1.keys", "1.values"}
    assert state.meta() == {"0.slots": "1", "0.layout": "recurrent", "1.layout": "full", "1.reads": "padded"}
    back = LAYOUT.restore(state)
    assert back.tokens == (3,)
    assert contents(back, 0) == contents(cache, 0)
    step(back, [1])
    assert contents(back, 0) != contents(cache, 0)
    cache.join(back, [2])
    assert cache.tokens == (3, 2, 4)


def test_a_state_of_other_layouts_is_not_restored():
    state = rows(2).extract(0)
    other = RowState(layout="composite", tokens=2, arrays=state.arrays(), meta={**state.meta(), "1.layout": "paged"})
    with pytest.raises(ValueError, match=r"3\.1.*'full'.*'paged'"):
        LAYOUT.restore(other)


@pytest.mark.parametrize(("tokens", "wanted"), [(2, 0), (3, 3), (7, 3)])
def test_a_prefix_is_reused_where_every_part_can(tokens, wanted):
    assert rows(3).reusable(tokens) == wanted
    assert CompositeCache([rows(3)[1]]).reusable(2) == 2


# --- bind ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Other(FullLayout):
    """`full` under another name."""

    name: str = "other"


class Plugin:
    def __init__(self, choose=None):
        self._choose = choose

    @hookimpl
    def register_layouts(self, register):
        register(Other())

    @hookimpl
    def choose_layout(self, layer, model):
        return self._choose(layer) if self._choose else None


@pytest.fixture(scope="module")
def falcon():
    return models.build("falcon_h1", mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=32)


def bound(model, layouts=None, choose=None):
    settings = EngineConfig.load({"scheduler": {"verify": False}, "layouts": layouts or {}})
    return bind(model, settings, build(settings, plugins=[Plugin(choose)]))


def chosen(plan):
    return ["+".join(part.layout.name for part in layer.parts) for layer in plan.layers]


def test_each_part_is_chosen_by_path_by_kind_or_by_a_plugin(falcon):
    assert chosen(bound(falcon)) == ["recurrent+full"] * 4
    assert chosen(bound(falcon, {"full": "other"})) == ["recurrent+other"] * 4
    by_path = chosen(bound(falcon, {"layers": {"1.1": "other"}}))
    assert by_path == ["recurrent+full", "recurrent+other", *["recurrent+full"] * 2]
    plugged = bound(falcon, choose=lambda layer: "other" if layer.path == "2.1" else None)
    assert chosen(plugged)[2] == "recurrent+other"
    lines = plugged.explain()
    assert (lines[2]["choice"], lines[2]["reason"]) == (
        "recurrent + other",
        "the own layout of kind recurrent; hook choose_layout",
    )


def test_a_part_that_its_layout_cannot_hold_is_refused_by_its_path(falcon):
    with pytest.raises(errors.LayoutRefused) as caught:
        bound(falcon, {"layers": {"1.0": "other"}})
    assert (caught.value.layer, caught.value.layout) == ("1.0", "other")


def test_the_bytes_of_a_bound_hybrid_are_what_it_allocates(falcon):
    plan = bound(falcon)
    caches = plan.open_caches(slots=1, window=1)
    for cache in caches:
        cache.add(1)
        cache.begin([5], Positions((0,)))
    falcon(mx.zeros((1, 5), dtype=mx.uint32), cache=caches)
    for cache in caches:
        cache.commit([5])
    assert plan.bytes_at(5) == sum(cache.nbytes for cache in caches)
