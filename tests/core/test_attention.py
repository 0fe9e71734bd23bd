"""Attention dispatch: by what the keys are, in the modules of all submodules, counted, and harmless for others."""

import functools
import sys
import threading
import types

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from oarlock.core import Request, hookimpl
from oarlock.core.attention import NAME, Swap, watched
from oarlock.core.contracts.layout import KeyValues
from oarlock.core.engine import Engine
from oarlock.core.errors import LayoutRefused, ModelNotBatchable
from oarlock.core.layers import read
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache, FullLayout
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache


class Handle:
    """What an attending layout hands out: the arrays, and who attended to them."""

    def __init__(self, keys, values, calls):
        self.keys, self.values, self.calls = keys, values, calls
        self.shape, self.dtype = keys.shape, keys.dtype

    def attend(self, queries, scale, mask, sinks):
        self.calls.append(self)
        return mx.fast.scaled_dot_product_attention(
            queries, self.keys, self.values, scale=scale, mask=mask, sinks=sinks
        )


class Handing:
    """A cache that hands out handles."""

    calls: list = []  # noqa: RUF012 - the test's own

    def decode(self, planes):
        keys, values = super().decode(planes)
        return Handle(keys, values, self.calls), Handle(values, keys, self.calls)


class Attending(Handing, FullCache):
    """Of full attention."""


class AttendingRing(Handing, RotatingCache):
    """Of a sliding window."""


class Layout(FullLayout):
    """Registers as "attending"; attends where it may, or everywhere with ``always``."""

    always = False
    types = (Attending, AttendingRing)

    def __init__(self):
        super().__init__(name="attending", kinds=frozenset({"full", "rotating"}))

    def refuses(self, layer, options):
        return None if layer.attendable or self.always else "attention does not get what its fetch returned"

    def attends(self, layer, options):
        return True

    def open(self, layer, options, *, slots, window):
        full, ring = self.types
        return full(slots) if layer.kind == "full" else ring(slots, Ring(window=layer.window, slack=window - 1))


class Plugin:
    def __init__(self, layout):
        self.layout = layout

    @hookimpl
    def register_layouts(self, register):
        register(self.layout)


def engine(model, layout=None, verify=True):
    layout = layout or Layout()
    config = {"layouts": dict.fromkeys(layout.kinds, "attending"), "scheduler": {"verify": verify}}
    return Engine(model, config=config, plugins=[Plugin(layout)])


def modules_of(model):
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in names if hasattr(sys.modules[name], NAME)]


def functions_of(model):
    return {module.__name__: getattr(module, NAME) for module in modules_of(model)}


def untouched(model):
    return all(function is base.scaled_dot_product_attention for function in functions_of(model).values())


SMALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}


@functools.cache
def built(name):
    """Narrower where the table's own is wide, and with windows that wrap."""
    changes = {
        "smollm3": SMALL, "stablelm": SMALL, "iquestloopcoder": {"loop_window_size": 8}, "gpt_oss": {"sliding_window": 8},
    }  # fmt: skip
    return models.build(name, guard=False, **changes.get(name, {}))


@pytest.fixture
def calls():
    Handing.calls = []
    return Handing.calls


# --- the swap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-full", "smollm3", "gemma4", "qwen3_vl"])
def test_the_modules_of_all_submodules_are_swapped_and_put_back(name):
    """smollm3's attention is llama's: its own module has no such function."""
    model = built(name)
    assert untouched(model)
    assert modules_of(model)
    swap = Swap(model.modules())
    assert not untouched(model)
    assert base.scaled_dot_product_attention not in functions_of(model).values()
    swap.close()
    assert untouched(model)


def test_the_last_of_several_puts_the_originals_back(tiny):
    """Two engines of one architecture, and one of another that shares a module; closing twice counts once."""
    other = built("smollm3")
    swaps = [Swap(tiny.modules()), Swap(tiny.modules()), Swap(other.modules())]
    first = functions_of(tiny)
    for swap in (swaps[0], swaps[0], swaps[2], swaps[2]):
        swap.close()
        assert functions_of(tiny) == first
    swaps[1].close()
    assert untouched(tiny)
    assert untouched(other)


