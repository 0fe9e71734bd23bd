"""Constraints as the engine calls them: foreign code, whose errors cost its own row. What is allowed is theirs to say.

A row's next scores are masked by what its tokens so far allow, so the host must have read them all: a step of a batch
with a constraint reads first. What the masks take to be filled overlaps the forward that is built after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.constraint import MAX_FORCED, Constraint, ConstraintFactory
from oarlock.core.errors import ConstraintFailed, InvalidConstraint, RequestError
from oarlock.core.lines import Lines
from oarlock.core.request import SamplingParams

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel
    from oarlock.core.contracts.loader import Tokenizer
    from oarlock.core.contracts.method import Drawn
    from oarlock.core.manager import PluginSet
    from oarlock.core.request import Request
    from oarlock.core.row import Row


_PLAIN = SamplingParams()
_LOOKS = ("logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "extra")
"""What looks at a row's scores, or at its history, between two tokens."""


@attrs.define(eq=False)
class Matcher:
    """The constraint of one row, kept at the row's tokens: each is accepted once, and taken back where it is lost.

    ``over``: nothing may be sampled any more. ``error`` is what the constraint raised; the row is rejected with it in
    place of the token that it did not accept, or had no mask for.
    """

    request_id: str
    name: str
    constraint: Constraint
    over: bool = False
    error: ConstraintFailed | None = None
    _accepted: list[int] = attrs.field(factory=list, init=False)

    def satisfied(self, tokens: int) -> bool:
        """Return whether a row that was delivered so many tokens has all that its constraint asks for."""
        return self.over and self.error is None and len(self._accepted) == tokens

    def decides(self, sampled: int) -> bool:
        """Return whether it says what follows a row's ``sampled`` tokens: it goes on, or has gone on to what must follow."""
        return not self.over or len(self._accepted) > sampled

    def ahead(self, tokens: int) -> list[int]:
        """Return what must follow the row's first ``tokens``; where that was accepted before, just that."""
        if not self.over and len(self._accepted) == tokens:
            try:
                return list(self.constraint.forced())
            except Exception as error:  # noqa: BLE001 - see `follow`
                self._fail(_said(error), error)
        return self._accepted[tokens:]

    def follow(self, place: int, token: int) -> ConstraintFailed | None:
        """Accept the row's token at ``place``, unless that was done before; return the error where it was not accepted."""
        if self.error is None and len(self._accepted) <= place:
            try:
                self._accept(token)
            except Exception as error:  # noqa: BLE001 - foreign code may raise anything; it costs its own row
                self._fail(_said(error), error)
        return self.error if len(self._accepted) <= place else None

    def restart(self, tokens: Sequence[int]) -> None:
        """Go to where the row is after ``tokens``: what was read and never delivered is taken back."""
        if self.error is not None:
            return
        pairs = enumerate(zip(self._accepted, tokens, strict=False))
        same = next((i for i, (one, two) in pairs if one != two), min(len(self._accepted), len(tokens)))
        try:
            if same < len(self._accepted):
                self.constraint.rollback(len(self._accepted) - same)
                del self._accepted[same:]
            for token in tokens[same:]:
                self._accept(token)
            self.over = bool(self.constraint.terminated)
        except Exception as error:  # noqa: BLE001 - see `follow`
            self._fail(_said(error), error)

    def take_back(self, tokens: int) -> None:
        """Go back to the row's first ``tokens``, unless it stands there."""
        if tokens < len(self._accepted):
            self.restart(self._accepted[:tokens])

    def allowed(self, sampled: int, width: int) -> np.ndarray:
        """Wait for what may follow the row's ``sampled`` tokens: bool ``[width]``. Raises `errors.ConstraintFailed`."""
        if self.error is not None:
            raise self.error
        if sampled != len(self._accepted):
            msg = f"{len(self._accepted)} tokens were read when {sampled} had been sampled"
            raise self._fail(msg)
        try:
            self.constraint.ready()
            mask = np.asarray(self.constraint.mask(), dtype=np.bool_)[:width]
            line = np.zeros(width, dtype=np.bool_)
            line[: len(mask)] = mask
        except Exception as error:
            raise self._fail(_said(error), error) from error
        if not line.any():
            msg = "it allows no token and has not ended"
            raise self._fail(msg)
        return line

    def along(self, sampled: int, draft: Sequence[int], width: int) -> Iterator[np.ndarray | ConstraintFailed]:
        """Yield what may follow the row's ``sampled`` tokens, then each token of a draft as far as it may, or an error.

        What follows of the draft is nobody's business: it is not accepted. Afterwards nothing of it is.
        """
        try:
            for place in range(len(draft) + 1):
                line = self.allowed(sampled + place, width)
                yield line
                if place == len(draft) or not line[draft[place]]:
                    break
                if self.follow(sampled + place, draft[place]) is not None or self.over:
                    break
        except ConstraintFailed as error:
            yield error
        finally:
            if draft and self.error is None:
                self.take_back(sampled)

    def _accept(self, token: int) -> None:
        self.constraint.accept(token)
        self.over = bool(self.constraint.terminated)
        self._accepted.append(token)

    def _fail(self, reason: str, cause: Exception | None = None) -> ConstraintFailed:
        self.over = True
        self.error = ConstraintFailed(self.request_id, self.name, len(self._accepted), reason)
        self.error.__cause__ = cause
        return self.error


