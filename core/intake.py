"""From a request to a row: everything that can be refused is refused here, before any state changes."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oarlock.core import inputs
from oarlock.core.admission import GroupKey
from oarlock.core.contracts.loader import Tokenizer
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.errors import (
    EmptyPrompt,
    InvalidParameter,
    NoTokenizer,
    PromptTooLong,
    TokenOutOfRange,
    UnsupportedFeature,
)
from oarlock.core.request import Request, SamplingParams
from oarlock.core.row import Row
from oarlock.core.sampling import choose
from oarlock.core.text import TextStream

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


def admit_request(request: Request, bound: BoundModel, tokenizer: Tokenizer | None, name: str) -> Row:
    """Validate ``request`` against the bound model and return its row; ``name`` serves where it has no id.

    Raises a subclass of `errors.RequestError` that carries the numbers.
    """
    _check_features(request, bound)
    if request.on_token is not None and inspect.iscoroutinefunction(request.on_token):
        raise InvalidParameter("on_token", request.on_token, "plain functions here; AsyncEngine awaits coroutines")
    if request.stop and tokenizer is None:
        raise NoTokenizer("stop")
    ids = _prompt_ids(request, tokenizer)
    _check_ids(ids, "prompt_ids", bound.vocabulary)
    _check_ids(request.stop_token_ids, "stop_token_ids", bound.vocabulary)
    _check_ids(sorted(request.sampling.logit_bias or ()), "logit_bias", bound.vocabulary)
    eos = frozenset() if request.ignore_eos or tokenizer is None else frozenset(tokenizer.eos_token_ids)
    seed = request.sampling.seed
    return Row(
        request=request,
        id=request.id or name,
        prompt_ids=ids,
        max_tokens=_limit(request, len(ids), bound.positions),
        stop_ids=eos | frozenset(request.stop_token_ids),
        seed=secrets.randbits(63) if seed is None else seed,
        key=GroupKey(
            method=request.method or bound.method,
            adapter=bound.adapters.group(request.adapter or ""),
            decode_state=request.inputs.argument if request.inputs is not None else "",
        ),
        text=TextStream(tokenizer.decode, request.stop, request.include_stop) if tokenizer is not None else None,
    )


def _check_features(request: Request, bound: BoundModel) -> None:
    """Refuse what nothing here does; nothing is ignored.

    Processors and constraints may be registered, but nothing applies them yet: their fields are refused all the same.
    """
    if request.method is not None:
        bound.plugins.resolve("method", request.method)
    sampling, plain = request.sampling, SamplingParams()
    of_processors = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "extra")
    changed = [name for name in of_processors if getattr(sampling, name) != getattr(plain, name)]
    changed += ["constraint"] if request.constraint is not None else []
    changed += ["min_tokens"] if request.min_tokens else []
    if changed:
        raise UnsupportedFeature(changed[0], "this version of oarlock cannot do it")
    choose(bound.samplers, sampling)
    if request.inputs is not None:
        inputs.check(request, bound)


def check_checkpoints(request: Request, bound: BoundModel, store: StateCache) -> None:
    """Refuse checkpoints where nothing stores them, and where another process could not find or use them."""
    if request.checkpoint_interval is None:
        return
    field = "checkpoint_interval"
    if not store.resumes:
        reason = f"the state cache {store.name!r} stores none; see state_cache.checkpoints and state_cache.disk"
        raise UnsupportedFeature(field, reason)
    if request.id is None:
        raise UnsupportedFeature(field, "the request has no id by which another process could ask for it again")
    if request.inputs is not None:
        raise UnsupportedFeature(field, "prepared inputs are not stored")
    if not bound.adapters.lasting(request.adapter or ""):
        raise UnsupportedFeature(field, f"adapter {request.adapter!r} does not say which weights it has")


def _prompt_ids(request: Request, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if request.prompt_ids is not None:
        ids: Sequence[int] = request.prompt_ids
    elif tokenizer is None:
        raise NoTokenizer("prompt" if request.prompt is not None else "messages")
    elif request.prompt is not None:
        ids = tokenizer.encode(request.prompt)
    else:
        assert request.messages is not None
        ids = tokenizer.apply_chat_template(request.messages)
    if not ids:
        raise EmptyPrompt
    return tuple(ids)


def _check_ids(ids: Sequence[int], field: str, vocabulary: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    position, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocabulary)
    raise TokenOutOfRange(token, position, vocabulary, field)


def _limit(request: Request, prompt: int, positions: int | None) -> int:
    """Return the most tokens to generate: what was asked for, up to the model's positions."""
    wanted = request.max_tokens
    if positions is None:
        if wanted is None:
            raise InvalidParameter("max_tokens", None, "a whole number: this model states no limit of positions")
        return wanted
    if prompt >= positions:
        raise PromptTooLong(prompt, wanted or 0, positions)
    room = positions - prompt
    return room if wanted is None else min(wanted, room)
