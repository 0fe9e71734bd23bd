"""Emission of one token: the only place where tokens leave the engine. It moves no row and touches no cache."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FrameType

import attrs
import structlog

from oarlock.core.constraints import follow
from oarlock.core.contracts.method import Drawn
from oarlock.core.contracts.state_cache import Checkpoint
from oarlock.core.errors import NonFiniteLogits, RowError
from oarlock.core.observe import Observers
from oarlock.core.result import FinishReason, TokenEvent
from oarlock.core.row import Row
from oarlock.core.stops import StopSequences

_log = structlog.get_logger(__name__)


@attrs.define
class Emitter:
    """Accounts tokens and delivers them, in the order that SPEC states; settles rows that are over."""

    observers: Observers
    clock: Callable[[], float]
    delivered: int = 0
    completed: int = 0
    _errors: list[BaseException] = attrs.field(factory=list, init=False)
    """What rows were settled with while their callers still ran."""

    def emit(self, row: Row, drawn: Drawn) -> bool:
        """Account one sampled token; False when the row is over. Never raises."""
        if row.over:
            return False
        if drawn.error is not None:
            return self._poison(row, drawn.error)
        if row.cancelled:
            return self.finish(row, FinishReason.CANCELLED)
        if not drawn.finite:
            return self._poison(row, NonFiniteLogits(row.id, row.prompt_tokens + row.generated - 1))
        if (refused := follow(row, drawn)) is not None:
            return self._poison(row, refused)
        row.generated += 1  # before anything is delivered: EOS and the stopping token count
        row.forced += drawn.forced
        if row.generated == 1:
            self._first(row)
        if drawn.token in row.stop_ids:
            return self.finish(row, FinishReason.STOP)
        try:
            stopped = self._deliver(row, drawn)
        except Exception as error:  # noqa: BLE001 - a consumer may raise anything; it costs its own row
            return self._poison(row, error)
        if stopped or (row.matcher is not None and row.matcher.satisfied(len(row.token_ids))):
            return self.finish(row, FinishReason.STOP)
        if row.generated >= row.max_tokens:
            return self.finish(row, FinishReason.LENGTH)
        row.current = drawn.token
        return True

    def replay(self, row: Row, checkpoint: Checkpoint) -> None:
        """Deliver again what an earlier process delivered of this row. It may be over with that."""
        for token, logprob in itertools.zip_longest(checkpoint.tokens, checkpoint.logprobs):
            if not self.emit(row, Drawn(token, logprob=logprob)):
                return

    def finish(self, row: Row, reason: FinishReason) -> bool:
        """End a row with a reason; always False."""
        row.reason = row.reason or reason
        return False

    def conclude(self, row: Row) -> bool:
        """Settle a row that is over: its result or error, its last event, the observers. True the first time only."""
        if row.outcome is not None:
            return False
        if row.error is None:
            self._heed(row)
        now = self.clock()
        try:
            if row.error is None and row.sequences is not None:
                self._let_out(row, row.sequences)
            tail = row.text.finish() if row.text is not None and row.error is None else ""
        except Exception as error:  # noqa: BLE001 - a tokenizer that cannot decode costs its own row
            self._poison(row, error)
        if row.error is not None:
            _let_go(row.error)
            self._errors.append(row.error)
            row.settle(row.error)
            self.observers.notify("request_failed", request=row.request, error=row.error)
            self._end(row, None)
            return True
        assert row.reason is not None
        row.settle(row.result(now))
        self.completed += 1
        event = TokenEvent(request_id=row.id, index=len(row.token_ids), token=None, text=tail, finish_reason=row.reason)
        self.observers.notify("request_finished", request=row.request, reason=row.reason, usage=row.usage(now))
        self._end(row, event)
        return True

    def let_go(self) -> None:
        """Empty the frames behind the errors of settled rows that ran then and have ended since: at the end of a step."""
        errors, self._errors = self._errors, []
        for error in errors:
            _let_go(error)

    def _end(self, row: Row, last: TokenEvent | None) -> None:
        """Release whoever waits for a settled row; one that cannot be told any more changes nothing."""
        row.spans.end()
        row.done.set()
        with self._listening(row):
            if last is not None:
                row.publish(last)
        with self._listening(row):
            row.publish_end(row.error)

    @contextlib.contextmanager
    def _listening(self, row: Row) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the outcome stands whether or not anybody listens
            _log.warning("consumer_gone", request_id=row.id, error=repr(error))

    def _first(self, row: Row) -> None:
        row.first_token_at = self.clock()
        row.spans.end("token_zero.total")
        elapsed = row.first_token_at - row.submitted_at
        self.observers.notify("request_first_token", request=row.request, elapsed=elapsed)

    def _deliver(self, row: Row, drawn: Drawn) -> bool:
        """Add the token to the row and hand it to its consumers, or hold it back; True where it ends the row."""
        row.token_ids.append(drawn.token)
        if drawn.logprob is not None:
            row.logprobs.append(drawn.logprob)
        self.delivered += 1
        if row.sequences is None:
            return self._show(row, drawn, len(row.token_ids) - 1)
        found = row.sequences.push(drawn)
        if found and not row.request.include_stop:
            row.cut(found)
        return self._release(row, row.sequences) or found > 0

    def _release(self, row: Row, sequences: StopSequences) -> bool:
        """Hand over what is not held back any more; True where that ends the row, and what is behind it is taken back."""
        first = sequences.released
        for index, freed in enumerate(sequences.free(), start=first):
            if self._show(row, freed, index):
                row.truncate(index + 1)
                return True
        return False

    def _let_out(self, row: Row, sequences: StopSequences) -> None:
        """Hand over what a row that is over held back; a cancelled one keeps what was handed over before."""
        if row.reason is FinishReason.CANCELLED:
            row.truncate(sequences.released)
            return
        sequences.end()
        if self._release(row, sequences):
            row.reason = FinishReason.STOP

    def _show(self, row: Row, drawn: Drawn, index: int) -> bool:
        """Hand a token to its consumers; True where one of them, or the text, ends the row with it."""
        text = row.text.push(drawn.token) if row.text is not None else ""
        if row.watched:
            event = TokenEvent(request_id=row.id, index=index, token=drawn.token, text=text, logprob=drawn.logprob)
            row.publish(event)
            if row.request.on_token is not None and _refuses(row, row.request.on_token(event)):
                return True
        return row.text is not None and row.text.stopped is not None

    def _heed(self, row: Row) -> None:
        """End a row as its consumer said, which may have come after tokens that it had not seen."""
        if row.fault is not None:
            self._poison(row, row.fault)
        elif row.stop_at is not None:
            row.truncate(row.stop_at)
            row.reason = FinishReason.STOP

    def _poison(self, row: Row, error: BaseException) -> bool:
        """Reject one row; its state is never stored."""
        row.error = row.error or error
        row.merged = row.fed_tainted = True
        return False


def _refuses(row: Row, answer: object) -> bool:
    """Return whether a callback's answer ends the row."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise RowError(row.id, "on_token returned an awaitable; use AsyncEngine for coroutine callbacks")
    return answer is False


def _let_go(error: BaseException | None) -> None:
    """Empty the ended frames behind an error: who keeps it, or a handle, would keep the caches of its whole batch."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        frame = trace.tb_frame.f_back if trace is not None else None
        while frame is not None and _emptied(frame):
            frame = frame.f_back
        while trace is not None:
            _emptied(trace.tb_frame)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def _emptied(frame: FrameType) -> bool:
    """Drop the locals of a frame; False where it still runs, or may go on."""
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True
