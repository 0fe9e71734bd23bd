"""Tools that a model may call: what a request says of them, and calls found in what the model writes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import structlog

from oarlock.core.contracts.loader import ToolFormat
from oarlock.plugins.server.failures import Refusal, bad

_log = structlog.get_logger(__name__)
CHOICES = ("none", "auto", "required")


@attrs.frozen(kw_only=True)
class Tools:
    """What a request says: the ``tools``, and whether one must be called: any of ``forced``, none with an empty one.

    ``parallel``: whether more than one call may be made. ``format`` is how this model writes calls of its own accord.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: tuple[Mapping[str, Any], ...] = ()
    parallel: bool = True
    format: ToolFormat | None = None

    @property
    def constraint(self) -> dict[str, Any] | None:
        """The constraint of an answer that is one call and nothing else."""
        if not self.forced:
            return None
        schemas = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.forced
        ]
        return {"json_schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}

    def reader(self) -> Calls | None:
        """Return what reads one answer; None where there is nothing to find in it."""
        if self.forced:
            return Calls(tools=self.tools, whole=True, parallel=False)
        if self.tools and self.format is not None:
            return Calls(tools=self.tools, format=self.format, parallel=self.parallel)
        return None


def read_tools(said: Mapping[str, Any], form: ToolFormat | None) -> Tools:
    """Return what a request says of tools. Raises refusals."""
    tools = said.get("tools", [])
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise bad("tools", tools, "lists of tools")
    checked = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    choice, parallel = said.get("tool_choice"), said.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise bad("parallel_tool_calls", parallel, "true, false")
    if not checked:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice", choice, "none, auto where there are no tools")
        return Tools()
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        if form is None:
            message = "how this model calls tools is not known: start the server with --tool-parser, or send tool_choice 'required'"
            raise Refusal(400, message, param="tools", code="unsupported")
        return Tools(tools=checked, parallel=parallel, format=form)
    if choice == "required":
        return Tools(tools=checked, forced=checked)
    return Tools(tools=checked, forced=(_named(choice, checked),))


def _tool(tool: object, place: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad(place, tool, "objects with type 'function' and a function with a name")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        at = f"{place}.function.parameters"
        raise bad(at, function["parameters"], "JSON schemas")
    return {"type": "function", "function": dict(function)}


def _named(choice: object, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    names = ", ".join(tool["function"]["name"] for tool in tools)
    raise bad("tool_choice", choice, f"{', '.join(CHOICES)}, or the name of one of the tools: {names}")


@attrs.define(eq=False, kw_only=True)
class Calls:
    """Reads one answer as it comes: text on one side, calls on the other. ``whole``: all of it is one call, as JSON.

    What cannot be read as a call is text. `full` says that nothing more is wanted.
    """

    tools: tuple[Mapping[str, Any], ...]
    parallel: bool
    format: ToolFormat | None = None
    whole: bool = False
    found: int = attrs.field(default=0, init=False)
    _held: str = attrs.field(default="", init=False)
    _inside: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._inside = self.whole

    @property
    def full(self) -> bool:
        """Whether another call would be one too many."""
        return self.found > 0 and not self.parallel

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Take what was written next; return the text of it that is no call, and the calls that it completes."""
        self._held += text
        shown, calls = "", list[dict[str, Any]]()
        while not self.full:
            if not self._inside:
                before, mark, after = self._held.partition(self._start)
                if not mark:
                    keep = _beginning(self._held, self._start)
                    shown, self._held = (
                        shown + self._held[: len(self._held) - keep],
                        self._held[len(self._held) - keep :],
                    )
                    return shown, calls
                shown, self._held, self._inside = shown + before, after, True
            end = self.format.end if self.format is not None else ""
            body, mark, after = self._held.partition(end) if end else (self._held, "", "")
            if not mark:
                return shown, calls
            self._held, self._inside = after, False
            read = self._read(body)
            calls += read
            shown += "" if read else f"{self._start}{body}{end}"
        self._held = ""
        return shown, calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return what was held back, when nothing follows."""
        held, self._held = self._held, ""
        if not self._inside or self.full:
            return ("" if self.full else held), []
        self._inside = False
        calls = self._read(held)
        return ("" if calls else f"{self._start}{held}"), calls

    @property
    def _start(self) -> str:
        return self.format.start if self.format is not None else ""

    def _read(self, body: str) -> list[dict[str, Any]]:
        """Return the calls that a text between two marks is; none where it is no call."""
        try:
            read = self.format.parse(body, list(self.tools)) if self.format is not None else json.loads(body)
            calls = [_call(each) for each in (read if isinstance(read, list) else [read])]
        except Exception as error:  # noqa: BLE001 - the parser is foreign, and what a model writes may be anything
            _log.info("tool_call_not_read", error=repr(error))
            return []
        calls = calls if self.parallel else calls[:1]
        self.found += len(calls)
        return calls


def _call(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as clients read it."""
    arguments = read.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": read.get("id") or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": str(read["name"]), "arguments": text},
    }


def _beginning(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
