"""Streaming text: the pieces make up the decode of all tokens and never show half a character."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oarlock.core.text import REPLACEMENT, TextStream

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "naïve café déjà-vu, Straße, smørrebrød, Dvořák, İstanbul",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽 or 🧑🏿‍🚀!",
    "flags 🇩🇪🇫🇷🇯🇵 side by side, 🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "combining e\u0301 o\u0308 a\u030a\u0323 and Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘",
    "你好,世界。日本語のテキスト、한국어 문장",
    "مرحبا بالعالم, שלום עולם",
    "𐍈 𒀀 🂡",
    "  two leading spaces, trailing two  ",
    "\n\n\ttabs\tand\r\nlines\n",
    "a replacement \ufffd in the text, and at the end \ufffd",
    "\ufffd",
    "",
]


def byte_level():
    """A byte-level BPE of 300 tokens: many characters are split over tokens, some tokens hold parts of two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>", "<think>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace(decoder):
    """A sentencepiece-like BPE: spaces are part of tokens, unknown characters are spelt in byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    vocabulary = tokenizer.get_vocab()
    merges = [
        (left, right)
        for left in vocabulary
        for right in vocabulary
        if left + right in vocabulary and "<" not in left + right
    ]
    merges.sort(key=lambda pair: vocabulary["".join(pair)])
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    fallback = Tokenizer(model)
    fallback.add_special_tokens(["<eos>"])
    fallback.pre_tokenizer = pre_tokenizers.Metaspace()
    fallback.decoder = decoder
    return fallback


TOKENIZERS = {
    "byte level": byte_level(),
    "metaspace": metaspace(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "strip": metaspace(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    ),
}


def run(stream, ids):
    """Push until a stop string and finish: every piece."""
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped is not None:
            break
    return [*pieces, stream.finish()]


def letters(ids):
    return "".join(map(chr, ids))


def codes(text):
    return [ord(character) for character in text]


def lossy(ids):
    """One byte a token."""
    return bytes(ids).decode("utf-8", errors="replace")


def check_corpus(make_stream, tokenizer):
    """FAULTS N-02: pieces concatenate to the full decode and show no half characters."""
    for text in CORPUS:
        ids = tokenizer.encode(text).ids
        whole = tokenizer.decode(ids)
        pieces = run(make_stream(tokenizer.decode), ids)
        assert "".join(pieces) == whole
        assert sum(piece.count(REPLACEMENT) for piece in pieces) == whole.count(REPLACEMENT)
        if REPLACEMENT not in whole:
            assert pieces[-1] == ""


@pytest.mark.fault("N-02")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_concatenate_to_the_full_decode(name):
    check_corpus(TextStream, TOKENIZERS[name])


class TokenByToken(TextStream):
    """Each token decoded alone."""

    def push(self, token):
        return self._decode([token])

    def finish(self):
        return ""


class SlicedTooEarly(TextStream):
    """The growing list decoded and sliced, half characters and all."""

    def __init__(self, decode):
        super().__init__(decode)
        self.ids, self.shown = [], ""

    def push(self, token):
        self.ids.append(token)
        before, self.shown = self.shown, self._decode(self.ids)
        return self.shown[len(before) :]

    def finish(self):
        return ""


@pytest.mark.fault("N-02", twin=True)
@pytest.mark.parametrize("fault", [TokenByToken, SlicedTooEarly])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_twin_half_characters_are_noticed(name, fault):
    with pytest.raises(AssertionError):
        check_corpus(fault, TOKENIZERS[name])


@pytest.mark.fault("N-02")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_two_interleaved_streams_do_not_touch_each_other(name):
    """FAULTS N-02."""
    tokenizer = TOKENIZERS[name]
    for first, second in pairwise(CORPUS):
        ids = [tokenizer.encode(first).ids, tokenizer.encode(second).ids]
        streams = [TextStream(tokenizer.decode) for _ in ids]
        for position in range(max(map(len, ids))):
            for row, stream in zip(ids, streams, strict=True):
                if position < len(row):
                    stream.push(row[position])
        for row, stream in zip(ids, streams, strict=True):
            stream.finish()
            assert stream.text == tokenizer.decode(row)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives_every_tokenizer(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    stream = TextStream(tokenizer.decode)
    assert "".join(run(stream, ids)) == tokenizer.decode(ids) == stream.text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 299), max_size=60))
def test_any_tokens_of_a_byte_level_vocabulary_even_without_sense(ids):
    decode = TOKENIZERS["byte level"].decode
    assert "".join(run(TextStream(decode), ids)) == decode(ids)


@settings(max_examples=500, deadline=None)
@given(data=st.lists(st.sampled_from([*b"ax", 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xFF])))
def test_any_bytes_lone_surrogates_and_broken_characters_included(data):
    stream = TextStream(lossy)
    assert "".join(run(stream, data)) == lossy(data)


def test_every_character_is_shown_as_soon_as_its_last_byte_is_there():
    for text in CORPUS:
        stream = TextStream(lossy)
        for character in text.replace(REPLACEMENT, ""):
            data = character.encode()
            assert [stream.push(byte) for byte in data] == [""] * (len(data) - 1) + [character]


def test_a_token_that_ends_one_character_and_begins_the_next_shows_the_first():
    parts = [b"a\xe2\x82", b"\xacb\xc3", b"\xa9"]
    stream = TextStream(lambda ids: b"".join(parts[i] for i in ids).decode("utf-8", errors="replace"))
    assert [stream.push(i) for i in range(3)] == ["a", "€b", "é"]


def test_a_replacement_character_that_the_text_really_has_is_kept():
    stream = TextStream(letters)
    assert [stream.push(token) for token in codes("a\ufffdb\ufffd")] == ["a", "", "\ufffdb", ""]
    assert stream.finish() == REPLACEMENT
    assert stream.finish() == ""
    assert stream.text == "a\ufffdb\ufffd"


def test_byte_fallback_keeps_a_character_that_a_later_byte_of_its_run_would_undo():
    """The one text that cannot be told while it streams (see `TextStream`); no character is lost around it."""
    tokenizer = TOKENIZERS["strip"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xFF)]
    word = tokenizer.encode("dog").ids
    stream = TextStream(tokenizer.decode)
    assert "".join(run(stream, [*ids, *word])) == "é\ufffd\ufffd dog"
    assert tokenizer.decode([*ids, *word]) == "\ufffd\ufffd\ufffd dog"


@pytest.mark.parametrize("name", ["metaspace", "strip"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_of_a_byte_fallback_vocabulary_but_bytes(name, data):
    tokenizer = TOKENIZERS[name]
    usable = [i for token, i in sorted(tokenizer.get_vocab().items()) if not token.startswith("<0x")]
    ids = data.draw(st.lists(st.sampled_from(usable), max_size=50))
    assert "".join(run(TextStream(tokenizer.decode), ids)) == tokenizer.decode(ids)


@pytest.mark.fault("N-08")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_leave_no_text_and_no_lost_space(name):
    """FAULTS N-08: EOS first, in the middle, many times over and last."""
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.token_to_id("<eos>")
    words = [tokenizer.encode(word).ids for word in ("over", " the lazy", " dog")]
    for count in (1, 2, 15, 16, 17, 40):
        ids = [eos] * count
        for word in words:
            ids += word + [eos] * count
        assert "".join(run(TextStream(tokenizer.decode), ids)) == tokenizer.decode(ids)
        assert "<eos>" not in tokenizer.decode(ids)


@pytest.mark.fault("N-08")
def test_an_end_that_is_never_pushed_is_in_no_text():
    """FAULTS N-08: the core pushes delivered tokens only, so ordinary text that ends a turn stays out, too."""
    stream = TextStream(letters, stop=["<|end|>"])
    assert "".join(stream.push(token) for token in codes("answer<|en")) + stream.finish() == "answer<|en"
    assert stream.stopped is None


@pytest.mark.parametrize("text", ["word " * 2000, "\x80" * 5000, "日本" * 2000, "\x00" * 3000], ids=repr)
def test_work_grows_with_the_text_and_not_with_its_square(text):
    """Counts the tokens that are decoded, however long the run without visible text is (NUL stands for nothing)."""
    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return bytes(ids).replace(b"\x00", b"").decode("utf-8", errors="replace")

    data = text.encode("latin-1" if "\x80" in text else "utf-8")
    stream = TextStream(decode, stop=["never", "x" * 50])
    whole = "".join(run(stream, data))
    assert decoded < 60 * len(data)
    assert whole == decode(data)


@pytest.mark.parametrize("spaces", [1, 15, 16, 17, 100])
def test_decoders_that_strip_every_leading_space_lose_none_in_the_middle(spaces):
    stream = TextStream(lambda ids: letters(ids).lstrip())
    text = "  a" + " " * spaces + "b" + "\n" * spaces + "c"
    assert "".join(run(stream, codes(text))) == text.lstrip()
