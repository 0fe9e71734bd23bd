"""Results and errors as plain data for JSON."""

from __future__ import annotations

from typing import Any

import attrs

from oarlock.core.result import Result
from oarlock.plugins.cli.console import one_line


def result_fields(result: Result) -> dict[str, Any]:
    """Return what a program reads of a result."""
    usage = {
        key: round(value, 3) if isinstance(value, float) else value for key, value in attrs.asdict(result.usage).items()
    }
    fields: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": str(result.finish_reason),
        "usage": usage,
    }
    if result.logprobs is not None:
        fields["logprobs"] = [
            {"token": item.token, "logprob": item.logprob, "top": [list(pair) for pair in item.top]}
            for item in result.logprobs
        ]
    return fields


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return what a program reads of an error."""
    return {"error": {"type": type(error).__name__, "message": one_line(error) or "no message"}}
