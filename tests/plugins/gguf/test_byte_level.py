"""Tokenizers of kind gpt2 against a reference written here: a regex, a byte table and the textbook merge loop."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from oarlock.core import errors
from oarlock.plugins.gguf import reader, tokenizer

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_table():
    """Printable stand-ins for the 256 bytes: Latin-1's own characters, and for the rest 256 onwards."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, more = {b: chr(b) for b in own}, 256
    for byte in range(256):
        if byte not in table:
            table[byte], more = chr(more), more + 1
    return table


class Reference:
    """Byte-level BPE, slowly: no line of it is shared with the plugin or with the tokenizers library."""

    def __init__(self, tokens, merges, pre):
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): r for r, m in enumerate(merges)}
        self.pre, self.bytes = pre, byte_table()
        self.word = functools.cache(self.word)

    def words(self, text):
        if self.pre == "smollm":
            parts = [p for p in regex.split(r"(\p{N})", text) if p]
            return [w for part in parts for w in regex.findall(GPT2, part)]
        return regex.findall({"gpt-2": GPT2, "llama-bpe": LLAMA3, "qwen2": QWEN2}[self.pre], text)

    def word(self, word):
        symbols = [self.bytes[b] for b in word.encode()]
        if self.pre == "llama-bpe" and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            rank, at = min((self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(itertools.pairwise(symbols)))
            if rank == 1 << 30:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[s] for s in symbols]

    def encode(self, text):
        return [token for word in self.words(text) for token in self.word(word)]


@pytest.fixture(scope="module")
def trained(random_strings):
    """A byte-level vocabulary of 700 tokens with its merges, and three control tokens before it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(random_strings(2000, seed=5), trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(m) for m in model["merges"]]


def facts(trained, pre="smollm", **more):
    tokens, merges = trained
    base = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array([3, 3, 3] + [1] * (len(tokens) - 3)),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more
    return {f"tokenizer.ggml.{k}": v for k, v in base.items() if v is not None}


def compare(built, reference, strings):
    for text in strings:
        ids = built.encode(text)
        assert ids == reference.encode(text), repr(text)
        assert built.decode(ids) == text


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_ids_are_the_references(trained, random_strings, pre):
    built = tokenizer.build("m", facts(trained, pre, add_bos_token=False))
    compare(built, Reference(*trained, pre), random_strings(2500, seed=1))


def test_qwen2_composes_characters_first(trained, random_strings):
    built, reference = tokenizer.build("m", facts(trained, "qwen2")), Reference(*trained, "qwen2")
    for text in random_strings(2500, seed=2):
        composed = unicodedata.normalize("NFC", text)
        ids = built.encode(text)
        assert ids == reference.encode(composed), repr(text)
        assert built.decode(ids) == composed


@pytest.mark.weights
def test_smollm2_over_10000_random_strings(smollm2_path, random_strings):
    metadata = reader.read("smollm2", smollm2_path).metadata
    built = tokenizer.build("smollm2", metadata)
    reference = Reference(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], "smollm")
    compare(built, reference, random_strings(10_000))


@pytest.mark.parametrize(("pre", "other"), [("smollm", "gpt-2"), ("gpt-2", "llama-bpe"), ("llama-bpe", "qwen2")])
def test_the_twin_with_another_word_splitting_is_caught(trained, random_strings, pre, other):
    built = tokenizer.build("m", facts(trained, other, add_bos_token=False))
    with pytest.raises(AssertionError):
        compare(built, Reference(*trained, pre), random_strings(2500, seed=1))


def test_control_tokens_are_found_in_text_and_left_out_of_it(trained):
    built = tokenizer.build("m", facts(trained))
    ids = built.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert built.decode(ids) == "a"


def test_user_defined_tokens_are_found_and_kept(trained):
    tokens, merges = trained
    types = np.array([3, 3, 3] + [1] * (len(tokens) - 3) + [4])
    built = tokenizer.build("m", facts(([*tokens, "<tool call>"], merges), token_type=types))
    ids = built.encode("x<tool call>y")
    assert ids[1] == len(tokens)
    assert built.decode(ids) == "x<tool call>y"


@pytest.mark.parametrize(
    ("more", "edges"),
    [
        ({}, (None, None)),
        ({"add_bos_token": True}, (1, None)),
        ({"add_bos_token": True, "add_eos_token": True}, (1, 2)),
        ({"pre": "llama-bpe"}, (1, None)),
        ({"pre": "llama-bpe", "add_bos_token": False}, (None, None)),
    ],
)
def test_bos_stands_once_where_the_file_wants_it(trained, more, edges):
    built = tokenizer.build("m", facts(trained, **more))
    plain = Reference(*trained, "smollm").encode("abc")
    wanted = [edges[0]] * (edges[0] is not None) + plain + [edges[1]] * (edges[1] is not None)
    assert built.encode("abc") == wanted
    if edges[0]:
        assert built.encode("<|im_start|>abc") == wanted


@pytest.mark.fault("N-01")
def test_eos_is_the_union_of_what_the_file_names_and_the_usual_end_of_turn(trained):
    assert tokenizer.build("m", facts(trained)).eos_token_ids == {2}
    assert tokenizer.build("m", facts(trained, eos_token_id=0)).eos_token_ids == {0, 2}
    assert tokenizer.build("m", facts(trained, eos_token_id=0, eot_token_id=5)).eos_token_ids == {0, 2, 5}


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"pre": "unheard-of"}, "'unheard-of'; known: gpt-2, llama-bpe"),
        ({"pre": None}, "None; known"),
        ({"model": "t5"}, "'t5'; read are"),
        ({"merges": ["a zzz"]}, "1 of 1 merges"),
        ({"merges": None}, "0 of 0 merges"),
        ({"tokens": ["a", "a"]}, "2 tokens have 1 different texts"),
    ],
)
def test_what_is_not_known_exactly_is_refused(trained, more, word):
    with pytest.raises(errors.UnsupportedModel, match=word):
        tokenizer.build("m", facts(trained, **more))


def test_a_file_without_vocabulary_has_no_tokenizer():
    assert tokenizer.build("m", {"general.architecture": "llama"}) is None
