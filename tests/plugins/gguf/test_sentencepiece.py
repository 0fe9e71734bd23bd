"""Tokenizers of kind llama against sentencepiece itself, on models trained here and on Gemma's own vocabulary."""

from __future__ import annotations

import io
import random
from collections import Counter

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from oarlock.core import errors
from oarlock.plugins.gguf import reader, tokenizer

SPACE = "\u2581"


@pytest.fixture(scope="module")
def train(random_strings):
    """Return ``train(**options)``: a sentencepiece processor with 2,000 pieces, byte fallback, no rewriting of text."""

    def make(**options):
        out = io.BytesIO()
        lines = [s.replace("\n", " ") for s in random_strings(3000, seed=11)]
        often = {c for c, count in Counter("".join(lines)).items() if count > 20}  # the rest become bytes
        lines = ["".join(c for c in line if c in often) for line in lines]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            model_type="bpe",
            vocab_size=2000,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_by_unicode_script=False,
            split_by_whitespace=False,
            minloglevel=2,
            **options,
        )
        return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())

    return make


def facts(processor, **more):
    """Return the metadata that a converter would write for ``processor``."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    base = {
        "model": "llama",
        "tokens": [p.piece for p in proto.pieces],
        "scores": np.array([p.score for p in proto.pieces], np.float32),
        "token_type": np.array([p.type for p in proto.pieces]),
        "unknown_token_id": processor.unk_id(),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "add_bos_token": False,
    } | more
    return {f"tokenizer.ggml.{k}": v for k, v in base.items()}


def compare(built, processor, strings):
    for text in strings:
        ids = built.encode(text)
        assert ids == processor.encode(text), repr(text)
        assert built.decode(ids) == processor.decode(ids).replace(SPACE, " "), repr(text)


def runs(count):
    """Strings of repeated characters, where it matters which of two equal pairs is joined first."""
    draw = random.Random(3)
    return [
        "".join(draw.choice(["a", "-", "=", " ", ".", "0", "x"]) * draw.randint(1, 19) for _ in range(4))
        for _ in range(count)
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_text_are_sentencepieces(train, random_strings, prefix):
    processor = train(add_dummy_prefix=prefix)
    built = tokenizer.build("m", facts(processor))
    compare(built, processor, [*random_strings(2500, seed=1), *runs(500)])


def test_the_twin_that_ranks_pairs_the_wrong_way_is_caught(train, random_strings):
    processor = train(add_dummy_prefix=False)
    metadata = facts(processor)
    metadata["tokenizer.ggml.scores"] = -metadata["tokenizer.ggml.scores"]
    with pytest.raises(AssertionError):
        compare(tokenizer.build("m", metadata), processor, random_strings(500, seed=1))


def test_user_defined_pieces_of_spaces_and_lines_are_found_first(train, random_strings):
    pieces = [SPACE * 2, SPACE * 3, "\n", "\n\n", "\n\n\n", "<table>", "\t"]
    processor = train(add_dummy_prefix=False, user_defined_symbols=pieces)
    built = tokenizer.build("m", facts(processor))
    compare(built, processor, [*random_strings(2500, seed=2), *runs(500), "a<table>  b\n\n\n\n  c"])


def test_user_defined_pieces_may_be_written_with_plain_spaces(train, random_strings):
    """Converters do that."""
    processor = train(add_dummy_prefix=False, user_defined_symbols=[SPACE * 2, SPACE * 3])
    metadata = facts(processor)
    tokens = metadata["tokenizer.ggml.tokens"]
    for piece in (SPACE * 2, SPACE * 3):
        tokens[tokens.index(piece)] = " " * len(piece)
    compare(tokenizer.build("m", metadata), processor, [*random_strings(500, seed=4), *runs(500)])


@pytest.mark.parametrize("space", [SPACE, " "])
def test_spaces_in_user_defined_pieces_beside_a_leading_space_are_refused(train, space):
    processor = train(add_dummy_prefix=True, user_defined_symbols=[SPACE * 2])
    metadata = facts(processor)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index(SPACE * 2)] = space * 2
    with pytest.raises(errors.UnsupportedModel, match="1 user-defined tokens"):
        tokenizer.build("m", metadata)


def test_control_tokens_and_bos(train):
    processor = train(add_dummy_prefix=False, control_symbols=["<end_of_turn>"])
    metadata = facts(processor)
    del metadata["tokenizer.ggml.add_bos_token"]
    built = tokenizer.build("m", metadata)
    end = processor.piece_to_id("<end_of_turn>")
    assert built.encode("of<end_of_turn>") == [processor.bos_id(), *processor.encode("of"), end]  # BOS by default
    assert built.encode("<s>of") == [processor.bos_id(), *processor.encode("of")]  # and once
    assert built.decode(built.encode("of<end_of_turn>")) == "of"
    assert built.eos_token_ids == {processor.eos_id(), end}


def test_half_a_character_decodes_to_the_replacement_character(train):
    built = tokenizer.build("m", facts(train(add_dummy_prefix=False)))
    first = built.encode("\U0001fae8")[0]  # a byte token
    assert built.decode([first]) == "\ufffd"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"scores": np.zeros(3, np.float32)}, "2000 tokens have 3 scores"),
        ({"remove_extra_whitespaces": True}, "rewrites text"),
        ({"precompiled_charsmap": np.zeros(3, np.int8)}, "rewrites text"),
    ],
)
def test_what_is_not_known_exactly_is_refused(train, more, word):
    metadata = facts(train(add_dummy_prefix=True), **more)
    with pytest.raises(errors.UnsupportedModel, match=word):
        tokenizer.build("m", metadata)


@pytest.mark.long
@pytest.mark.weights
def test_gemmas_vocabulary_over_10000_random_strings(gemma3_path, random_strings):
    """Sentencepiece's model is put together from the metadata alone."""
    metadata = reader.read("gemma", gemma3_path).metadata
    get = lambda key: metadata[f"tokenizer.ggml.{key}"]  # noqa: E731
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = get("unknown_token_id"), get("bos_token_id")
    proto.trainer_spec.eos_id, proto.trainer_spec.pad_id = get("eos_token_id"), get("padding_token_id")
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = get("add_space_prefix")
    proto.normalizer_spec.remove_extra_whitespaces = False
    for number, (piece, score, kind) in enumerate(zip(get("tokens"), get("scores"), get("token_type"), strict=True)):
        kind = 2 if number == get("unknown_token_id") else int(kind)  # noqa: PLW2901
        # Converters write the spaces of user-defined pieces as plain spaces.
        proto.pieces.add(piece=piece.replace(" ", SPACE), score=float(score), type=kind)
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    built = tokenizer.build("gemma", metadata | {"tokenizer.ggml.add_bos_token": False})
    compare(built, processor, [*random_strings(10_000), *runs(1000)])