def test_what_somebody_else_wrapped_is_left_alone(tiny):
    """Another library wraps the same name while we do: its wrapper stays, and still works."""
    (module,) = modules_of(tiny)
    swap = Swap(tiny.modules())
    ours = getattr(module, NAME)
    try:
        setattr(module, NAME, theirs := lambda *args, **named: ours(*args, **named))
        swap.close()
        assert getattr(module, NAME) is theirs
        assert tiny(mx.array([[1, 2, 3]])).shape == (1, 3, 97)
    finally:
        setattr(module, NAME, base.scaled_dot_product_attention)


@pytest.mark.parametrize("cache_type", [KVCache, lambda: QuantizedKVCache(32, 8)], ids=["plain", "mlx-lm's quantized"])
def test_other_users_of_the_module_notice_nothing(cache_type):
    """The same scores, bit for bit, while an engine has the module swapped."""
    model = models.build("tiny-full", head_dim=32)
    ids = mx.array([[5, 6, 7, 8]])
    before = model(ids, cache=[cache_type() for _ in model.layers])
    swap = Swap(model.modules())
    try:
        assert mx.array_equal(model(ids, cache=[cache_type() for _ in model.layers]), before)
    finally:
        swap.close()


def test_keys_decide_and_the_cache_does_not(calls):
    """Handed another layer's cache, or none, or one of mlx-lm's, a handle still attends; arrays never do."""
    module = types.ModuleType("attention_of_a_test")
    setattr(module, NAME, base.scaled_dot_product_attention)
    sys.modules[module.__name__] = module
    layer = type("Layer", (nn.Module,), {"__module__": module.__name__})()
    queries, keys, values = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3)
    swap = Swap([layer])
    try:
        attend = getattr(module, NAME)
        handle = Handle(keys, values, calls)
        assert isinstance(handle, KeyValues)
        for cache in (None, KVCache(), Attending(1), QuantizedKVCache()):
            assert mx.array_equal(attend(queries, handle, handle, cache, 0.3, None), wanted)
            assert mx.array_equal(attend(queries, handle, handle, cache=cache, scale=0.3, mask=None), wanted)
        assert len(calls) == 8
        for cache in (None, KVCache(), Attending(1)):
            assert mx.array_equal(attend(queries, keys, values, cache=cache, scale=0.3, mask=None), wanted)
        assert len(calls) == 8
    finally:
        swap.close()
        del sys.modules[module.__name__]


# --- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_swaps_where_a_layout_attends_and_nowhere_else(tiny, calls):
    """From its making until it is closed, by whichever thread."""
    padded = {"full": {"name": "full", "reads": "padded"}}
    with Engine(tiny, config={"scheduler": {"mixed": False}, "layouts": padded}):
        assert untouched(tiny)
    with engine(tiny) as one:
        assert not untouched(tiny)
        two = engine(tiny)
        prompt = models.prompts((7,), 97)[0]
        result = one.generate([Request(prompt_ids=prompt, max_tokens=6)])[0]
        assert result.token_ids == models.serial(tiny, prompt, 6).tokens
        assert calls
    assert not untouched(tiny)
    thread = threading.Thread(target=two.close)
    thread.start()
    thread.join()
    assert untouched(tiny)
    two.close()


def test_a_bind_that_fails_leaves_nothing_swapped(tiny):
    class Raises(Layout):
        def open(self, layer, options, *, slots, window):
            cache = Attending(slots)
            cache.decode = lambda planes: 1 / 0
            return cache

    with pytest.raises((ModelNotBatchable, ZeroDivisionError)):
        engine(tiny, Raises())
    assert untouched(tiny)


# --- who is attendable --------------------------------------------------------------------------------------------------

# Attention gets something else than the fetch returned: cast keys, or keys derived from them.
DERIVED = {"stablelm": ["0", "1", "2", "3"], "kimi_linear": ["1", "2", "3"]}


