"""The fields of a body that all endpoints share, and those that no answer depends on. What they ask of the engine is a `Request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.plugins.server.failures import Refusal, bad, not_served, unknown

OWN = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop",
    "constraint",
    "namespace",
    "method",
    "extra",
)
"""Fields of ours that OpenAI's interface has not; a client sends them beside its own (``extra_body``)."""

SHARED = (
    "model",
    "stream",
    "stream_options",
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""Fields that every endpoint understands."""

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields that name who asks, or what for: taken as they are, and nothing depends on them."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of what is not offered, with the values that do not ask for it."""

SEEDS = 2**64
MAX_CHOICES = 128


def check(body: Mapping[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that say something: those not null. Refuses what is unknown, and what is not offered."""
    known = (*SHARED, *own, *OWN, *LABELS, *NEUTRAL)
    said = {key: value for key, value in body.items() if value is not None}
    for key, value in said.items():
        if key not in known:
            raise unknown(key, known)
        if key in NEUTRAL and key not in own and value not in NEUTRAL[key]:
            allowed = ", ".join(repr(each) for each in (*NEUTRAL[key], None))
            raise bad(key, value, f"{allowed}; this server does not offer it")
    return {key: value for key, value in said.items() if key not in LABELS and (key in own or key not in NEUTRAL)}


def flag(said: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = said.get(name, default)
    if not isinstance(value, bool):
        raise bad(name, value, "true, false")
    return value


def whole(said: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    """Return a field that is a whole number."""
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise bad(name, value, f"whole numbers from {least} to {most}")
    return value


def include_usage(said: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with what it cost. Refuses options of a stream for an answer that is none."""
    options = said.get("stream_options")
    if options is None:
        return False
    if not flag(said, "stream"):
        raise bad("stream_options", options, "null where stream is not true")
    if not isinstance(options, Mapping):
        raise bad("stream_options", options, "objects")
    given = {f"stream_options.{key}": value for key, value in options.items() if value is not None}
    obfuscated, counted = "stream_options.include_obfuscation", "stream_options.include_usage"
    for key in given:
        if key not in {obfuscated, counted}:
            raise unknown(key, (counted,))
    if flag(given, obfuscated):
        raise bad(obfuscated, got=True, allowed="false")
    return flag(given, counted)


def request_fields(said: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Request` that are the same for each choice but the seed, see `seeds`."""
    plain = ("stop", "temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias", *OWN)
    return {**defaults, **{name: said[name] for name in plain if name in said}}


def seeds(said: Mapping[str, Any], n: int) -> Sequence[int | None]:
    """Return the seed of each of ``n`` choices: what was given, then the next numbers, so that choices differ."""
    seed = said.get("seed")
    if seed is None:
        return [None] * n
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(SEEDS // 2) <= seed < SEEDS:
        raise bad("seed", seed, "whole numbers of 64 bits, signed or not")
    return [(seed + choice) % SEEDS for choice in range(n)]


def model_name(said: Mapping[str, Any], served: Sequence[str]) -> str:
    """Return which of the ``served`` names a request means. Raises a refusal with status 404 for another one."""
    name = said.get("model")
    if name is None:
        message = f"model is missing; allowed: {', '.join(served)}"
        raise Refusal(400, message, param="model", code="missing_required_parameter")
    if not isinstance(name, str):
        raise bad("model", name, f"names of models: {', '.join(served)}")
    if name not in served:
        raise not_served(name, served)
    return name
