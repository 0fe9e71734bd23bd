"""From an error to a status and a body in OpenAI's shape. What went wrong is said where it is raised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.core import errors

RETRY_AFTER = 1
"""Seconds that a client is asked to wait for a place in the queue."""


class Refusal(Exception):
    """A request that is answered with an error.

    ``status`` is HTTP's, ``param`` the field at fault where there is one, ``code`` a word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, and what stands in a stream in its place."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says beside its body."""
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def bad(param: str, got: object, allowed: str) -> Refusal:
    """Return the refusal of a field's value: what was got, and what is allowed."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return Refusal(400, f"{param} is {shown}; allowed: {allowed}", param=param, code="invalid_value")


def unknown(param: str, known: tuple[str, ...]) -> Refusal:
    """Return the refusal of a field that no request has."""
    message = f"unknown field {param!r}{errors.did_you_mean(param, known)}; known: {', '.join(sorted(known))}"
    return Refusal(400, message, param=param, code="unknown_parameter")


def not_served(name: str, served: Sequence[str]) -> Refusal:
    """Return the refusal of a model's name that is none of those ``served``."""
    message = f"model {name!r} is not served here; served: {', '.join(served)}"
    return Refusal(404, message, param="model", code="model_not_found")


def draining() -> Refusal:
    """Return the refusal of a server that finishes what it has and takes nothing more."""
    return Refusal(503, "the server is shutting down; send this to another one", code="draining")


def refusal(error: BaseException, names: Mapping[str, str]) -> Refusal:
    """Return how ``error`` of the engine is answered; ``names`` are the client's words for fields of `Request`."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, errors.QueueFull):
        return Refusal(429, str(error), code="rate_limit_exceeded", kind="rate_limit_error")
    if isinstance(error, errors.EngineClosed):
        return draining()
    if isinstance(error, errors.NeverFits):
        return Refusal(400, str(error), code="request_too_large")
    if isinstance(error, errors.PromptTooLong):
        return Refusal(400, str(error), param=_named("prompt", names), code="context_length_exceeded")
    if isinstance(error, errors.RequestError | errors.UnknownName):
        field = _field(error)
        return Refusal(400, str(error), param=field and _named(field, names), code="invalid_value")
    if isinstance(error, errors.RowError):
        return Refusal(500, str(error), code="generation_failed")
    return Refusal(500, f"the engine failed: {type(error).__name__}: {error}", code="engine_failed")


def _field(error: BaseException) -> str | None:
    """Return the field of `Request` that an error is about."""
    if isinstance(error, errors.EmptyPrompt | errors.NoChatTemplate):
        return "prompt"
    if isinstance(error, errors.InvalidConstraint):
        return "constraint"
    if isinstance(error, errors.UnknownName):
        return error.kind
    if isinstance(error, errors.UnknownRequestKey):  # all others were looked at before
        return "extra"
    found = [getattr(error, each, None) for each in ("name", "field", "key")]
    return next((each for each in found if isinstance(each, str)), None)


def _named(field: str, names: Mapping[str, str]) -> str:
    """Return a client's word for ``field``, or for what it is a part of: ``constraint.regex``, ``prompt_ids[3]``."""
    whole = field.partition(".")[0].partition("[")[0].partition(" ")[0]
    return names.get(whole, whole)


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return value if math.isfinite(value) else -9999.0
