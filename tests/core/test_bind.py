"""Binding: one layout a layer, chosen and explained, everything that cannot be refused before the first request."""

import math

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from oarlock.core import Request, errors, hookimpl
from oarlock.core.bind import bind
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache, FullLayout, FullOptions
from oarlock.plugins.policies import FairShare


@attrs.frozen
class Options:
    size: int = attrs.field(default=3, validator=attrs.validators.instance_of(int))


class Layout:
    """`full` under another name."""

    kinds = frozenset({"full"})
    refuses, bytes_at, restore = FullLayout().refuses, FullLayout().bytes_at, FullLayout().restore

    def __init__(self, name, options=FullOptions, refusal=None, kinds=kinds):
        self.name, self.options, self.kinds = name, options, kinds
        self.refuses = lambda layer, given: refusal
        self.opened = []

    def open(self, layer, options, *, slots, window):
        self.opened.append((layer.path, options, slots, window))
        return FullCache(slots)


class Plugin:
    def __init__(self, *layouts, choose=None):
        self._layouts, self._choose = layouts, choose

    @hookimpl
    def register_layouts(self, register):
        for layout in self._layouts:
            register(layout)

    @hookimpl
    def choose_layout(self, layer, model):
        return self._choose(layer) if self._choose else None


def bound(model, config=None, *layouts, choose=None, **facts):
    settings = EngineConfig.load({"scheduler": {"verify": False}, **(config or {})})
    return bind(model, settings, build(settings, plugins=[Plugin(*layouts, choose=choose)]), **facts)


def names(plan):
    return [layer.layout.name for layer in plan.layers]


# --- choice ----------------------------------------------------------------------------------------------------------


def test_a_kind_has_its_own_layout(tiny):
    plan = bound(tiny)
    assert names(plan) == ["full"] * 3
    assert all("own layout" in layer.reason for layer in plan.layers)


def test_the_config_for_a_layer_goes_before_the_kind_and_a_hook(tiny):
    """Then the kind's, then the first hook's answer, then the kind's own; each with its reason."""
    one, two, three = Layout("one"), Layout("two"), Layout("three")
    config = {"layouts": {"full": "two", "layers": {"1": "one"}}}
    plan = bound(tiny, config, one, two, three, choose=lambda layer: "three")
    assert names(plan) == ["two", "one", "two"]
    assert [layer.reason for layer in plan.layers] == [
        "config layouts.full",
        "config layouts.layers.1",
        "config layouts.full",
    ]
    plan = bound(tiny, {"layouts": {"layers": {"0-1": "one"}}}, one, two, three, choose=lambda layer: "three")
    assert names(plan) == ["one", "one", "three"]
    assert plan.layers[2].reason == "hook choose_layout"
    assert names(bound(tiny, None, one, choose=lambda layer: None)) == ["full"] * 3


def test_options_reach_the_layout(tiny):
    layout = Layout("sized", Options)
    plan = bound(tiny, {"layouts": {"full": {"name": "sized", "size": 8}, "layers": {"2": "sized"}}}, layout)
    assert [layer.options.size for layer in plan.layers] == [8, 8, 3]
    plan.open_caches(slots=4, window=2)
    assert layout.opened[-3:] == [("0", Options(8), 4, 2), ("1", Options(8), 4, 2), ("2", Options(3), 4, 2)]


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"sice": 8}, errors.UnknownConfigKey, {"key": "sice", "section": "layouts.full"}),
        ({"size": "8"}, errors.InvalidConfigValue, {"key": "layouts.full"}),
    ],
)
def test_wrong_options_are_refused(tiny, options, error, facts):
    with pytest.raises(error) as caught:
        bound(tiny, {"layouts": {"full": {"name": "sized", **options}}}, Layout("sized", Options))
    for name, value in facts.items():
        assert getattr(caught.value, name) == value


@pytest.mark.parametrize(
    ("config", "layout", "error", "facts"),
    [
        ({"full": "fulll"}, Layout("x"), errors.UnknownName, {"kind": "layout", "name": "fulll"}),
        ({"full": "ring"}, Layout("ring", kinds={"rotating"}), errors.LayoutRefused, {"layout": "ring", "layer": "0"}),
        (
            {"layers": {"1": "no"}},
            Layout("no", refusal="odd heads"),
            errors.LayoutRefused,
            {"layer": "1", "reason": "odd heads"},
        ),
        ({"layers": {"7": "full"}}, Layout("x"), errors.LayoutRefused, {"layer": "7"}),
        ({"layers": {"0.1": "full"}}, Layout("x"), errors.LayoutRefused, {"layer": "0.1"}),
    ],
)
def test_a_layout_that_cannot_is_refused_with_both_names(tiny, config, layout, error, facts):
    with pytest.raises(error) as caught:
        bound(tiny, {"layouts": config}, layout)
    for name, value in facts.items():
        assert getattr(caught.value, name) == value
        assert str(value) in str(caught.value)


def test_a_hook_that_names_nothing_known_is_an_error(tiny):
    with pytest.raises(errors.UnknownName):
        bound(tiny, None, choose=lambda layer: "nowhere")


@pytest.mark.parametrize(
    ("config", "name"), [({"method": {"name": "plane"}}, "plane"), ({"scheduler": {"policy": "lifo"}}, "lifo")]
)
def test_unknown_names_elsewhere_are_refused(tiny, config, name):
    with pytest.raises(errors.UnknownName) as caught:
        Engine(tiny, config=config)
    assert caught.value.name == name


