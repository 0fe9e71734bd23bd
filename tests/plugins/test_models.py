"""mlx-lm directories, hub names and the tokenizer adapter, on models of a few kilobytes made here."""

from __future__ import annotations

import json
import shutil
import threading

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from transformers import BatchEncoding, PreTrainedTokenizerFast

from oarlock.core import errors
from oarlock.plugins import models, tokenizer
from oarlock.plugins.models import MlxLmLoader
from oarlock.plugins.tokenizer import HFTokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
    "max_position_embeddings": 77,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
IDS = mx.array([[5, 9, 250, 7]])
CHAT = [{"role": "user", "content": "hi"}]


def hf_tokenizer(*, bos=True, template=None, decoder=None):
    """A byte-level tokenizer of 300 tokens: <s> is 0, </s> is 1, <end> is 2."""
    backend = Tokenizer(kinds.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the user says hi to the assistant , and the assistant answers"] * 9, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


@pytest.fixture
def directory(tmp_path):
    """Return ``make(**config)``: a directory with a tiny llama, its weights in bfloat16, and a tokenizer."""

    def make(name="model", tokenizer=True, template=TEMPLATE, bits=None, **changes):
        path = tmp_path / name
        path.mkdir()
        config = CONFIG | changes
        mx.random.seed(3)
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.set_dtype(mx.bfloat16)
        if bits:
            model, config = quantize_model(model, config, 32, bits)
        save_model(path, model)
        save_config(config, path / "config.json")
        if tokenizer:
            hf_tokenizer(template=template).save_pretrained(path)
        return path

    return make


def dtypes(model):
    return {a.dtype for _, a in tree_flatten(model.parameters())}


# --- loading ----------------------------------------------------------------------------------------------


def test_it_takes_directories_and_hub_names(tmp_path):
    loader = MlxLmLoader()
    (tmp_path / "file").write_text("")
    assert all(loader.accepts(s) for s in (str(tmp_path), "org/name", "mlx-community/Qwen3-0.6B-4bit"))
    assert not any(loader.accepts(s) for s in (str(tmp_path / "file"), "/no/such/dir", "name", "a/b/c", "../x", ""))


def test_the_hook_registers_the_loader():
    found = []
    models.register_loaders(found.append)
    assert [loader.name for loader in found] == ["mlx_lm"]
    assert models.OARLOCK_API == 1


def test_a_directory_loads_with_tokenizer_positions_and_type(directory):
    loaded = MlxLmLoader().load(str(directory()))
    assert (loaded.model_type, loaded.positions) == ("llama", 77)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the user")) == "the user"
    assert loaded.model(IDS).shape == (1, 4, 300)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_dtypes(directory, bits):
    path = str(directory(bits=bits))
    stored = MlxLmLoader().load(path, dtype="stored").model
    assert dtypes(stored) == ({mx.bfloat16, mx.uint32} if bits else {mx.bfloat16})
    dense = MlxLmLoader().load(path).model  # auto, on the CPU
    assert dtypes(dense) == {mx.float32}
    assert dtypes(MlxLmLoader().load(path, dtype="float16").model) == {mx.float16}
    if bits:
        layer = stored.layers[1].mlp.up_proj
        parts = layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
        assert mx.array_equal(mx.dequantize(*parts, group_size=32, bits=bits), dense.layers[1].mlp.up_proj.weight)
    np.testing.assert_allclose(np.array(stored(IDS).astype(mx.float32)), np.array(dense(IDS)), atol=0.2)


def test_auto_keeps_what_does_not_fit_in_memory(monkeypatch):
    assert models.weight_dtype("auto", 1000) == mx.float32
    monkeypatch.setattr(models.os, "sysconf", lambda _name: 70)  # 4,900 bytes
    assert models.weight_dtype("auto", 1000) is None
    assert models.weight_dtype("float32", 1000) == mx.float32


def test_an_unknown_dtype_is_a_config_error(directory):
    with pytest.raises(errors.InvalidConfigValue, match="fp8"):
        MlxLmLoader().load(str(directory()), dtype="fp8")


@pytest.mark.fault("J-02")
def test_private_arrays_are_evaluated(directory):
    """Llama 3's RoPE keeps its frequencies where `parameters()` does not show them."""
    path, done = str(directory()), []
    thread = threading.Thread(target=lambda: done.append(MlxLmLoader().load(path)))
    thread.start()
    thread.join()
    mx.eval(done[0].model(IDS))


def test_its_twin_with_parameters_only_is_caught(directory, monkeypatch):
    monkeypatch.setattr(models, "evaluate", lambda model: mx.eval(model.parameters()))
    with pytest.raises(RuntimeError, match="in current thread"):
        test_private_arrays_are_evaluated(directory)


def test_identity_changes_with_weights_and_dtype_and_not_with_the_place(directory, tmp_path):
    loader, path = MlxLmLoader(), directory()
    first = loader.load(str(path)).identity
    shutil.copytree(path, tmp_path / "copy")
    assert loader.load(str(tmp_path / "copy")).identity == first
    assert loader.load(str(path), dtype="stored").identity != first
    assert loader.load(str(directory("other", rope_theta=9.0))).identity != first


def test_a_sampled_fingerprint_sees_the_ends_and_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_WHOLE_FILE", 10)
    monkeypatch.setattr(models, "_SAMPLE_BYTES", 4)
    path = tmp_path / "model.safetensors"

    def of(content):
        path.write_bytes(content)
        models.os.utime(path, (1, 1))
        return models.fingerprint([path])

    found = {of(c) for c in (b"a" * 999, b"b" + b"a" * 998, b"a" * 998 + b"b", b"a" * 998)}
    models.os.utime(path, (2, 2))
    assert len(found | {models.fingerprint([path])}) == 5


def test_a_directory_without_tokenizer_has_none(directory):
    assert MlxLmLoader().load(str(directory(tokenizer=False))).tokenizer is None


# --- bad input ----------------------------------------------------------------------------------------------


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}", '{"model_type": 3}'])
def test_a_directory_without_a_usable_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(errors.NoModelConfig, match=r"config\.json") as caught:
        MlxLmLoader().load(str(tmp_path))
    assert str(tmp_path) in one_line(caught)


