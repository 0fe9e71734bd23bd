"""What comes back of a request: frozen records. What is asked for is in `request.py`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import attrs


class FinishReason(StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@attrs.frozen(kw_only=True)
class Logprob:
    """The model's own log-probability of a delivered token, and of the ``top`` best as (token id, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, stored: Sequence[Any]) -> Logprob:
        """Return what `attrs.astuple` has made plain, after JSON."""
        token, logprob, top = stored
        return cls(token=token, logprob=logprob, top=tuple((other, value) for other, value in top))


@attrs.frozen(kw_only=True)
class TokenEvent:
    """One delivered token, or the end of a stream.

    ``index`` counts delivered tokens from 0. ``text`` is what became certain with this token: it never holds half
    a character nor the beginning of a stop string, and may be empty. The last event of a stream carries
    ``finish_reason`` and the text that was still held back; its ``token`` is None.
    """

    request_id: str
    index: int
    token: int | None
    text: str = ""
    logprob: Logprob | None = None
    finish_reason: FinishReason | None = None


@attrs.frozen(kw_only=True)
class Usage:
    """What a request cost.

    Milliseconds are wall time: ``prefill_ms`` from admission to the first token, ``decode_ms`` from there to the end.
    ``generated_tokens`` counts a terminating EOS. ``seed`` repeats the run. ``drafted_tokens`` were verified, of which
    ``accepted_tokens`` were what the row drew itself; ``forced_tokens`` were appended, since nothing else could follow.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    seed: int | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0


@attrs.frozen(kw_only=True)
class Result:
    """The outcome of a request that ended without an error. ``token_ids`` are the delivered tokens, EOS excluded."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[Logprob, ...] | None = None
