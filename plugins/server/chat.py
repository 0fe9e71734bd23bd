"""``/v1/chat/completions``: from a body to requests, and from what comes of them to OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from oarlock.core.request import MAX_LOGPROBS, Request
from oarlock.core.result import Result, TokenEvent
from oarlock.plugins.server import fields
from oarlock.plugins.server.failures import bad
from oarlock.plugins.server.messages import conversation
from oarlock.plugins.server.service import BY_DEFAULT, Service, new_id
from oarlock.plugins.server.shapes import Frame, chat_logprob, finish_reason
from oarlock.plugins.server.tools import Calls, Tools, read_tools

FIELDS = (
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)
NAMES = {"prompt": "messages", "prompt_ids": "messages", "constraint": "response_format", "logprobs": "top_logprobs"}
"""The client's words for fields of a request."""


async def ask(body: Mapping[str, Any], service: Service) -> Chat:
    """Return what a body asks for. Raises refusals, and what `Request` raises."""
    said = fields.check(body, FIELDS)
    model = fields.model_name(said, service.names)
    stream, with_usage = fields.flag(said, "stream"), fields.include_usage(said)
    n = fields.whole(said, "n", 1, 1, min(fields.MAX_CHOICES, service.most_rows))
    tools = read_tools(said, service.tool_format)
    given = fields.request_fields(said, {**BY_DEFAULT, **service.defaults})
    if "max_completion_tokens" in said:
        given["max_tokens"] = _one_limit(said)
    given["logprobs"] = _logprobs(said)
    if (constraint := _constraint(said, tools)) is not None:
        given["constraint"] = constraint
    if model != service.name:
        given["adapter"] = model
    messages = conversation(said.get("messages"))
    name, seeds = new_id("chatcmpl"), fields.seeds(said, n)
    Request.from_mapping({**given, "prompt": "x", "seed": seeds[0]})  # what is wrong is said before the work
    given["prompt_ids"] = await service.render(messages, tools.tools)
    return Chat(
        service=service,
        tools=tools,
        frame=Frame(
            id=name,
            object="chat.completion.chunk" if stream else "chat.completion",
            model=model,
            fingerprint=service.fingerprint(),
            requests=[Request.from_mapping({**given, "seed": s, "id": f"{name}-{i}"}) for i, s in enumerate(seeds)],
            stream=stream,
            with_usage=with_usage,
        ),
    )


def _one_limit(said: Mapping[str, Any]) -> Any:
    """Return the limit that goes by two names."""
    limit = said["max_completion_tokens"]
    if said.get("max_tokens", limit) != limit:
        raise bad("max_tokens", said["max_tokens"], f"null, or {limit!r} as max_completion_tokens says")
    return limit


def _logprobs(said: Mapping[str, Any]) -> int | None:
    wanted, top = fields.flag(said, "logprobs"), fields.whole(said, "top_logprobs", 0, 0, MAX_LOGPROBS)
    if "top_logprobs" in said and not wanted:
        raise bad("top_logprobs", top, "null where logprobs is not true")
    return top if wanted else None


def _constraint(said: Mapping[str, Any], tools: Tools) -> Any:
    """Return what the answer must be. Refuses two of that at once."""
    asked = {"constraint": said.get("constraint"), "tool_choice": tools.constraint}
    asked["response_format"] = _format(said.get("response_format", {"type": "text"}))
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise bad(second, said[second], f"null beside {first}: both say what the whole answer must be")
    return next(iter(given.values()), None)


def _format(value: Any) -> dict[str, Any] | None:
    """Return the constraint that a response format is."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise bad("response_format", value, "objects of type text, json_object, json_schema")
    schema = value.get("json_schema")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        place = "response_format.json_schema"
        raise bad(place, schema, "objects with a name and a schema")
    return {"json_schema": schema["schema"]}


@attrs.define(eq=False, kw_only=True)
class Chat:
    """The choices of one chat request; implements `shapes.Shape`."""

    service: Service
    tools: Tools
    frame: Frame
    _calls: list[Calls | None] = attrs.field(init=False)
    _sent: list[int] = attrs.field(init=False)
    """How many calls were written of each choice."""

    def __attrs_post_init__(self) -> None:
        self._calls = [self.tools.reader() for _ in self.frame.requests]
        self._sent = [0 for _ in self.frame.requests]

    def start(self, choice: int) -> list[dict[str, Any]]:
        return [self._piece(choice, {"role": "assistant", "content": "", "refusal": None})]

    def event(self, choice: int, event: TokenEvent) -> list[dict[str, Any]]:
        reader = self._calls[choice]
        text, calls = reader.push(event.text) if reader is not None else (event.text, [])
        pieces = self._pieces(choice, text, calls)
        if event.logprob is not None:
            pieces = pieces or [self._piece(choice, {"content": ""})]
            content = [chat_logprob(self.service, event.logprob)]
            pieces[0]["choices"][0]["logprobs"] = {"content": content, "refusal": None}
        return pieces

    def full(self, choice: int) -> bool:
        reader = self._calls[choice]
        return reader is not None and reader.full

    def end(self, choice: int, result: Result) -> list[dict[str, Any]]:
        reader = self._calls[choice]
        pieces = self._pieces(choice, *reader.finish()) if reader is not None else []
        return [*pieces, self._piece(choice, {}, self._reason(choice, result))]

    def whole(self, choice: int, result: Result) -> dict[str, Any]:
        reader, text = self.tools.reader(), result.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reader is not None:
            (text, calls), (rest, more) = reader.push(text), reader.finish()
            if calls or more:
                message |= {"content": (text + rest) or None, "tool_calls": [*calls, *more]}
        self._calls[choice] = reader
        logprobs = None
        if result.logprobs is not None:
            content = [chat_logprob(self.service, logprob) for logprob in result.logprobs]
            logprobs = {"content": content, "refusal": None}
        reason = self._reason(choice, result)
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _reason(self, choice: int, result: Result) -> str:
        reader = self._calls[choice]
        return "tool_calls" if reader is not None and reader.found else finish_reason(result)

    def _pieces(self, choice: int, text: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        pieces = [self._piece(choice, {"content": text})] if text else []
        for call in calls:
            pieces.append(self._piece(choice, {"tool_calls": [{"index": self._sent[choice], **call}]}))
            self._sent[choice] += 1
        return pieces

    def _piece(self, choice: int, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        one = {"index": choice, "delta": dict(delta), "logprobs": None, "finish_reason": reason}
        return self.frame.around([one])