def test_a_directory_without_weights_is_not_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(errors.ModelNotFound, match=r"no model\*\.safetensors"):
        MlxLmLoader().load(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "unheard_of"}, "unheard_of not supported"),
        ({"model_type": "base"}, "cannot load"),
        ({"model_type": "../../x"}, "cannot load"),
        ({"model_file": "evil.py"}, "evil.py"),
        ({"num_hidden_layers": 3}, "Missing"),
        ({"hidden_size": 32}, "shape"),
        ({"hidden_size": "many"}, "cannot load"),
    ],
)
def test_what_mlx_lm_cannot_build_is_unsupported(directory, changes, word):
    path = directory()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "evil.py").write_text("raise SystemExit('code of the model was run')")
    with pytest.raises(errors.UnsupportedModel, match=word) as caught:
        MlxLmLoader().load(str(path))
    one_line(caught)


def test_truncated_weights_are_refused(directory):
    path = directory()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(errors.UnsupportedModel) as caught:
        MlxLmLoader().load(str(path))
    one_line(caught)


def test_a_damaged_tokenizer_is_refused(directory):
    path = directory()
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(errors.UnsupportedModel, match="tokenizer cannot be read") as caught:
        MlxLmLoader().load(str(path))
    one_line(caught)


def test_missing_directories_and_files_are_not_found(tmp_path):
    (tmp_path / "file").write_text("")
    for source in (tmp_path / "none", tmp_path / "file", "/no/such/dir", "name"):
        with pytest.raises(errors.ModelNotFound) as caught:
            MlxLmLoader().load(str(source))
        one_line(caught)


def test_hub_names_are_downloaded_without_code(directory, monkeypatch):
    path, asked = directory(), []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert MlxLmLoader().load("org/name").model_type == "llama"
    assert asked[0][0] == "org/name"
    assert not any(p.endswith(".py") for p in asked[0][1])


def test_a_hub_that_does_not_answer_is_not_found(monkeypatch):
    def download(*_args, **_kwargs):
        msg = "no network\nand nothing in the cache"
        raise LocalEntryNotFoundError(msg)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(errors.ModelNotFound, match="no network and nothing") as caught:
        MlxLmLoader().load("org/name")
    assert caught.value.source == "org/name"
    one_line(caught)


# --- tokenizers -----------------------------------------------------------------------------------------------


EOS_IDS = tokenizer.eos_ids
EOS_CASES = pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, None, {1}),
        ({"eos_token_id": 7}, None, {1, 7}),
        ({"eos_token_id": [7, 2]}, None, {1, 2, 7}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {1, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 2]}, {1, 2, 7, 9}),
        ({"text_config": {"eos_token_id": [8]}}, {}, {1, 8}),
        ({"eos_token_id": 7, "text_config": {"eos_token_id": 8}}, {"eos_token_id": 9}, {1, 7, 8, 9}),
    ],
)


