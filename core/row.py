"""One request's run state and its token accounting. A row knows no array and no neighbour."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from oarlock.core.request import Request
from oarlock.core.result import FinishReason, Logprob, Result, TokenEvent, Usage
from oarlock.core.stops import StopSequences
from oarlock.core.text import TextStream
from oarlock.core.tracing import Spans

if TYPE_CHECKING:
    from oarlock.core.admission import GroupKey
    from oarlock.core.constraints import Matcher


@attrs.define(eq=False, kw_only=True)
class Row:
    """Everything the engine knows about one request.

    ``current`` is the last emitted token: the input of the next cold step. ``generated`` counts tokens accounted to
    the stream, a terminating EOS included; ``sampled`` counts samples and leads it by one in the pipeline. ``fed``
    are the generated tokens that entered the caches, so prompt + fed is exactly what the row's state covers;
    ``fed_tainted`` says that this is no longer known, and such state is never stored. ``merged``: the row was ever
    part of a batch of several, or its consumer failed.
    """

    request: Request
    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    key: GroupKey
    text: TextStream | None = None
    matcher: Matcher | None = None
    """Its constraint; None again once the row is settled."""
    sequences: StopSequences | None = None
    """Its stop sequences; tokens that it holds back are in ``token_ids`` and were shown to nobody."""
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    decode_span: tuple[float, float] | None = None
    namespace: str = ""
    current: int = 0
    generated: int = 0
    sampled: int = 0
    cached_tokens: int = 0
    forced: int = 0
    """Delivered tokens that its constraint left no choice about, and that were forwarded before they were drawn."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Counted by methods that draft, before the token behind a draft is emitted, with which the row may end."""
    fed: list[int] = attrs.field(factory=list)
    fed_tainted: bool = False
    merged: bool = False
    compiled: bool = True
    """Whether steps of it may be compiled: not once one failed, or the device."""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[Logprob] = attrs.field(factory=list)
    reason: FinishReason | None = None
    error: BaseException | None = None
    cancelled: bool = False
    checkpoint_at: int = 1
    """How many tokens are delivered when its next checkpoint is due."""
    admitted_number: int = 0
    """Counts admissions: the newest rows have the largest."""
    preempted: bool = False
    """Gave its state up once, for want of memory."""
    fault: BaseException | None = None
    """Set from any thread, before ``cancelled``: the row ends with this."""
    stop_at: int | None = None
    """Set from any thread, before ``cancelled``: the row ended after so many tokens; what came later is taken back."""
    outcome: Result | BaseException | None = None
    events: Callable[[TokenEvent], None] | None = None
    ended: Callable[[BaseException | None], None] | None = None
    done: threading.Event = attrs.field(factory=threading.Event)
    spans: Spans = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.spans = Spans(self.request.trace)

    @property
    def reuses_prefix(self) -> bool:
        """Whether the row's state may come from a prefix and be kept as one: tokens must be all that it depends on."""
        return self.request.reuse_prefix and self.request.inputs is None

    @property
    def plain(self) -> bool:
        """Whether the bare model computes the row from its ids alone: no adapter, no prepared input."""
        return not self.request.adapter and self.request.inputs is None

    def unmixed(self, position: int, width: int) -> int:
        """Return ``width``, or less where a forward from ``position`` would run from prepared input into ids."""
        left = self.prompt_tokens - position
        return min(width, left) if self.request.inputs is not None and left > 0 else width

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.prompt_ids)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """The prompt and every delivered token: what is computed again where the state is lost."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def over(self) -> bool:
        """True once the row has a reason or an error: it takes no further part."""
        return self.reason is not None or self.error is not None

    @property
    def live(self) -> bool:
        """True while another token may be sampled; a row that is not live but unread is doomed.

        A constraint that failed is among what is told when a token is sampled.
        """
        ended = self.matcher is not None and self.matcher.over and self.matcher.error is None
        return self.sampled < self.max_tokens and not ended

    @property
    def coverage(self) -> Sequence[int]:
        """Exactly the tokens that the row's state holds, unless it is tainted."""
        return [*self.prompt_ids, *self.fed]

    def usage(self, now: float) -> Usage:
        """Return the statistics as of ``now`` (seconds, the engine's clock)."""
        first = self.first_token_at or now
        if self.decode_span is not None:
            first, now = self.decode_span
        return Usage(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            prefill_ms=1e3 * (first - self.admitted_at) if self.admitted_at else 0.0,
            decode_ms=1e3 * (now - first) if self.first_token_at or self.decode_span else 0.0,
            seed=self.seed,
            forced_tokens=self.forced,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    def result(self, now: float) -> Result:
        """Return the result of a row that has a reason."""
        assert self.reason is not None
        return Result(
            id=self.id,
            token_ids=tuple(self.token_ids),
            text=self.text.text if self.text else "",
            finish_reason=self.reason,
            usage=self.usage(now),
            logprobs=tuple(self.logprobs) if self.request.sampling.logprobs is not None else None,
        )

    def truncate(self, tokens: int) -> None:
        """Take delivered tokens back beyond the first ``tokens``; the state covers them, so it is not stored."""
        taken = len(self.token_ids) - tokens
        if taken > 0:
            del self.token_ids[tokens:], self.logprobs[tokens:]
            self.generated -= taken
            self.fed_tainted = True
            if self.sequences is not None:
                self.sequences.drop()
            if self.text is not None:
                self.text = self.text.again(self.token_ids)

    def cut(self, tokens: int) -> None:
        """Take the last ``tokens`` out of the answer: they are counted, and part of the state, and were shown to nobody."""
        kept = len(self.token_ids) - tokens
        del self.token_ids[kept:], self.logprobs[kept:]

    def restart(self) -> None:
        """Forget what the caches held: the row goes on from its known tokens, with the draws that it would have had."""
        self.fed, self.sampled, self.fed_tainted = list(self.token_ids), self.generated, False
        if self.matcher is not None:
            self.matcher.restart(self.token_ids)

    def settle(self, outcome: Result | BaseException) -> bool:
        """Fix the outcome once. Later calls change nothing and return False."""
        if self.outcome is not None:
            return False
        self.outcome, self.matcher = outcome, None
        return True

    @property
    def watched(self) -> bool:
        """True where somebody takes the row's events: without a stream and a callback none is made."""
        return self.events is not None or self.request.on_token is not None

    def publish(self, event: TokenEvent) -> None:
        """Hand an event to whoever streams this row; without a stream it is dropped."""
        if self.events is not None:
            self.events(event)

    def publish_end(self, error: BaseException | None) -> None:
        """Tell whoever waits that the outcome stands; ``error`` is None for a result."""
        if self.ended is not None:
            self.ended(error)
