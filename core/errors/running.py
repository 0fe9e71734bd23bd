"""Errors of admission and of rows that run."""

from __future__ import annotations

from collections.abc import Iterable

from oarlock.core.errors.base import OarlockError


class AdmissionError(OarlockError, RuntimeError):
    """A valid request was not accepted into the queue."""


class QueueFull(AdmissionError):
    """``max_queued`` requests are already waiting."""

    def __init__(self, queued: int, limit: int) -> None:
        self.queued, self.limit = queued, limit
        super().__init__(f"the queue is full: {queued} requests wait and max_queued is {limit}; try again later")


class NeverFits(AdmissionError):
    """The request exceeds a budget even if it ran alone."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        self.what, self.needed, self.available = what, needed, available
        super().__init__(f"the request needs {needed} {what} and at most {available} are available, even alone")


class EngineClosed(OarlockError, RuntimeError):
    """The engine was closed; it takes no more work."""

    def __init__(self) -> None:
        super().__init__("the engine is closed: open a new one with Engine.load(...)")


class WrongThread(OarlockError, RuntimeError):
    """A second thread tried to drive an engine: MLX arrays belong to the thread that made them."""

    def __init__(self, owner: str, caller: str) -> None:
        self.owner, self.caller = owner, caller
        super().__init__(
            f"thread {caller!r} cannot step this engine: thread {owner!r} drives it; "
            "submit and cancel from any thread, step from one"
        )


class StepInsideStep(OarlockError, RuntimeError):
    """A step was asked for by something that a step had called: a consumer, a task, an observer."""

    def __init__(self) -> None:
        super().__init__(
            "this engine is inside a step: from a callback submit, cancel, hold, release and close are allowed, "
            "step, result, generate and stream are not"
        )


class RowError(OarlockError, RuntimeError):
    """One row failed. Attribute ``request_id`` names it."""

    def __init__(self, request_id: str, message: str) -> None:
        self.request_id = request_id
        super().__init__(message)


class NonFiniteLogits(RowError):
    """The scores of this row are NaN or all minus infinity: by the model, or because processors forbid every token."""

    def __init__(self, request_id: str, position: int) -> None:
        self.position = position
        super().__init__(
            request_id, f"request {request_id!r}: the scores after position {position} are not finite; row rejected"
        )


class ConstraintFailed(RowError):
    """A row's constraint raised, or allows no token though it has not ended. ``tokens``: how many it had accepted."""

    def __init__(self, request_id: str, constraint: str, tokens: int, reason: str) -> None:
        self.constraint, self.tokens, self.reason = constraint, tokens, reason
        super().__init__(
            request_id,
            f"request {request_id!r}: constraint {constraint!r} failed after {tokens} tokens: {reason}; row rejected",
        )


class SlowConsumer(RowError):
    """A consumer of a stream did not keep up within the stated time."""

    def __init__(self, request_id: str, seconds: float, limit: int) -> None:
        self.seconds, self.limit = seconds, limit
        super().__init__(
            request_id,
            f"request {request_id!r}: its consumer left {limit} events unread for {seconds} s; row rejected",
        )


class RecoveriesExhausted(OarlockError, RuntimeError):
    """The device failed again and again though no row is guilty. ``cause`` is its last error."""

    def __init__(self, limit: int, cause: BaseException) -> None:
        self.limit, self.cause = limit, cause
        super().__init__(
            f"the device failed {limit + 1} times without a request finished in between and max_recoveries is {limit} "
            f"({type(cause).__name__}: {cause})"
        )


class CompositionError(OarlockError, RuntimeError):
    """A step fails for rows together though each of them succeeds alone.

    Attributes: ``request_ids`` of the rows, ``cause`` the error of the joint step.
    """

    def __init__(self, request_ids: Iterable[str], cause: BaseException) -> None:
        self.request_ids, self.cause = tuple(request_ids), cause
        super().__init__(
            f"{len(self.request_ids)} rows fail together and none fails alone: the model or a layout cannot "
            f"batch them ({type(cause).__name__}: {cause})"
        )


class RankLost(OarlockError, RuntimeError):
    """A step cannot go on because another rank, or the device, does not answer; checkpoints stay as they are."""


class ScheduleDiverged(OarlockError, RuntimeError):
    """Ranks that apply one log did not do the same."""