@pytest.mark.parametrize("name", ["iquestloopcoder", "gemma4", "smollm3", "gpt_oss", "afm7", "gemma3n", "deepseek_v2"])
def test_layers_whose_attention_gets_what_was_fetched_are_attendable(name):
    """Even where it is attended with another layer's cache, or with none."""
    layers = read(built(name)).layers
    assert all(layer.attendable for layer in layers)


@pytest.mark.parametrize(("name", "paths"), DERIVED.items())
def test_layers_whose_attention_gets_something_else_are_not(name, paths):
    layers = read(built(name)).layers
    assert [layer.path for layer in layers if layer.kind == "full" and not layer.attendable] == paths


def test_parts_of_a_composite_are_told_apart():
    """deepseek_v32 derives its keys and selects by an indexer: neither part is; falcon_h1's attention is."""
    parts = [part for layer in read(built("deepseek_v32")).layers for part in layer.parts]
    assert parts
    assert not any(part.attendable for part in parts)
    parts = [part for layer in read(built("falcon_h1")).layers for part in layer.parts]
    assert {part.kind for part in parts if part.attendable} == {"full"}


@pytest.mark.parametrize(("name", "path"), [("stablelm", "0"), ("kimi_linear", "1"), ("deepseek_v32", "0.0")])
def test_a_layout_that_must_attend_is_refused_by_the_layer(name, path):
    model = built(name)
    with pytest.raises(LayoutRefused) as caught:
        engine(model)
    assert caught.value.layer == path
    assert untouched(model)


def test_without_the_refusal_it_fails_loudly(calls):
    """Keys that a model computes with are no handles: the twin of the trace."""
    layout = type("Always", (Layout,), {"always": True})()
    with pytest.raises(ModelNotBatchable):
        engine(built("kimi_linear"), layout)


# --- models ------------------------------------------------------------------------------------------------------------


def check_model(name, layout=None):
    model = built(name)
    prompts = models.prompts((9, 3, 14), 97)
    serial = [models.serial(model, prompt, 12) for prompt in prompts]
    with engine(model, layout, verify=layout is None) as running:
        results = running.generate([Request(prompt_ids=prompt, max_tokens=12) for prompt in prompts])
        assert running.stats()["recoveries"] == 0
    models.compare([r.token_ids for r in results], [s.tokens for s in serial], [s.gaps for s in serial]).check()


@pytest.mark.parametrize("name", ["iquestloopcoder", "gemma4", "smollm3", "gpt_oss"])
def test_models_attend_by_handles(calls, name):
    """Loop 1's keys with loop 2's cache, shared keys without a cache, another module's function, sinks."""
    check_model(name)
    assert calls


def test_attention_by_the_cache_would_be_wrong(monkeypatch):
    """The twin: attend to what the cache that is passed fetched last, as an engine that trusts that argument does."""
    fetched = {}

    class Remembers:
        def decode(self, planes):
            pair = super().decode(planes)
            fetched[id(self)] = pair[0]
            return pair

    types = (type("Full", (Remembers, Attending), {}), type("Window", (Remembers, AttendingRing), {}))

    def by_cache(keys, queries, cache, scale, mask=None, sinks=None):
        return fetched.get(id(cache), keys).attend(queries, scale, mask, sinks)

    monkeypatch.setattr("oarlock.core.attention._attended", by_cache)
    with pytest.raises(Exception, match=r"differs|shape"):
        check_model("iquestloopcoder", type("Trusting", (Layout,), {"types": types})())


def test_watching_ends(tiny):
    """What attention receives is recorded while somebody watches, and nothing afterwards."""
    cache = make_prompt_cache(tiny)
    with watched(tiny) as seen:
        tiny(mx.array([[1, 2]]), cache=cache)
    assert len(seen) == 3
    tiny(mx.array([[1]]), cache=cache)
    assert len(seen) == 3
    assert untouched(tiny)