@pytest.mark.fault("N-01")
@EOS_CASES
def test_every_eos_that_any_file_names_is_known(directory, config, generation, ids):
    """FAULTS N-01."""
    path = directory(**config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert MlxLmLoader().load(str(path)).tokenizer.eos_token_ids == ids


@pytest.mark.parametrize(
    ("fault", "config", "ids"),
    [
        (lambda config: frozenset(sorted(EOS_IDS(config))[:1]), {"eos_token_id": [7, 2]}, {1, 2, 7}),
        (lambda config: EOS_IDS(config | {"text_config": None}), {"text_config": {"eos_token_id": 8}}, {1, 8}),
    ],
    ids=["one of a list", "no nesting"],
)
def test_its_twins_are_caught(directory, monkeypatch, fault, config, ids):
    monkeypatch.setattr(models, "eos_ids", fault)
    with pytest.raises(AssertionError):
        test_every_eos_that_any_file_names_is_known(directory, config, None, ids)


def test_positions_may_stand_in_the_text_config(directory):
    path = directory(max_position_embeddings=None, text_config={"max_position_embeddings": 55})
    config = json.loads((path / "config.json").read_text())
    assert models._positions(config) == 55
    assert models._positions({}) is None
    assert models._positions({"n_positions": 9}) == 9


def test_bos_stands_once():
    plain = hf_tokenizer(bos=False).encode("the user")
    assert HFTokenizer(hf_tokenizer(bos=True)).encode("the user") == [0, *plain]
    assert HFTokenizer(hf_tokenizer(bos=True)).encode("<s>the user") == [0, *plain]
    assert HFTokenizer(hf_tokenizer(bos=False)).encode("the user") == plain
    assert HFTokenizer(hf_tokenizer(bos=True)).encode("") == [0]


def test_text_is_exact():
    tokenizer = HFTokenizer(hf_tokenizer())
    for text in ("the user , says 's hi .", "  two  spaces ", "e\u0301\u2003\U0001f44d\U0001f3fd\n\n", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, *tokenizer.encode("hi"), 2, 1]) == "hi"
    assert tokenizer.decode(tokenizer.encode("\u00e9")[1:2]) == "\ufffd"


def test_lone_surrogates_become_the_replacement_character():
    tokenizer = HFTokenizer(hf_tokenizer(template=TEMPLATE))
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\udc4d")) == "\U0001f44d"
    assert "\ufffd" in tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "\udc4d"}]))


@pytest.mark.fault("N-11")
@pytest.mark.parametrize(
    "decoder", [decoders.Metaspace(), decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])]
)
def test_space_markers_of_byte_level_tokens_never_show(decoder):
    """FAULTS N-11."""
    tokenizer = HFTokenizer(hf_tokenizer(decoder=decoder))
    assert tokenizer.decode(tokenizer.encode("the user says \u00e9")) == "the user says \u00e9"


@pytest.mark.fault("N-11", twin=True)
def test_its_twin_without_the_repair_is_caught(monkeypatch):
    monkeypatch.setattr(tokenizer, "_repair_decoder", lambda _backend: None)
    with pytest.raises(AssertionError):
        test_space_markers_of_byte_level_tokens_never_show(decoders.Fuse())


def test_a_chat_becomes_ids_with_the_prompt_for_the_answer(directory):
    expected = hf_tokenizer(bos=False).encode("<s>[user]hi>")
    assert HFTokenizer(hf_tokenizer(template=TEMPLATE)).apply_chat_template(CHAT) == expected
    assert MlxLmLoader().load(str(directory())).tokenizer.apply_chat_template(CHAT) == expected


@pytest.mark.fault("N-04")
def test_a_template_in_a_file_of_its_own_is_seen(directory):
    path = directory(template=None)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    assert MlxLmLoader().load(str(path)).tokenizer.apply_chat_template(CHAT)


@pytest.mark.fault("N-04")
def test_a_dictionary_of_ids_is_understood():
    class Wrapper:
        eos_token_id, bos_token_id, chat_template = 1, 0, "x"

        def apply_chat_template(self, messages, **options):
            assert options["add_generation_prompt"] is True
            return BatchEncoding({"input_ids": [0, 5], "attention_mask": [1, 1]})

    assert HFTokenizer(Wrapper()).apply_chat_template(CHAT) == [0, 5]


@pytest.mark.fault("N-04")
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (None, CHAT),
        ("{{ raise_exception('roles must alternate') }}", CHAT),
        ("{{ messages[0].content + 1 }}", CHAT),
        ("{{ messages[3].content.x }}", CHAT),
        ("{% for m in messages %}", CHAT),
        ("{{ messages[0]['content'] + 'x' }}", [{"role": "user", "content": None}]),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_template_that_is_missing_or_refuses_is_one_error(directory, template, messages, wrapped):
    """FAULTS N-04."""
    if wrapped:
        tokenizer = MlxLmLoader().load(str(directory(template=template))).tokenizer
    else:
        tokenizer = HFTokenizer(hf_tokenizer(template=template))
    with pytest.raises(errors.NoChatTemplate, match="no chat template" if template is None else "refused") as caught:
        tokenizer.apply_chat_template(messages)
    assert isinstance(caught.value, ValueError)
    one_line(caught)
    assert tokenizer.encode("completions still work")


@pytest.mark.fault("N-04", twin=True)
def test_its_twin_that_passes_errors_on_is_caught(directory):
    """Transformers raises a bare ValueError for a missing template, and returns a dictionary for a present one."""

    class Passing:
        encode = staticmethod(lambda _text: [1])

        def __init__(self, tokenizer):
            self.apply_chat_template = tokenizer.apply_chat_template

    with pytest.raises(ValueError, match="chat_template is not set"), pytest.raises(errors.NoChatTemplate):
        Passing(hf_tokenizer()).apply_chat_template(CHAT)
    assert not isinstance(Passing(hf_tokenizer(template=TEMPLATE)).apply_chat_template(CHAT), list)
