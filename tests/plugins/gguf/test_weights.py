"""Synthetic files of both architectures against mlx-lm models that are built without the plugin.

The reference takes names from the gguf package's own tensor map, and its llama rotates halves: the test permutes the
rows of q and k as converters do.
"""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama

from oarlock.core import errors
from oarlock.plugins.gguf import GGUFLoader, weights

KINDS = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 256, 4, 2, 64, 512, 96
IDS = mx.array([[3, 17, 95, 0, 44, 8, 8, 61, 2, 30]])

LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 5000.0,
}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "head_dim": HEAD,
    "query_pre_attn_scalar": HEAD,
    "sliding_window": 4,
    "rope_theta": 1_000_000.0,
}


def metadata(config, **more):
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    } | more


GEMMA_FACTS = {"attention.key_length": HEAD, "attention.value_length": HEAD, "attention.sliding_window": 4}


def reference(config, kind=KINDS.F32):
    """Return an mlx-lm model with numbers that ``kind`` can hold, and its tensors under their GGUF names."""
    module = {"llama": llama, "gemma3_text": gemma3_text}[config["model_type"]]
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config))
    if config["model_type"] == "gemma3_text":
        model.sanitize({})
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    draw = np.random.default_rng(7)
    tensors, loaded = {}, []
    for path, array in tree_flatten(model.parameters()):
        numbers = draw.standard_normal(array.shape).astype(np.float32)
        numbers *= 0.1 if array.ndim == 1 else 0.12
        stem, leaf = path.rsplit(".", 1)
        as_kind = KINDS.F32 if array.ndim == 1 else kind
        stored = numbers + 1 if array.ndim == 1 and leaf == "weight" else numbers
        numbers = gguf.dequantize(gguf.quantize(stored, as_kind), as_kind)
        if array.ndim == 1 and leaf == "weight" and config["model_type"] == "gemma3_text":
            numbers = numbers - 1
        loaded.append((path, mx.array(numbers)))
        if config["model_type"] == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = HEADS if "q_proj" in path else KV_HEADS
            stored = stored.reshape(heads, 2, HEAD // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        tensors[f"{names.get_name(stem)}.{leaf}"] = (stored, as_kind)
    model.load_weights(loaded)
    return model, tensors


def logits(model):
    return np.array(model(IDS).astype(mx.float32))


def write(write_gguf, config, kind=KINDS.F32, facts=(), **changes):
    model, tensors = reference(config, kind)
    architecture = "llama" if config["model_type"] == "llama" else "gemma3"
    more = dict(facts) | ({} if architecture == "llama" else GEMMA_FACTS)
    return model, write_gguf(architecture, metadata(config, **more), tensors | changes)


WRITABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda c: c["model_type"])
def test_logits_are_those_of_a_model_built_directly(write_gguf, config, kind):
    model, path = write(write_gguf, config, KINDS[kind])
    loaded = GGUFLoader().load(str(path), dtype="float32")
    expected = logits(model)
    assert np.abs(expected).max() > 1  # the numbers matter
    np.testing.assert_allclose(logits(loaded.model), expected, atol=2e-3, rtol=1e-4)
    assert loaded.model_type == config["model_type"]
    assert loaded.positions == 128
    assert loaded.tokenizer is None


def test_every_quantizer_of_the_gguf_package_is_tried():
    """A type that the installed gguf package can write and this file does not list has appeared."""
    numbers = np.ones((1, 512), np.float32)
    found = {"F32", "F16"}
    for kind in KINDS:
        try:
            gguf.quantize(numbers, kind)
        except NotImplementedError:
            continue
        found.add(kind.name)
    assert found == set(WRITABLE)


@pytest.mark.parametrize(
    ("config", "kind", "bits"),
    [
        (LLAMA, "Q4_0", 4),
        (LLAMA, "Q4_1", 4),
        (LLAMA, "Q5_0", 5),
        (LLAMA, "Q5_1", 5),
        (LLAMA, "Q8_0", 8),
        (GEMMA, "Q4_0", 4),
    ],
)
def test_stored_keeps_exact_formats_packed(write_gguf, config, kind, bits):
    model, path = write(write_gguf, config, KINDS[kind])
    loaded = GGUFLoader().load(str(path), dtype="stored").model
    layer = loaded.layers[0].self_attn.q_proj
    assert (layer.bits, layer.group_size, layer.scales.dtype) == (bits, 32, mx.float16)
    assert loaded.model.embed_tokens.bits == bits
    dense = GGUFLoader().load(str(path), dtype="float32").model.layers[0].self_attn.q_proj.weight
    scales, biases = (a.astype(mx.float32) for a in (layer.scales, layer.biases))
    assert mx.array_equal(mx.dequantize(layer.weight, scales, biases, group_size=32, bits=bits), dense)
    assert loaded(IDS).dtype == mx.float16  # activations are of one type
    wanted, got = logits(model), logits(loaded)
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", mx.float32), ("F16", mx.float16), ("BF16", mx.bfloat16), ("MXFP4", mx.float16)]
)
def test_stored_computes_in_the_type_of_the_embedding(write_gguf, kind, dtype):
    _, path = write(write_gguf, LLAMA, KINDS[kind])
    loaded = GGUFLoader().load(str(path), dtype="stored").model
    assert {a.dtype for _, a in tree_flatten(loaded.parameters())} == {dtype}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_a_named_dtype_makes_every_weight_dense(write_gguf, dtype):
    _, path = write(write_gguf, LLAMA, KINDS.Q4_0)
    loaded = GGUFLoader().load(str(path), dtype=dtype)
    wanted = mx.float32 if dtype == "auto" else getattr(mx, dtype)  # auto on the CPU
    assert {a.dtype for _, a in tree_flatten(loaded.model.parameters())} == {wanted}


