"""Logs what becomes of requests, through structlog. It configures nothing: where lines go is the application's choice.

Off unless named (``plugins.enable = ["log"]``), since an application without a logging set-up gets lines on stdout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from oarlock.core import hookimpl

if TYPE_CHECKING:
    from oarlock.core.observe import StepRecord
    from oarlock.core.request import Request
    from oarlock.core.result import FinishReason, Usage

OARLOCK_API = 1
OARLOCK_OFF_BY_DEFAULT = True

log = structlog.get_logger(__name__)


_bound: dict[int, Any] = {}
"""The logger of each request that was admitted and has not ended, by the identity of the request."""


def _of(request: Request) -> Any:
    return _bound.get(id(request)) or log.bind(request_id=request.id)


def _last_of(request: Request) -> Any:
    logger = _of(request)
    _bound.pop(id(request), None)
    return logger


@hookimpl
def request_admitted(request: Request) -> None:
    """Log that the prefill of a request starts."""
    _bound[id(request)] = _of(request)
    _of(request).info("request_admitted", max_tokens=request.max_tokens, priority=request.priority)


@hookimpl
def request_first_token(request: Request, elapsed: float) -> None:
    """Log the time from submission to the first token."""
    _of(request).info("request_first_token", elapsed_ms=round(elapsed * 1000, 3))


@hookimpl
def request_finished(request: Request, reason: FinishReason, usage: Usage) -> None:
    """Log what a request cost."""
    _last_of(request).info(
        "request_finished",
        reason=str(reason),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.generated_tokens,
        prefill_ms=round(usage.prefill_ms, 3),
        decode_ms=round(usage.decode_ms, 3),
        seed=usage.seed,
    )


@hookimpl
def request_failed(request: Request, error: BaseException) -> None:
    """Log the error that ended a request."""
    _last_of(request).warning("request_failed", error=type(error).__name__, message=str(error))


@hookimpl
def request_preempted(request: Request) -> None:
    """Log that a request goes back to the queue for want of memory."""
    _of(request).warning("request_preempted")


@hookimpl
def step_finished(step: StepRecord) -> None:
    """Log an iteration, at debug level."""
    log.debug(
        "step_finished",
        index=step.index,
        phase=step.phase,
        decode_rows=step.decode_rows,
        prefill_rows=step.prefill_rows,
        prefill_tokens=step.prefill_tokens,
        joined=step.joined,
        left=step.left,
        build_ms=round(step.build_ms, 3),
        read_ms=round(step.read_ms, 3),
        emit_ms=round(step.emit_ms, 3),
        gap_ms=round(step.gap_ms, 3),
        total_ms=round(step.total_ms, 3),
    )
