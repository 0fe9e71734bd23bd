"""What each request of a schedule is, what is to go wrong with it, and what must therefore come of it."""

from __future__ import annotations

from typing import Any

import attrs

from harness.model import VOCABULARY, next_token
from oarlock.core.sampling import key_words

SHIFTS = {"": 0, "red": 3, "blue": 5}
"""What an adapter does to the model."""

REFUSED = ("namespace", "admitted", "admit")
"""Faults that end a request before its first forward."""

BY_POSITION = ("poison", "nan", "device")
"""Faults of a forward: they need rows that are told apart by their first token."""


class Planned(Exception):
    """The error that a plan asked for."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__(f"planned: {kind} of request {index}")
        self.kind, self.index = kind, index


class Transient(Exception):
    """An error of one forward, built or evaluated, that does not come back: no request may ever end with it."""


def causes(error: BaseException) -> list[BaseException]:
    """Return the errors that one is a group of, or itself."""
    if isinstance(error, BaseExceptionGroup):
        return [each for inner in error.exceptions for each in causes(inner)]
    return [error]


@attrs.define(kw_only=True)
class Plan:
    """One request and its one fault.

    ``at`` is a token index for "callback" and "false" (raise, or return False, at that delivery; where ``lag`` is 2 or 1,
    say so from outside, so many tokens later, as consumers do that run behind), a sample for
    "sampler", a position for "poison" (a forward over it raises), "nan" (its values are NaN) and "device" (a forward
    over it fails when it is evaluated). "join": merging the row into running ones raises.
    """

    index: int
    prompt: tuple[int, ...]
    max_tokens: int = 8
    eos: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0
    priority: int = 0
    chunk: int | None = None
    reuse: bool = True
    namespace: str = ""
    lazy_namespace: bool = False
    adapter: str = ""
    method: str | None = None
    fault: str = ""
    at: int = 0
    acts_at: int | None = None
    """Token index at whose delivery the consumer itself does something to the engine."""
    answer: Any = None
    lag: int = 0

    @property
    def id(self) -> str:
        return f"r{self.index}"


@attrs.frozen
class Fate:
    """What must come of a plan that nobody cancels: delivered tokens, and a finish reason or the fault's name."""

    tokens: tuple[int, ...]
    end: str
    generated: int
    taken_back: int = 0
    """How many of the tokens the result does not hold."""


def drawn(plan: Plan, history: list[int], step: int, layers: int) -> int:
    """Return the token of one step: the greedy one, moved by (seed, step) where the row samples."""
    token = next_token(history, SHIFTS[plan.adapter], layers)
    if plan.temperature == 0:
        return token
    low, high = key_words(plan.seed)
    return (token + low % 7 + (high ^ step) % VOCABULARY) % VOCABULARY


def fate(plan: Plan, layers: int = 1) -> Fate:
    """Work out a plan alone, token by token."""
    if plan.fault in REFUSED:
        return Fate((), plan.fault, 0)
    history, tokens = list(plan.prompt), []
    for step in range(plan.max_tokens):
        if plan.fault in BY_POSITION and len(history) - 1 >= plan.at:
            return Fate(tuple(tokens), plan.fault, step)
        if plan.fault == "sampler" and step >= plan.at:
            return Fate(tuple(tokens), "sampler", step)
        token = drawn(plan, history, step, layers)
        if token in plan.eos:
            return Fate(tuple(tokens), "stop", step + 1)
        tokens.append(token)
        history.append(token)
        if plan.fault in ("callback", "false") and step == plan.at + plan.lag:
            return Fate(tuple(tokens), "callback" if plan.fault == "callback" else "stop", plan.at + 1, plan.lag)
    return Fate(tuple(tokens), "length", plan.max_tokens)
