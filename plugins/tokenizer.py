"""The adapter for Hugging Face tokenizers, whoever read their files. It does not own how text is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oarlock.core import errors
from oarlock.core.contracts.loader import ToolFormat


class HFTokenizer:
    """A transformers tokenizer, or mlx-lm's wrapper around one, as the `Tokenizer` contract wants it.

    ``tokenizer`` is what was wrapped; ``eos_token_ids`` unites what it names with the ids passed in.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        more = getattr(tokenizer, "eos_token_ids", None)  # mlx-lm's set; transformers makes a number up
        named = [tokenizer.eos_token_id, *(more if isinstance(more, set) else ())]
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids) | eos_ids({"eos_token_id": named})
        self.tool_format = _tool_format(tokenizer)
        self._unseen = _unseen(tokenizer, self.tool_format)
        _repair_decoder(getattr(tokenizer, "backend_tokenizer", None))

    def encode(self, text: str) -> list[int]:
        # verbose=False: the length is checked at submit, against the model and not against the tokenizer's guess.
        ids = list(self.tokenizer.encode(_well_formed(text), truncation=False, padding=False, verbose=False))
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:  # the text named it and the tokenizer added it
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        seen = ids if self._unseen is None else [token for token in ids if token not in self._unseen]
        text: str = self.tokenizer.decode(
            list(seen), skip_special_tokens=self._unseen is None, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._render(messages, {})

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._render(messages, {"tools": [dict(tool) for tool in tools]})

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        from jinja2 import TemplateError

        plain = [{key: _well_formed(v) if isinstance(v, str) else v for key, v in m.items()} for m in messages]
        has_template = getattr(self.tokenizer, "has_chat_template", self.tokenizer.chat_template is not None)
        if not has_template:
            raise errors.NoChatTemplate
        try:
            ids = self.tokenizer.apply_chat_template(plain, tokenize=True, add_generation_prompt=True, **options)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = f"its chat template refused them ({one_line(error)})"
            raise errors.NoChatTemplate(reason) from error
        if isinstance(ids, Mapping):  # transformers 5 returns a BatchEncoding
            ids = ids["input_ids"]
        return [int(token) for token in ids]


def _tool_format(tokenizer: Any) -> ToolFormat | None:
    """Return what mlx-lm found out of how the model calls tools."""
    if not getattr(tokenizer, "has_tool_calling", False):
        return None
    return ToolFormat(start=tokenizer.tool_call_start, end=tokenizer.tool_call_end, parse=tokenizer.tool_parser)


def _unseen(tokenizer: Any, tools: ToolFormat | None) -> frozenset[int] | None:
    """Return the special tokens that no text shows; None where those are all: where no mark of a tool call is one."""
    if tools is None:
        return None
    special = frozenset(tokenizer.all_special_ids)
    marks = special & {*tokenizer.tool_call_start_tokens, *tokenizer.tool_call_end_tokens}
    return special - marks if marks else None


def eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Return every id under ``eos_token_id`` of a config: an int, a list, or either in a nested ``text_config``."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, Sequence) else [value]
    found = frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    nested = config.get("text_config")
    return found | eos_ids(nested) if isinstance(nested, Mapping) else found


def _repair_decoder(backend: Any) -> None:
    """Give a byte-level tokenizer a byte-level decoder, else its space markers would show in the text."""
    if backend is None or backend.pre_tokenizer is None:
        return
    decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
    if b'"ByteLevel"' in backend.pre_tokenizer.__getstate__() and b'"ByteLevel"' not in decoder:
        from tokenizers import decoders

        backend.decoder = decoders.ByteLevel()


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def one_line(error: BaseException) -> str:
    """Return the type and the text of an error of another library, fit for a message of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
