"""Lines of a batch file, read one at a time: each becomes a request or an error, and a bad one stops no other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from oarlock.core.errors import InvalidParameter
from oarlock.core.request import Request


@attrs.frozen(kw_only=True)
class Line:
    """A good line. ``id`` is as the file has it, ``name`` the same as text, or ``line-N`` where there is none."""

    number: int
    id: Any
    name: str
    request: Request


@attrs.frozen(kw_only=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    id: Any
    name: str
    error: Exception


def read(lines: Iterable[bytes], defaults: Mapping[str, Any]) -> Iterator[Line | BadLine]:
    """Yield the lines that are not blank. ``defaults`` serve where a line does not name a field."""
    for number, raw in enumerate(lines, 1):
        if raw.strip():
            yield _line(number, raw, defaults)


def _line(number: int, raw: bytes, defaults: Mapping[str, Any]) -> Line | BadLine:
    given: Any = None
    name = f"line-{number}"
    try:
        fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
        if not isinstance(fields, dict):
            raise InvalidParameter("the line", fields, "JSON objects with prompt, messages or prompt_ids")
        given = fields.get("id")
        name = name if given is None else _name(given)
        request = Request.from_mapping({**_unnamed(defaults, fields), **fields, "id": name})
    except Exception as error:  # noqa: BLE001 - whatever stands in a line, it is that line's error
        return BadLine(number=number, id=name if given is None else given, name=name, error=error)
    return Line(number=number, id=name if given is None else given, name=name, request=request)


def _name(given: object) -> str:
    if (isinstance(given, str) and given) or (isinstance(given, int) and not isinstance(given, bool)):
        return str(given)
    raise InvalidParameter("id", given, "non-empty strings and whole numbers")


def _unnamed(defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that a line does not give itself, also not in its table ``sampling``."""
    inner = fields.get("sampling")
    named = {*fields, *(inner if isinstance(inner, dict) else ())}
    return {key: value for key, value in defaults.items() if key not in named}
