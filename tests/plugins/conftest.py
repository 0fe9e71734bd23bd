"""A tiny model on disk, as mlx-lm keeps one."""

from __future__ import annotations

import json

import pytest

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café 你好 🙂 рыба", "oars and locks, rows and rivers"]


def save_tokenizer(folder, template):
    """Train a byte-level BPE of 300 tokens and write it as transformers keeps it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_model(folder, *, template=TEMPLATE):
    """Write a random llama whose weights are large enough that the past matters."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models import llama

    mx.random.seed(11)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "eos_token_id": 0,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map(lambda a: 3 * mx.random.normal(a.shape) / a.shape[-1] ** 0.5, model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, template)
    return str(folder)


@pytest.fixture(scope="session")
def saved():
    """Write a tiny model into a directory: ``saved(folder, template=...)`` returns its path."""
    return save_model