def test_an_unknown_dtype_is_a_config_error(write_gguf):
    _, path = write(write_gguf, LLAMA)
    with pytest.raises(errors.InvalidConfigValue, match="int8"):
        GGUFLoader().load(str(path), dtype="int8")


def test_untied_output_biases_and_linear_scaling(write_gguf):
    config = LLAMA | {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    facts = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    model, path = write(write_gguf, config, facts=facts)
    np.testing.assert_allclose(logits(GGUFLoader().load(str(path)).model), logits(model), atol=2e-3, rtol=1e-4)


def test_rope_factors_are_llama_3s_scaling(write_gguf):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    waves = 2 * np.pi * LLAMA["rope_theta"] ** (np.arange(0, HEAD, 2) / HEAD)
    smooth = (64 / waves - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / 8.0 + smooth)
    factors = np.where(waves < 64 / 4.0, 1.0, np.where(waves > 64 / 1.0, 8.0, between))
    assert len(set(factors.tolist())) > 3
    model, path = write(write_gguf, LLAMA | {"rope_scaling": scaling}, **{"rope_freqs.weight": factors})
    loaded = GGUFLoader().load(str(path)).model
    np.testing.assert_allclose(logits(loaded), logits(model), atol=2e-3, rtol=1e-4)
    assert isinstance(loaded.layers[0].self_attn.rope, weights.FactorRoPE)


def test_gemma_keeps_every_sixth_layer_full_unless_the_file_says_otherwise(write_gguf):
    _, path = write(write_gguf, GEMMA)
    kinds = [type(c).__name__ for c in GGUFLoader().load(str(path)).model.make_cache()]
    assert kinds == ["RotatingKVCache"] * 5 + ["KVCache", "RotatingKVCache"]
    model, path = write(
        write_gguf, GEMMA | {"sliding_window_pattern": 3}, facts={"attention.sliding_window_pattern": 3}
    )
    np.testing.assert_allclose(logits(GGUFLoader().load(str(path)).model), logits(model), atol=2e-3, rtol=1e-4)


def test_missing_unexpected_and_misshapen_tensors_are_counted_and_named(write_gguf):
    _, tensors = reference(LLAMA)
    del tensors["blk.1.ffn_up.weight"], tensors["blk.0.attn_norm.weight"]
    tensors |= {"blk.0.surprise.weight": np.zeros(4), "output_norm.weight": np.zeros(8)}
    path = write_gguf("llama", metadata(LLAMA), tensors)
    with pytest.raises(errors.UnsupportedModel) as caught:
        GGUFLoader().load(str(path))
    for part in (
        "2 missing (model.layers.0.input_layernorm.weight, model.layers.1.mlp.up_proj.weight)",
        "1 unexpected (blk.0.surprise.weight)",
        "1 of the wrong shape (model.norm.weight)",
        "20 parameters",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"expert_count": 8}, "8 experts"),
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.dimension_count": 32}, "rope.dimension_count is 32"),
        ({"split.count": 3}, "3 parts"),
        ({"embedding_length": "many"}, "llama.embedding_length is a str"),
    ],
)
def test_what_is_not_read_is_refused_by_name(write_gguf, facts, word):
    _, path = write(write_gguf, LLAMA, facts=facts)
    with pytest.raises(errors.UnsupportedModel, match=word):
        GGUFLoader().load(str(path))


def test_missing_metadata_and_embedding_are_named(write_gguf):
    facts = metadata(LLAMA)
    del facts["feed_forward_length"]
    with pytest.raises(errors.UnsupportedModel, match=r"llama\.feed_forward_length is missing"):
        GGUFLoader().load(str(write_gguf("llama", facts, reference(LLAMA)[1])))
    with pytest.raises(errors.UnsupportedModel, match=r"'token_embd\.weight' is missing; the file has 1 tensors"):
        GGUFLoader().load(str(write_gguf("llama", metadata(LLAMA), {"a": np.zeros(4)}, "b.gguf")))


def test_another_architecture_is_named_with_what_is_supported(write_gguf):
    path = write_gguf("mamba", {"block_count": 1}, {"a": np.zeros(4)})
    with pytest.raises(errors.UnsupportedModel, match=r"'mamba'.*supported: gemma3, llama"):
        GGUFLoader().load(str(path))
