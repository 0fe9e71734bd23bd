"""A conversation as a client sends it, and as chat templates read it. It renders nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.plugins.server.failures import bad

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "refusal")
_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")


def conversation(value: object) -> list[dict[str, Any]]:
    """Return the messages of a request. Raises a refusal that names the place at fault."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise bad("messages", value, "non-empty lists of objects")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise bad(place, message, "objects with role and content")
    role = message.get("role")
    if role not in ROLES:
        at = f"{place}.role"
        raise bad(at, role, ", ".join(ROLES))
    for key, value in message.items():
        if key not in _KEPT and value not in (None, [], "", {}):
            at = f"{place}.{key}"
            raise bad(at, value, f"null; a message has {', '.join(_KEPT)}")
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role}
    plain["content"] = _text(message.get("content"), f"{place}.content", needed=not message.get("tool_calls"))
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            plain[key] = _string(message[key], f"{place}.{key}")
    if message.get("tool_calls"):
        plain["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
    return plain


def _string(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise bad(place, value, "strings")
    return value


def _text(content: object, place: str, *, needed: bool) -> str:
    """Return the text of a content that is one, or a list of parts that are."""
    if content is None and not needed:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise bad(place, content, "strings, and lists of text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            at = f"{place}[{number}].type"
            raise bad(at, kind, "text; this server reads no images, sound or files")
        texts.append(_string(part.get(kind), f"{place}[{number}].{kind}"))
    return "".join(texts)


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as data, which is how templates write them."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise bad(place, calls, "lists of calls")
    plain = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            at = f"{place}[{number}].function"
            raise bad(at, function, "objects with name and arguments")
        arguments = function.get("arguments", "{}")
        try:
            read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except ValueError as error:
            at = f"{place}[{number}].function.arguments"
            raise bad(at, arguments, f"JSON ({error})") from error
        named = {"name": function["name"], "arguments": read}
        plain.append({"id": call.get("id"), "type": "function", "function": named})
    return plain