def test_a_layer_of_no_known_kind_is_refused(tiny, monkeypatch):
    class Odd(KVCache):
        pass

    monkeypatch.setattr(type(tiny), "make_cache", lambda model: [Odd() for _ in model.layers], raising=False)
    with pytest.raises(errors.UnsupportedLayer) as caught:
        Engine(tiny)
    assert (caught.value.layer, caught.value.kind) == ("0", "Odd")


# --- the plan ----------------------------------------------------------------------------------------------------------


def test_the_plan_is_frozen_and_so_are_the_registries(tiny):
    plan = bound(tiny)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.positions = 3
    with pytest.raises(errors.RegistryFrozen):
        plan.plugins.registries.layouts.add(Layout("late"), "somebody")


def test_the_plan_explains_itself(tiny):
    """One line a layer, then what was chosen for the whole, each with its reason."""
    lines = bound(tiny, {"layouts": {"layers": {"1": "one"}}}, Layout("one")).explain()
    layers = [line for line in lines if line["part"].startswith("layer")]
    assert [(line["part"], line["choice"]) for line in layers] == [
        ("layer 0", "full"),
        ("layer 1", "one"),
        ("layer 2", "full"),
    ]
    assert all("heads 2" in line["detail"] and "key size 16" in line["detail"] for line in layers)
    parts = {line["part"]: line for line in lines}
    assert parts["method"]["choice"] == "plain"
    assert {"greedy", "categorical"} <= set(parts["samplers"]["choice"].split(", "))
    assert parts["policy"]["choice"] == "decode_first"
    assert all(line["reason"] for line in lines)
    assert all(type(value) is str for line in lines for value in line.values())


def test_a_policy_takes_its_fields_as_options(tiny):
    """The one registered stays as it is; a field that is unknown, or its name, is refused, and so is a wrong value."""
    chosen = {"name": "fair_share", "patience": 2, "coalesce_s": 0.5}
    plan = bound(tiny, {"scheduler": {"policy": chosen}})
    assert plan.policy == FairShare(patience=2, coalesce_s=0.5)
    assert plan.plugins.resolve("policy", "fair_share") == FairShare()
    (line,) = (line for line in plan.explain() if line["part"] == "policy")
    assert (line["choice"], line["detail"]) == ("fair_share", "patience 2, coalesce_s 0.5")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": "fair_share", "patient": 2}, errors.UnknownConfigKey),
        ({"name": "decode_first", "patience": 2}, errors.UnknownConfigKey),
        *(({"name": "fair_share", "patience": bad}, errors.InvalidConfigValue) for bad in (0, 1.0, True, "4", None)),
        *(({"name": "fifo", "coalesce_s": bad}, errors.InvalidConfigValue) for bad in (-1, math.inf, True, "1")),
    ],
)
def test_wrong_options_of_a_policy_are_refused(tiny, options, error):
    with pytest.raises(error, match=r"scheduler\.policy"):
        bound(tiny, {"scheduler": {"policy": options}})


def test_bytes_are_summed_over_the_layers(tiny):
    plan = bound(tiny)
    assert plan.bytes_at(1) == plan.bytes_at(256) == 3 * 2 * (16 + 16) * 4 * 256
    assert plan.bytes_at(257) == 2 * plan.bytes_at(1)


def test_the_plan_holds_what_requests_are_checked_against(tiny):
    plan = bound(tiny, positions=50, model_type="mine", identity="abc")
    assert (plan.vocabulary, plan.positions, plan.model_type, plan.identity) == (97, 50, "mine", "abc")
    assert bound(tiny).model_type == "llama"


def test_observers_get_the_plan(tiny):
    plans = []

    class Watcher:
        @hookimpl
        def model_bound(self, plan):
            plans.append(plan)

    with Engine(tiny, plugins=[Watcher()]) as engine:
        assert plans == [engine.bound]


# --- the probe -----------------------------------------------------------------------------------------------------------


class Mixes(FullCache):
    """Shows row 0's keys to every row."""

    def update_and_fetch(self, keys, values):
        keys, values = super().update_and_fetch(keys, values)
        return (keys, values) if keys.shape[0] == 1 else (mx.concatenate([keys[:1]] * keys.shape[0]), values)


class Raises(FullCache):
    def update_and_fetch(self, keys, values):
        if keys.shape[0] > 1:
            msg = "one row only"
            raise TypeError(msg)
        return super().update_and_fetch(keys, values)


@pytest.mark.parametrize(("cache", "reason"), [(Mixes, "differ"), (Raises, "one row only")])
def test_rows_that_disturb_each_other_are_found_at_bind(tiny, cache, reason):
    """Not at the first request; and not where verifying is off."""
    layout = Layout("bad")
    layout.open = lambda layer, options, *, slots, window: cache(slots)
    config = {"layouts": {"layers": {"1": "bad"}}}
    with pytest.raises(errors.ModelNotBatchable, match=reason) as caught:
        bound(tiny, {**config, "scheduler": {"verify": True}}, layout)
    assert caught.value.model_type == "llama"
    bound(tiny, config, layout)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_probe_lets_sound_models_through(tiny, dtype):
    """Kernels may differ in the last bits with the number of rows, the more so in short floats."""
    model = models.build("tiny-full")
    model.set_dtype(dtype)
    with Engine(model) as engine:
        assert len(engine.generate([Request(prompt_ids=[1, 2], max_tokens=3)])[0].token_ids) == 3


def test_the_probe_leaves_nothing_behind(engines, successor):
    """No row, no bytes, no counter."""
    stats = engines(successor).stats()
    assert (stats["active_rows"], stats["kv_bytes"], stats["recoveries"], stats["delivered_tokens"]) == (0, 0, 0, 0)
