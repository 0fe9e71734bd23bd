"""Public names that need no mlx: what a caller builds requests with and what a plugin marks its hooks with."""

from oarlock.core.contracts.inputs import PreparedInputs
from oarlock.core.errors import OarlockError
from oarlock.core.hookspecs import hookimpl
from oarlock.core.request import Request, SamplingParams
from oarlock.core.result import FinishReason, Logprob, Result, TokenEvent, Usage

__all__ = [
    "FinishReason",
    "Logprob",
    "OarlockError",
    "PreparedInputs",
    "Request",
    "Result",
    "SamplingParams",
    "TokenEvent",
    "Usage",
    "hookimpl",
]
