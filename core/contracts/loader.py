"""Loaders: from a name or a path to a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs


class Tokenizer(Protocol):
    """What the core needs of a tokenizer."""

    eos_token_ids: frozenset[int]
    """Every id that ends a turn: the union of what tokenizer, model and generation config name."""

    def encode(self, text: str) -> list[int]:
        """Return the prompt's token ids, special tokens (BOS) added as the model wants them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the exact text of ``ids``: special tokens left out, spaces untouched, undecodable bytes as U+FFFD."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's answer. Raises `errors.NoChatTemplate`."""
        ...


@attrs.frozen(kw_only=True)
class ToolFormat:
    """How a model writes a call of a tool: ``start``, what ``parse`` reads, ``end``; an empty ``end`` is the text's.

    ``parse(text, tools)`` returns one mapping with "name" and "arguments", or a list of them, and raises where it reads none.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]


@runtime_checkable
class ToolTokenizer(Protocol):
    """A tokenizer that can also tell a model of tools. What it decodes holds the marks of ``tool_format``."""

    tool_format: ToolFormat | None
    """None where it is not known how the model calls a tool."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation in which ``tools`` may be called. Raises `errors.NoChatTemplate`."""
        ...


@attrs.frozen(kw_only=True)
class LoadedModel:
    """A model whose weights are evaluated.

    ``model`` is an mlx-lm model: ``model(ids, cache=caches)`` returns logits. ``identity`` names the weights, for
    keys of stored state. ``positions`` is the most tokens of one sequence, None where the model does not say.
    ``sampling`` are fields of `SamplingParams` that the model's makers advise.
    """

    model: Any
    tokenizer: Tokenizer | None
    identity: str
    model_type: str
    positions: int | None = None
    sampling: Mapping[str, Any] = attrs.field(factory=dict)


class Loader(Protocol):
    """Registered by name; loaders are asked in order of registration, built-in directories last."""

    name: str

    def accepts(self, source: str) -> bool:
        """Return whether ``source`` is for this loader. Cheap: looks at names and first bytes, reads no weights."""
        ...

    def load(self, source: str, *, dtype: str = "auto") -> LoadedModel:
        """Load on the calling thread.

        ``dtype``: "float32", "bfloat16", "float16", "stored", or "auto" (stored on a GPU, float32 on the CPU).
        """
        ...


@runtime_checkable
class PreparingLoader(Protocol):
    """A loader that lets somebody change a model before its weights are evaluated: take a part of them, say."""

    name: str
    prepares: bool
    """True: `load` takes ``prepare``."""

    def accepts(self, source: str) -> bool:
        """See `Loader.accepts`."""
        ...

    def load(self, source: str, *, dtype: str = "auto", prepare: Callable[[Any], None] | None = None) -> LoadedModel:
        """Load as `Loader.load`; ``prepare`` gets the model with its weights in place, none of them evaluated."""
        ...
