"""Quantized caches: batched tokens are those of a serial run whose cache stores the same bytes."""

import functools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from oarlock.core import Request, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue, LayoutRefused
from oarlock.core.testing import models, storages
from oarlock.layouts.packed import Format
from oarlock.layouts.quantized import QuantizedCache, QuantizedLayout

LENGTHS = (12, 3, 20, 1, 9)
TOKENS = 20
GROUP = 32
_NARROW = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}
# Arguments beside the table's: head sizes that are multiples of 32, windows that wrap, nothing wider than needed.
CHANGES = {
    "tiny-full": {"head_dim": 32},
    "tiny-ring": {"head_dim": 32},
    "falcon_h1": {"head_dim": 32},
    "gemma4": {},
    "gpt_oss": {"head_dim": 32, "sliding_window": 8},
    "iquestloopcoder": {"loop_window_size": 8},
    "laguna": {},
    "mimo_v2_flash": {"sliding_window_size": 8},
    "qwen3_next": {},
    "smollm3": _NARROW,
    "stablelm": _NARROW,
}
# What mlx-lm's own quantized cache can run: no sinks, no shared keys, keys and values of one size, no window.
THEIRS = ("tiny-full", "qwen3_next", "smollm3")
# Layers whose attention gets something else than what was fetched read dequantized arrays.
PLAIN = ("stablelm",)


@functools.cache
def model(name):
    return models.build(name, **CHANGES[name])


@functools.cache
def alone(name, prompt, bits, theirs=False):
    """Plain caches of rounded numbers, or mlx-lm's own quantized ones."""
    caches = storages.quantized(model(name), bits, GROUP, theirs=theirs)
    return models.serial(model(name), prompt, TOKENS, prompt_cache=caches)


def config(bits, layout="quantized", **scheduler):
    choice = {"name": layout, "bits": bits, "group_size": GROUP}
    return {"layouts": {"full": choice, "rotating": choice}, "scheduler": scheduler}


def check(arrival, name, bits, *, theirs=False, plugins=(), layout="quantized", verify=True):
    """Five ragged prompts, one leaves early, at once and staggered; no recovery."""
    prompts = models.prompts(LENGTHS, 97)
    serial = [alone(name, tuple(prompt), bits, theirs) for prompt in prompts]
    requests = [Request(prompt_ids=prompt, max_tokens=6 if i == 2 else TOKENS) for i, prompt in enumerate(prompts)]
    comparison = models.Comparison()
    for every, settings in ((0, {"prefill_chunk": 4}), (3, {"prefill_chunk": 7, "pipeline": False})):
        settings["verify"] = verify
        with Engine(model(name), config=config(bits, layout, **settings), plugins=plugins) as engine:
            results = arrival(engine, requests, every)
            assert engine.stats()["recoveries"] == 0
            attends = {layer.attends for layer in engine.bound.layers if layer.info.kind in {"full", "rotating"}}
        assert attends <= {name not in PLAIN}
        wanted = [row.tokens[: len(result.token_ids)] for row, result in zip(serial, results, strict=True)]
        comparison += models.compare([r.token_ids for r in results], wanted, [row.gaps for row in serial])
    print(f"{name}, {bits} bits: {comparison}")
    comparison.check()


@pytest.mark.fault("B-01", "G-03")
@pytest.mark.parametrize("name", CHANGES)
def test_eight_bits_equal_the_serial_run(arrival, name):
    """Full, rotating, recurrent and composite layers beside each other; sinks, shared keys, cast keys, odd head sizes."""
    check(arrival, name, 8)


