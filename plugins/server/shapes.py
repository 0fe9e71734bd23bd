"""What answers of all endpoints have in common: the frame, what it cost, and how tokens are written. It awaits nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from oarlock.core.request import Request
from oarlock.core.result import FinishReason, Logprob, Result, TokenEvent
from oarlock.plugins.server.failures import finite
from oarlock.plugins.server.service import Service


class Shape(Protocol):
    """How one request's choices are written. Choices are counted from 0, over all prompts."""

    frame: Frame

    def start(self, choice: int) -> list[dict[str, Any]]:
        """Return what a stream says of a choice before its first token."""
        ...

    def event(self, choice: int, event: TokenEvent) -> list[dict[str, Any]]:
        """Return what a stream says of an event; nothing where it brings nothing."""
        ...

    def full(self, choice: int) -> bool:
        """Return whether nothing more is wanted of a choice."""
        ...

    def end(self, choice: int, result: Result) -> list[dict[str, Any]]:
        """Return what a stream says at a choice's end; its finish reason stands in the last one, and only there."""
        ...

    def whole(self, choice: int, result: Result) -> dict[str, Any]:
        """Return a choice of an answer that is no stream."""
        ...


@attrs.define(eq=False, kw_only=True)
class Frame:
    """What stands around choices. ``requests`` are in their order, ``prompts`` of them are different prompts."""

    id: str
    object: str
    model: str
    fingerprint: str
    requests: Sequence[Request]
    prompts: int = 1
    stream: bool = False
    with_usage: bool = False
    created: int = attrs.field(factory=lambda: int(time.time()))

    def around(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return one answer, or one piece of a stream."""
        whole: dict[str, Any] = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }
        if usage is not None or self.with_usage:
            whole["usage"] = usage
        return whole

    def usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return what all choices cost together. A prompt counts once, however many choices it has."""
        each = len(results) // self.prompts
        firsts = [results[place : place + each] for place in range(0, len(results), each)]
        prompt = sum(some[0].usage.prompt_tokens for some in firsts)
        generated = sum(result.usage.generated_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(min(result.usage.cached_tokens for result in some) for some in firsts)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(result.usage.accepted_tokens for result in results),
                "rejected_prediction_tokens": sum(
                    result.usage.drafted_tokens - result.usage.accepted_tokens for result in results
                ),
            },
        }


def finish_reason(result: Result) -> str:
    """Return why a choice ended, in OpenAI's words; what was cancelled had all that was wanted."""
    return "length" if result.finish_reason is FinishReason.LENGTH else "stop"


def token_entry(service: Service, token: int, logprob: float) -> dict[str, Any]:
    """Return one token as chat answers write it; ``bytes`` is null where they are no whole characters."""
    text = service.text_of(token)
    whole = "\ufffd" not in text
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if whole else None}


def chat_logprob(service: Service, logprob: Logprob) -> dict[str, Any]:
    """Return a token with its alternatives as chat answers write them."""
    top = [token_entry(service, token, value) for token, value in logprob.top]
    return {**token_entry(service, logprob.token, logprob.logprob), "top_logprobs": top}
