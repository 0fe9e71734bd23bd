"""A tokenizer from nothing but GGUF metadata, built with the ``tokenizers`` library.

Two kinds of vocabulary exist: "gpt2" is byte-level BPE with the merges in the file; "llama" is sentencepiece's BPE,
where the file has a score per piece and the merges are worked out from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from oarlock.core import errors
from oarlock.plugins.tokenizer import HFTokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "\u2581"  # sentencepiece's visible space

_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
"""Control tokens that end a turn under their usual names: many files name only the end of a text."""

# How byte-level vocabularies cut text into words (tokenizer.ggml.pre). The patterns are the models' own, as published
# with their weights: a pattern that is nearly right gives tokens that the model has hardly seen.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digit_words() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _llama3_words() -> Any:
    return _words(rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}")


def _qwen2_words() -> Any:
    return _words(rf"{_LETTERS}|\p{{N}}|{_REST}")


_PRE = {
    "gpt-2": _gpt2_words,
    "smollm": _digit_words,
    "llama-bpe": _llama3_words,
    "llama3": _llama3_words,
    "llama-v3": _llama3_words,
    "qwen2": _qwen2_words,
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3"}  # a word that is a token is not put together from merges
_COMPOSED = {"qwen2"}  # text is composed (NFC) first


@attrs.frozen(kw_only=True)
class _Vocabulary:
    """The metadata under ``tokenizer.ggml``, with refusals that name the file."""

    source: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def token(self, key: str) -> str | None:
        """Return the text of the token whose id stands under ``key``, if there is one."""
        number = self.get(key)
        return self.tokens[number] if number is not None and 0 <= number < len(self.tokens) else None

    def refuse(self, message: str) -> errors.UnsupportedModel:
        return errors.UnsupportedModel(self.source, f"its tokenizer is not read: {message}")


def build(source: str, metadata: Mapping[str, Any]) -> HFTokenizer | None:
    """Return the tokenizer, chat template included, or None for a file without vocabulary.

    Raises `errors.UnsupportedModel` for a kind of vocabulary or of word splitting that is not known exactly.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = [_NORMAL] * len(tokens) if types is None else types.tolist()
    vocabulary = _Vocabulary(source=source, metadata=metadata, tokens=tokens, types=kinds)
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        msg = f"{len(tokens)} tokens have {len(set(tokens))} different texts and {len(kinds)} types"
        raise vocabulary.refuse(msg)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        backend = _byte_level(vocabulary)
    elif kind == "llama":
        backend = _sentencepiece(vocabulary)
    else:
        msg = f"vocabularies of kind {kind!r}; read are 'gpt2' and 'llama'"
        raise vocabulary.refuse(msg)
    _add_edges(backend, vocabulary)
    return _wrap(backend, vocabulary)


def _byte_level(vocabulary: _Vocabulary) -> Any:
    pre = vocabulary.get("pre")
    if pre not in _PRE:
        msg = f"word splitting {pre!r}; known: {', '.join(sorted(_PRE))}"
        raise vocabulary.refuse(msg)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", ())]
    unknown = [m for m in merges if len(m) != 2 or m[0] not in ids or m[1] not in ids or m[0] + m[1] not in ids]
    if not merges or unknown:
        msg = f"{len(unknown)} of {len(merges)} merges name tokens that do not exist"
        raise vocabulary.refuse(msg)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE[pre]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([_exact(token) for token in vocabulary.of_type(_USER)])
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    prefix = vocabulary.get("add_space_prefix", True)
    if vocabulary.get("remove_extra_whitespaces", False) or vocabulary.get("precompiled_charsmap") is not None:
        msg = "it rewrites text (whitespace or characters) before it splits it"
        raise vocabulary.refuse(msg)
    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        msg = f"{len(vocabulary.tokens)} tokens have {0 if scores is None else len(scores)} scores"
        raise vocabulary.refuse(msg)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    bytes_ = vocabulary.of_type(_BYTE)
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary, ids),
            unk_token=vocabulary.token("unknown_token_id") or next(iter(vocabulary.of_type(_UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=len(bytes_) == 256,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    unspaces: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        unspaces.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(unspaces)
    user = vocabulary.of_type(_USER)
    if prefix and any(" " in token or _SPACE in token for token in user):
        msg = f"of {len(user)} user-defined tokens some contain spaces, and text is given a leading space"
        raise vocabulary.refuse(msg)
    # With spaces made visible first, so that a token of three spaces is found; a prefix would be added to it as well.
    backend.add_tokens([AddedToken(token, special=False, normalized=not prefix) for token in user])
    return backend


def _merges(vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make another piece, best score first.

    Sentencepiece joins the neighbours whose union is the best piece, leftmost first. Ranked pairs do the same but for
    one thing: the ways to split one piece must have an order, where sentencepiece takes the leftmost of equals. No
    string of the tests shows a difference, runs of one character included. Control, user-defined and byte pieces are
    never made by joining.
    """
    scores = vocabulary.get("scores")
    normal = {ids[token] for token in vocabulary.of_type(_NORMAL)}
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")
    return [
        pair
        for number in order.tolist()
        if number in normal and len(vocabulary.tokens[number]) > 1
        for pair in _splits(vocabulary.tokens[number], ids, normal)
    ]


def _splits(piece: str, ids: Mapping[str, int], normal: set[int]) -> Iterator[tuple[str, str]]:
    for at in range(len(piece) - 1, 0, -1):
        left, right = piece[:at], piece[at:]
        if ids.get(left) in normal and ids.get(right) in normal:
            yield left, right


def _exact(token: str, *, special: bool = False) -> Any:
    return AddedToken(token, special=special, normalized=False)


def _add_edges(backend: Any, vocabulary: _Vocabulary) -> None:
    """Make control tokens known as such and add what belongs before and after a text."""
    backend.add_special_tokens([_exact(t, special=True) for t in vocabulary.of_type(_CONTROL, _UNKNOWN)])
    before = vocabulary.token("bos_token_id") if _adds(vocabulary, "bos") else None
    after = vocabulary.token("eos_token_id") if _adds(vocabulary, "eos") else None
    edges = [token for token in (before, after) if token is not None]
    if edges:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[(token, backend.token_to_id(token)) for token in edges],
        )


def _adds(vocabulary: _Vocabulary, edge: str) -> bool:
    """Return whether the model wants BOS or EOS: as the file says, else BOS where its kind always has it."""
    default = edge == "bos" and (vocabulary.get("model") == "llama" or vocabulary.get("pre") in _WHOLE_WORDS)
    return bool(vocabulary.get(f"add_{edge}_token", default))


def _wrap(backend: Any, vocabulary: _Vocabulary) -> HFTokenizer:
    from transformers import PreTrainedTokenizerFast

    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    known = {name: token for name, key in names.items() if (token := vocabulary.token(key)) is not None}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=vocabulary.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **known,
    )
    ends = {vocabulary.get(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")} - {None}
    ends |= {
        number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in {_CONTROL, _USER} and token in _END_OF_TURN
    }
    return HFTokenizer(wrapped, ends)
