"""What the metadata of a GGUF file means for mlx-lm: the model's arguments and where each tensor goes.

A new architecture is one function here and one line in `ARCHITECTURES`; nothing else knows them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from oarlock.core import errors
from oarlock.plugins.gguf.reader import GGUFFile

_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@attrs.frozen(kw_only=True)
class Plan:
    """How a file becomes a model of ``mlx_lm.models.<module>``."""

    module: str
    arguments: Mapping[str, Any]
    """For the module's ``ModelArgs``, ``model_type`` included."""
    blocks: Mapping[str, str]
    """Name of a tensor inside a block -> path of the module inside a layer."""
    norm_offset: float = 0.0
    """What the file adds to the weights of norms, and mlx-lm does not want."""

    def path(self, tensor: str) -> str | None:
        """Return the parameter that ``tensor`` (``"blk.0.attn_q.weight"``) is, or None for one that is none."""
        stem, _, leaf = tensor.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{leaf}"
        match stem.split("."):
            case ["blk", number, name] if name in self.blocks:
                return f"model.layers.{number}.{self.blocks[name]}.{leaf}"
        return None


class Facts:
    """The metadata of one architecture: ``facts("block_count")`` reads ``"llama.block_count"``."""

    def __init__(self, source: str, file: GGUFFile, architecture: str) -> None:
        self.source, self.file, self.architecture = source, file, architecture

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> Any:
        """Return a number that the file must have."""
        value = self(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "missing" if value is None else f"a {type(value).__name__}"
            self.refuse(f"metadata {self.architecture}.{key} is {kind}, and one number is needed")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the file must have."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            self.refuse(f"tensor {name!r} is missing; the file has {len(self.file.tensors)} tensors")
        return tensor.shape  # type: ignore[union-attr]  # refuse raises

    def refuse(self, message: str) -> None:
        raise errors.UnsupportedModel(self.source, message)


def _common(facts: Facts) -> dict[str, Any]:
    """Return the arguments that both architectures have, with what neither of mlx-lm's models can do refused."""
    heads, size = facts.number("attention.head_count"), facts.number("embedding_length")
    head_dim = facts("attention.key_length", size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts(key, head_dim) != head_dim:
            facts.refuse(f"{key} is {facts(key)} and attention.key_length {head_dim}; only equal ones are read")
    if facts("expert_count", 0):
        facts.refuse(f"it is a mixture of {facts('expert_count')} experts, and only dense models are read")
    scaling = facts("rope.scaling.type", "none")
    if scaling not in {"none", "linear"}:
        facts.refuse(f"its RoPE scaling is {scaling!r}; read are 'none' and 'linear'")
    factor = facts("rope.scaling.factor", facts("rope.scale_linear", 1.0))
    return {
        "hidden_size": size,
        "num_hidden_layers": facts.number("block_count"),
        "intermediate_size": facts.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": facts.shape("token_embd.weight")[0],
        "max_position_embeddings": facts.number("context_length"),
        "rope_scaling": {"type": "linear", "factor": factor} if factor != 1.0 else None,
    }


def _llama(facts: Facts) -> Plan:
    tensors = facts.file.tensors
    arguments = _common(facts) | {
        "model_type": "llama",
        "rope_theta": facts("rope.freq_base", 10_000.0),
        # The rows of q and k are stored permuted, for a RoPE that turns neighbours.
        "rope_traditional": True,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    return Plan(module="llama", arguments=arguments, blocks=_BLOCK | {"ffn_norm": "post_attention_layernorm"})


def _gemma3(facts: Facts) -> Plan:
    arguments = _common(facts)
    # The model of 62 layers scales by the average head; the others by the head that they have.
    average = arguments["hidden_size"] / arguments["num_attention_heads"]
    arguments |= {
        "model_type": "gemma3_text",
        "rope_theta": facts("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": facts("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": average if arguments["num_hidden_layers"] == 62 else arguments["head_dim"],
        "sliding_window": facts.number("attention.sliding_window"),
        "sliding_window_pattern": facts("attention.sliding_window_pattern", 6),
    }
    blocks = _BLOCK | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return Plan(module="gemma3_text", arguments=arguments, blocks=blocks, norm_offset=1.0)


ARCHITECTURES: Mapping[str, Callable[[Facts], Plan]] = {"llama": _llama, "gemma3": _gemma3}


def plan(source: str, file: GGUFFile) -> Plan:
    """Return the plan for ``file``. Raises `errors.UnsupportedModel`, naming what is supported."""
    architecture = file.metadata.get("general.architecture", "")
    if architecture not in ARCHITECTURES:
        msg = f"architecture {architecture!r} is not read from GGUF; supported: {', '.join(sorted(ARCHITECTURES))}"
        raise errors.UnsupportedModel(source, msg)
    parts = file.metadata.get("split.count", 0)
    if parts > 1:
        msg = f"it is one of {parts} parts; merge them into one file first"
        raise errors.UnsupportedModel(source, msg)
    return ARCHITECTURES[architecture](Facts(source, file, architecture))