def open_matcher(request: Request, request_id: str, plugins: PluginSet, tokenizer: Tokenizer | None) -> Matcher | None:
    """Compile a request's constraint, if it has one, with the factory that is registered under its key.

    Raises `errors.InvalidConstraint`, another refusal of the factory, or what resolving the name raises.
    """
    if request.constraint is None:
        return None
    ((name, spec),) = request.constraint.items()
    factory: ConstraintFactory = plugins.resolve("constraint", name)
    try:
        constraint = factory.open(spec, tokenizer, request)
        over = constraint.terminated
    except RequestError:
        raise
    except Exception as error:
        raise InvalidConstraint(name, _said(error)) from error
    if over:
        raise InvalidConstraint(name, "it is satisfied before the first token, so that none could follow")
    return Matcher(request_id, name, constraint)


def _said(error: Exception) -> str:
    """Return what an error of foreign code says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def follow(row: Row, drawn: Drawn) -> ConstraintFailed | None:
    """Let a row's constraint follow a token that was read and is not delivered yet, unless the row ends with it.

    Returns the error where the constraint did not accept it.
    """
    if row.matcher is None or row.over:
        return None
    if not drawn.real:
        return row.matcher.error
    if drawn.error is not None or not drawn.finite or drawn.token in row.stop_ids:
        row.matcher.over = True
        return None
    return row.matcher.follow(len(row.token_ids), drawn.token)


def masked(
    rows: Sequence[Row],
    logits: mx.array,
    live: Sequence[bool],
    errors: list[BaseException | None],
    lines: Lines | None = None,
) -> mx.array:
    """Return ``logits`` [R, V] with minus infinity wherever the constraint of a live line's row forbids a token.

    Without ``lines``, line i is row i. Without such a row they come back as they are. Else their evaluation is started, and
    the masks are awaited while it runs. A constraint that raises, or allows nothing, leaves its line as it was and its error
    in ``errors``.
    """
    if not any(row.matcher is not None for row in rows):
        return logits
    widths = lines.widths if lines is not None else [1] * len(rows)
    ends = itertools.accumulate(widths)
    firsts = [end - width for end, width in zip(ends, widths, strict=True)]  # of each row's lines
    bound = [
        (place, row.matcher)
        for place, row in enumerate(rows)
        if row.matcher is not None and widths[place] and live[firsts[place]]
    ]
    if not bound:
        return logits
    mx.async_eval(logits)
    allowed = np.ones(logits.shape, dtype=np.bool_)  # (R, V)
    windows: Any = lines.ids.tolist() if lines is not None else [[]] * len(rows)
    for place, matcher in bound:
        row, draft = rows[place], _before_an_end(rows[place], windows[place][1 : widths[place]])
        for line, mask in enumerate(matcher.along(row.sampled, draft, logits.shape[-1]), firsts[place]):
            if isinstance(mask, ConstraintFailed):
                errors[line] = mask
            else:
                allowed[line] = mask
    return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, dtype=logits.dtype))


class ReadsFirst:
    """The part of a method's host that speaks of constraints."""

    bound: BoundModel
    _rows: list[Row]

    @property
    def constrained(self) -> bool:
        """Whether what a running row may take next depends on tokens that nobody may have read yet."""
        return any(row.matcher is not None and row.matcher.decides(row.sampled) for row in self._rows)

    def follow(self, drawn: Sequence[Drawn]) -> None:
        """Let the rows' constraints follow tokens that were read; they are emitted later."""
        for row, each in zip(self._rows, drawn, strict=True):
            follow(row, each)

    def known(self) -> Iterator[Sequence[int]]:
        """Yield what must follow the last read token of each row; nothing follows it yet."""
        for row in self._rows:
            yield _span(row, row.matcher) if row.matcher is not None and _unseen(row) else ()

    def forced(self, spans: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Let constraints follow spans, and just those; return them, without any for a row of which one did not."""
        taken = [_taken(row, span) for row, span in zip(self._rows, spans, strict=True)]
        return taken if any(taken) else ()


def _unseen(row: Row) -> bool:
    """Return whether nothing but its constraint looks at a row's scores before a token is drawn from them."""
    params = row.request.sampling
    return not row.request.min_tokens and all(getattr(params, name) == getattr(_PLAIN, name) for name in _LOOKS)


def _span(row: Row, matcher: Matcher) -> list[int]:
    """Return what must follow, up to an end token, and at least one token short of the row's limit."""
    return _before_an_end(row, matcher.ahead(row.sampled)[: max(0, min(MAX_FORCED, row.max_tokens - row.sampled - 1))])


def _taken(row: Row, span: Sequence[int]) -> Sequence[int]:
    """Let a row's constraint follow a span and nothing more; return it, or nothing where it did not."""
    matcher = row.matcher
    if matcher is None:
        return ()
    for place, token in enumerate(span, row.sampled):
        matcher.follow(place, token)
    if matcher.error is None:
        matcher.take_back(row.sampled + len(span))
    return span if matcher.error is None else ()


def _before_an_end(row: Row, tokens: list[int]) -> list[int]:
    """Return tokens up to the first that would end the row."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in row.stop_ids), None)]