@pytest.mark.fault("B-01", "G-03")
@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "gpt_oss", "laguna"])
def test_four_bits_equal_the_serial_run(arrival, name):
    check(arrival, name, 4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", THEIRS)
def test_tokens_are_those_of_mlx_lms_quantized_cache(arrival, name, bits):
    """Where it has one that can run the model: quantized from the first token on."""
    check(arrival, name, bits, theirs=True)


@pytest.mark.long
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("name", CHANGES)
def test_other_bits_equal_the_serial_run(arrival, name, bits):
    check(arrival, name, bits)


class NextRowsScales(QuantizedCache):
    """Reads each row with the scales of the one before."""

    def decode(self, planes):
        shifted = {name: mx.roll(plane, 1, axis=0) if "scales" in name else plane for name, plane in planes.items()}
        return super().decode(shifted)


class ForgetsColumns(QuantizedCache):
    """Packs a block as one token would be: its last column stays empty."""

    def encode(self, keys, values):
        planes = super().encode(keys, values)
        return {n: p * (mx.arange(p.shape[2]) < max(1, p.shape[2] - 1))[:, None] for n, p in planes.items()}


@pytest.mark.fault("B-01", "G-03", twin=True)
@pytest.mark.parametrize("cache_type", [NextRowsScales, ForgetsColumns])
def test_a_wrong_cache_is_found(arrival, cache_type):
    """The twins; the probe is off, which would refuse them."""

    class Layout(QuantizedLayout):
        def open(self, layer, options, *, slots, window):
            packing = Format(bits=options.bits, group_size=options.group_size)
            return cache_type(slots, packing, attends=layer.attendable)

    class Plugin:
        @hookimpl
        def register_layouts(self, register):
            register(Layout(name="broken"))

    with pytest.raises(AssertionError):
        check(arrival, "tiny-full", 8, plugins=[Plugin()], layout="broken", verify=False)


# --- what is quantized, and what is refused, is known at bind ----------------------------------------------------------


@pytest.mark.fault("G-05")
@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "qwen3_next", "falcon_h1"])
def test_the_binding_says_layer_by_layer_what_is_quantized(name):
    """Full, rotating and parts of composites are; states are not. The first request finds nothing new."""
    with Engine(model(name), config=config(8)) as engine:
        for layer, line in zip(engine.bound.layers, engine.bound.explain(), strict=False):
            parts = layer.parts or (layer,)
            for part in parts:
                assert (part.layout.name == "quantized") == (part.info.kind in {"full", "rotating"})
            assert ("quantized" in line["choice"]) == any(part.layout.name == "quantized" for part in parts)
        engine.generate([Request(prompt_ids=[5, 6, 7], max_tokens=2)])


@pytest.mark.fault("G-05")
@pytest.mark.parametrize(("name", "layer"), [("qwen3_next", "0"), ("falcon_h1", "0"), ("falcon_h1", "0.0")])
def test_a_layer_that_cannot_be_quantized_is_refused_at_bind(name, layer):
    """A state, or a layer of several caches: by its path, with what the layout holds."""
    settings = {"layouts": {"layers": {layer: {"name": "quantized", "group_size": GROUP}}}}
    with pytest.raises(LayoutRefused) as caught:
        Engine(model(name), config=settings)
    assert (caught.value.layout, caught.value.layer) == ("quantized", layer)


@pytest.mark.fault("G-05", twin=True)
def test_a_layout_that_promises_too_much_is_found(monkeypatch):
    """It says that it holds states, and fails at the first request."""
    monkeypatch.setattr(QuantizedLayout, "refuses", lambda *_: None)

    class Plugin:
        @hookimpl
        def register_layouts(self, register):
            register(QuantizedLayout(name="any", kinds=frozenset({"recurrent"})))

    settings = {"layouts": {"recurrent": "any"}, "scheduler": {"verify": False}}
    with pytest.raises(pytest.fail.Exception), pytest.raises(LayoutRefused):
        Engine(model("qwen3_next"), config=settings, plugins=[Plugin()]).close()


def test_a_head_size_that_cannot_be_packed_is_refused_with_the_layer():
    with pytest.raises(LayoutRefused, match="key size 16") as caught:
        Engine(models.build("tiny-ring"), config={"layouts": {"rotating": "quantized"}})
    assert caught.value.layer == "0"
    assert "\n" not in str(caught.value)


def test_an_option_out_of_range_is_refused_with_the_allowed_values():
    with pytest.raises(InvalidConfigValue, match="8") as caught:
        Engine(model("tiny-full"), config=config(5))
    assert "\n" not in str(caught.value)


def test_layers_are_mixed(arrival):
    """Two plain, the rest in 8 bits; of one kind, they read the same columns and share one mask."""
    settings = {"layouts": {"full": {"name": "quantized", "group_size": GROUP}, "layers": {"0-1": "full"}}}
    prompts = models.prompts(LENGTHS, 97)
    with Engine(model("tiny-full"), config=settings) as engine:
        assert [layer.layout.name for layer in engine.bound.layers] == ["full", "full", "quantized"]
        results = arrival(engine, [Request(prompt_ids=prompt, max_tokens=TOKENS) for prompt in prompts], 2)
        assert engine.stats()["recoveries"] == 0
    for prompt, result in zip(prompts, results, strict=True):
        caches = make_prompt_cache(model("tiny-full"))
        caches[2] = storages.quantized(model("tiny-full"), 8, GROUP)[2]
        wanted = models.serial(model("tiny-full"), prompt, TOKENS, prompt_cache=caches)
        assert tuple(result.token_ids) == wanted.tokens
