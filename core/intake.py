"""From a request to a row: everything that can be refused is refused here, before any state changes."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oarlock.core import inputs
from oarlock.core.admission import GroupKey
from oarlock.core.constraints import open_matcher
from oarlock.core.contracts.loader import Tokenizer
from oarlock.core.contracts.sampler import Extending, Sampler
from oarlock.core.contracts.state_cache import StateCache
from oarlock.core.errors import (
    EmptyPrompt,
    InvalidParameter,
    NoTokenizer,
    PromptTooLong,
    TokenOutOfRange,
    UnknownRequestKey,
    UnsupportedFeature,
)
from oarlock.core.request import Request, SamplingParams
from oarlock.core.row import Row
from oarlock.core.sampling import choose
from oarlock.core.stops import StopSequences
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
    for sequence in request.stop_sequences:
        _check_ids(sequence, "stop_sequences", bound.vocabulary)
    _check_ids(sorted(request.sampling.logit_bias or ()), "logit_bias", bound.vocabulary)
    stop, include, least = request.stop, request.include_stop, request.min_tokens
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
        # Compiled here: what cannot be is refused like any other field, and no running row waits for it.
        matcher=open_matcher(request, request.id or name, bound.plugins, tokenizer),
        text=TextStream(tokenizer.decode, stop, include, least) if tokenizer is not None else None,
        sequences=StopSequences(request.stop_sequences, include=include, min_tokens=least)
        if request.stop_sequences
        else None,
    )


OF_PROCESSORS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Fields of `SamplingParams` that processors apply."""


def _check_features(request: Request, bound: BoundModel) -> None:
    """Refuse what nothing here does; nothing is ignored."""
    if request.method is not None:
        bound.plugins.resolve("method", request.method)
    sampling, plain = request.sampling, SamplingParams()
    asked = [name for name in OF_PROCESSORS if getattr(sampling, name) != getattr(plain, name)]
    asked += ["min_tokens"] if request.min_tokens else []
    applied = {field for processor in bound.processors for field in processor.fields}
    for name in asked:
        if name not in applied:
            raise UnsupportedFeature(name, "no registered processor applies it")
    sampler = choose(bound.samplers, sampling)
    if sampling.extra:
        _check_extra(sampling, sampler, bound)
    if request.inputs is not None:
        inputs.check(request, bound)


def _check_extra(sampling: SamplingParams, sampler: Sampler, bound: BoundModel) -> None:
    """Refuse keys that nothing reads, those that the row's own ``sampler`` does not, and values that cannot be."""
    readers = [each for each in (*bound.processors, *bound.samplers) if isinstance(each, Extending)]
    known = {key for each in readers for key in each.extra}
    still = sampling.greedy and sampler.is_argmax_invariant
    idle = {id(each) for each in bound.samplers if each is not sampler and not (still and each.is_argmax_invariant)}
    read = {key for each in readers if id(each) not in idle for key in each.extra}
    for key in sampling.extra:
        if key not in known:
            raise UnknownRequestKey(str(key), known)
        if key not in read:
            reason = f"sampler {sampler.name!r}, which draws rows with these parameters, does not read it"
            raise UnsupportedFeature(key, reason)
    for each in readers:
        if not each.extra.isdisjoint(sampling.extra):
            each.check(sampling, bound.vocabulary)


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
