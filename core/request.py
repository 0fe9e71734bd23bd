"""What a caller asks for: frozen records. What comes back is in `result.py`, run state in `row.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from oarlock.core import errors

if TYPE_CHECKING:
    from oarlock.core.result import TokenEvent

MAX_LOGPROBS = 20
"""Most alternatives per token that `SamplingParams.logprobs` may ask for."""


def is_whole(value: object) -> bool:
    """Return whether this is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether this is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(ok: bool, name: str, got: object, allowed: str) -> None:
    if not ok:
        raise errors.InvalidParameter(name, got, allowed)


def _frozen_mapping(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    _require(isinstance(value, Mapping), "extra", value, "mappings")
    return MappingProxyType(dict(value))


def _bias(value: Mapping[Any, Any] | None) -> Mapping[int, float] | None:
    """Return the bias with integer keys (JSON has string keys), refusing what is not a token id."""
    if value is None:
        return None
    _require(isinstance(value, Mapping), "logit_bias", value, "mappings from token ids to numbers")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        text = str(key)
        if isinstance(key, bool) or not text.isdecimal():
            raise errors.InvalidParameter("logit_bias key", key, "token ids, as integers or decimal strings")
        _require(is_number(amount), f"logit_bias[{text}]", amount, "finite numbers")
        bias[int(text)] = float(amount)
    return MappingProxyType(bias)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How scores become a token.

    First come processors: penalties, ``logit_bias``, and what ``extra`` names. Then filters, in this order: temperature,
    top_k, top_p, min_p; each keeps at least one token.
    ``temperature`` 0 is greedy. ``seed`` None draws a fresh one, which `Usage.seed` reports. ``logprobs`` None
    records nothing, 0 the chosen token's log-probability, n also the n best tokens; all of them come from the
    model's own distribution, before processors, temperature and filters. ``extra`` holds what plugins registered.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = attrs.field(default=None, converter=_bias)
    logprobs: int | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)

    def __attrs_post_init__(self) -> None:
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise errors.InvalidTemperature("temperature", self.temperature, "finite numbers >= 0 (0 is greedy)")
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise errors.InvalidTopP("top_p", self.top_p, "numbers in (0, 1]")
        _require(is_whole(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "whole numbers >= 0 (0 is off)")
        _require(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "numbers in [0, 1]")
        _require(
            self.seed is None or (is_whole(self.seed) and 0 <= self.seed < 2**64),
            "seed",
            self.seed,
            "whole numbers from 0 to 2**64 - 1, or None",
        )
        _require(
            is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "numbers > 0 (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(is_number(getattr(self, name)), name, getattr(self, name), "finite numbers (0 is off)")
        _require(
            self.logprobs is None or (is_whole(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"whole numbers from 0 to {MAX_LOGPROBS}, or None",
        )

    @property
    def greedy(self) -> bool:
        """True where the token is the argmax and no draw is made."""
        return self.temperature == 0


def _tokens(value: Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    whole = value.tolist() if hasattr(value, "tolist") else value
    _require(isinstance(whole, Sequence), "prompt_ids", value, "sequences of whole numbers")
    ids = tuple(whole)
    for position, token in enumerate(ids):
        if not is_whole(token):
            place = f"prompt_ids[{position}]"
            raise errors.InvalidParameter(place, token, "whole numbers")
    return ids


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    _require(isinstance(value, Sequence), "stop", value, "non-empty strings, alone or in a list")
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
    return texts


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    _require(isinstance(value, int | Sequence), "stop_token_ids", value, "token ids, alone or in a list")
    ids = (value,) if isinstance(value, int) else tuple(value)
    for token in ids:
        _require(is_whole(token) and token >= 0, "stop_token_ids", token, "token ids")
    return ids


def _sequences(value: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    name, allowed = "stop_sequences", "lists of non-empty lists of token ids"
    _require(value is None or (isinstance(value, Sequence) and not isinstance(value, str)), name, value, allowed)
    for sequence in value or ():
        _require(
            isinstance(sequence, Sequence) and not isinstance(sequence, str) and len(sequence) > 0,
            name,
            sequence,
            allowed,
        )
        _require(all(is_whole(token) and token >= 0 for token in sequence), name, sequence, allowed)
    return tuple(tuple(sequence) for sequence in value or ())


def _conversation(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value)


@attrs.frozen(kw_only=True)
class Request:
    """One generation. Exactly one of ``prompt_ids``, ``prompt`` and ``messages`` is given.

    ``max_tokens`` None means up to the model's positions. ``stop`` strings end the text before themselves (or
    after, with ``include_stop``); ``stop_token_ids`` end it like EOS, counted but not delivered, and so do all tokens of one
    of ``stop_sequences`` in a row, which are delivered with ``include_stop``. Nothing of this ends a row that would have fewer
    than ``min_tokens`` then, and EOS and ``stop_token_ids`` are not drawn before. ``on_token`` is called with a `TokenEvent` per delivered token; returning exactly False stops the row; raising rejects it alone.
    ``namespace`` may be a callable: it is resolved at admission. ``priority``: higher goes first. ``compiled`` False
    keeps steps of this row from being compiled. ``constraint`` has one key, the name of a registered constraint, and its
    spec: ``{"json_schema": {...}}``.
    """

    prompt_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_tokens)
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    stop_sequences: tuple[tuple[int, ...], ...] = attrs.field(default=(), converter=_sequences)
    ignore_eos: bool = False
    on_token: Callable[[TokenEvent], Any] | None = attrs.field(default=None, eq=False)
    on_admitted: Callable[[], Any] | None = attrs.field(default=None, eq=False)
    trace: Any = attrs.field(default=None, eq=False)
    prefill_chunk: int | None = None
    compiled: bool = True
    inputs: Any = attrs.field(default=None, eq=False)
    constraint: Mapping[str, Any] | None = None
    method: str | None = None
    adapter: str | None = None
    namespace: str | Callable[[], str] = ""
    session: str | None = None
    reuse_prefix: bool = True
    checkpoint_interval: int | None = None
    priority: int = 0
    id: str | None = None

    def __attrs_post_init__(self) -> None:
        given = [n for n in ("prompt_ids", "prompt", "messages") if getattr(self, n) is not None]
        _require(len(given) == 1, "prompt", given, "exactly one of prompt_ids, prompt, messages")
        _require(self.prompt is None or isinstance(self.prompt, str), "prompt", self.prompt, "strings")
        _require(self.messages is None or _conversation(self.messages), "messages", self.messages, "lists of mappings")
        if not (self.max_tokens is None or (is_whole(self.max_tokens) and self.max_tokens >= 1)):
            raise errors.InvalidMaxTokens("max_tokens", self.max_tokens, "whole numbers >= 1, or None")
        _require(
            is_whole(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or math.inf),
            "min_tokens",
            self.min_tokens,
            "whole numbers from 0 to max_tokens",
        )
        _require(isinstance(self.sampling, SamplingParams), "sampling", self.sampling, "SamplingParams")
        for name in ("prefill_chunk", "checkpoint_interval"):
            value = getattr(self, name)
            _require(value is None or (is_whole(value) and value >= 1), name, value, "whole numbers >= 1, or None")
        for name in ("include_stop", "ignore_eos", "reuse_prefix", "compiled"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True, False")
        for name in ("method", "adapter", "session"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), name, value, "strings, or None")
        _require(isinstance(self.namespace, str) or callable(self.namespace), "namespace", self.namespace, "strings")
        named = isinstance(self.constraint, Mapping) and [type(key) for key in self.constraint] == [str]
        allowed = "mappings with one key, the name of a registered constraint"
        _require(self.constraint is None or named, "constraint", self.constraint, allowed)
        _require(is_whole(self.priority), "priority", self.priority, "whole numbers")
        _require(self.id is None or (isinstance(self.id, str) and self.id != ""), "id", self.id, "non-empty strings")

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Request:
        """Build a request from plain data, such as one line of JSON.

        Sampling fields may stand at the top level beside the request's own. An unknown key raises
        `errors.UnknownRequestKey` naming the nearest known one. Callables are not accepted: a request names no code.
        """
        own = {a.name for a in attrs.fields(cls)} - {"on_token", "on_admitted", "trace", "sampling", "inputs"}
        sampling_names = {a.name for a in attrs.fields(SamplingParams)}
        inner = fields.get("sampling")
        _require(inner is None or isinstance(inner, Mapping), "sampling", inner, "mappings of sampling fields")
        sampling = dict(inner or {})
        mine: dict[str, Any] = {}
        for key, value in fields.items():
            if key == "sampling":
                continue
            if key in sampling_names:
                sampling[key] = value
            elif key in own:
                mine[key] = value
            else:
                raise errors.UnknownRequestKey(key, own | sampling_names | {"sampling"})
        for key in sampling:
            if key not in sampling_names:
                raise errors.UnknownRequestKey(key, sampling_names)
        return cls(**mine, sampling=SamplingParams(**sampling))
