"""``/v1/completions``: prompts as they are, of text or of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from oarlock.core.request import MAX_LOGPROBS, Request
from oarlock.core.result import Logprob, Result, TokenEvent
from oarlock.plugins.server import fields
from oarlock.plugins.server.failures import bad, finite
from oarlock.plugins.server.service import BY_DEFAULT, Service, new_id
from oarlock.plugins.server.shapes import Frame, finish_reason

FIELDS = ("prompt", "logprobs")
NAMES = {"prompt_ids": "prompt"}
MAX_TOKENS = 16
"""What OpenAI's interface says of completions that name no limit."""


async def ask(body: Mapping[str, Any], service: Service) -> Completion:
    """Return what a body asks for. Raises refusals, and what `Request` raises."""
    said = fields.check(body, FIELDS)
    model = fields.model_name(said, service.names)
    prompts = _prompts(said.get("prompt"))
    n = fields.whole(said, "n", 1, 1, min(fields.MAX_CHOICES, service.most_rows))
    if n * len(prompts) > service.most_rows:
        raise bad("prompt", f"{len(prompts)} prompts of {n} choices", f"{service.most_rows} choices in all")
    given = fields.request_fields(said, {**BY_DEFAULT, "max_tokens": MAX_TOKENS, **service.defaults})
    given["logprobs"] = fields.whole(said, "logprobs", 0, 0, MAX_LOGPROBS) if "logprobs" in said else None
    if model != service.name:
        given["adapter"] = model
    stream, with_usage = fields.flag(said, "stream"), fields.include_usage(said)
    name, seeds = new_id("cmpl"), fields.seeds(said, n)
    Request.from_mapping({**given, "prompt": "x", "seed": seeds[0]})  # what is wrong is said before the work
    ids = [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    rows = [(prompt, seed) for prompt in ids for seed in seeds]
    return Completion(
        service=service,
        frame=Frame(
            id=name,
            object="text_completion",
            model=model,
            fingerprint=service.fingerprint(),
            requests=[
                Request.from_mapping({**given, "prompt_ids": prompt, "seed": seed, "id": f"{name}-{place}"})
                for place, (prompt, seed) in enumerate(rows)
            ],
            prompts=len(prompts),
            stream=stream,
            with_usage=with_usage,
        ),
    )


def _prompts(value: object) -> list[str | list[int]]:
    """Return the prompts of a request: a text, its tokens, or a list of one or the other."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence) and value:
        if all(isinstance(each, str) for each in value):
            return list(value)
        if all(isinstance(each, Sequence) and not isinstance(each, str) for each in value):
            return [list(each) for each in value]
        if not any(isinstance(each, str | Sequence | Mapping) for each in value):
            return [list(value)]
    raise bad("prompt", value, "texts, lists of token ids, and non-empty lists of either")


@attrs.define(eq=False, kw_only=True)
class Completion:
    """The choices of one request for completions; implements `shapes.Shape`."""

    service: Service
    frame: Frame
    _written: list[int] = attrs.field(init=False)
    """How many characters were written of each choice, which is where its next token begins."""

    def __attrs_post_init__(self) -> None:
        self._written = [0 for _ in self.frame.requests]

    def start(self, choice: int) -> list[dict[str, Any]]:
        return []

    def event(self, choice: int, event: TokenEvent) -> list[dict[str, Any]]:
        if not event.text and event.logprob is None:
            return []
        logprobs = self._logprobs([event.logprob], self._written[choice]) if event.logprob is not None else None
        self._written[choice] += len(event.text)
        return [self._piece(choice, event.text, logprobs)]

    def full(self, choice: int) -> bool:
        return False

    def end(self, choice: int, result: Result) -> list[dict[str, Any]]:
        return [self._piece(choice, "", None, finish_reason(result))]

    def whole(self, choice: int, result: Result) -> dict[str, Any]:
        logprobs = self._logprobs(result.logprobs, 0) if result.logprobs is not None else None
        reason = finish_reason(result)
        return {"index": choice, "text": result.text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[Logprob], offset: int) -> dict[str, Any]:
        """Return tokens and their log-probabilities as parallel lists; the first begins at ``offset`` characters."""
        text = self.service.text_of
        tokens = [text(each.token) for each in logprobs]
        offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(each.logprob) for each in logprobs],
            "top_logprobs": [{self._key(token): finite(value) for token, value in each.top} for each in logprobs],
            "text_offset": offsets,
        }

    def _key(self, token: int) -> str:
        """Return what tells a token from all others: its text, unless that is part of a character, as others' may be."""
        text = self.service.text_of(token)
        return f"token_id:{token}" if "\ufffd" in text else text

    def _piece(self, choice: int, text: str, logprobs: Any, reason: str | None = None) -> dict[str, Any]:
        one = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self.frame.around([one])
