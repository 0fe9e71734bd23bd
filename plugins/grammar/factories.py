"""The kinds of grammar that a request may name, and what each makes of its spec: text that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from oarlock.core.errors import InvalidParameter
from oarlock.plugins.grammar.library import llguidance

if TYPE_CHECKING:
    from oarlock.core.contracts.constraint import Constraint
    from oarlock.core.contracts.loader import Tokenizer
    from oarlock.core.request import Request
    from oarlock.plugins.grammar.matchers import Matchers

COMPACT = {"whitespace_flexible": False}
"""No white space between the parts of a value, unless the schema's own ``x-guidance`` asks for it."""


def json_schema(spec: Any) -> str:
    """Return the grammar of the JSON values that a schema allows. Raises ValueError."""
    if not isinstance(spec, Mapping | bool):
        raise InvalidParameter("constraint.json_schema", spec, "JSON schemas: mappings, true and false")
    try:
        text = json.dumps(spec, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidParameter("constraint.json_schema", spec, f"plain data ({error})") from error
    return str(llguidance().LLMatcher.grammar_from_json_schema(text, defaults=COMPACT))


def json_object(spec: Any) -> str:
    """Return the grammar of all JSON objects."""
    if spec is not True:
        raise InvalidParameter("constraint.json_object", spec, "true")
    return json_schema({"type": "object"})


def regex(spec: Any) -> str:
    """Return the grammar of what a regular expression matches as a whole."""
    return str(llguidance().LLMatcher.grammar_from_regex(_text("regex", spec)))


def lark(spec: Any) -> str:
    """Return a grammar in Lark's syntax."""
    return str(llguidance().LLMatcher.grammar_from_lark(_text("lark", spec)))


def choice(spec: Any) -> str:
    """Return the grammar of one of several texts."""
    texts = spec if isinstance(spec, Sequence) and not isinstance(spec, str) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameter("constraint.choice", spec, "lists of non-empty strings")
    return lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


KINDS: Mapping[str, Callable[[Any], str]] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "lark": lark,
    "choice": choice,
}


def _text(name: str, spec: Any) -> str:
    if not isinstance(spec, str) or not spec:
        place = f"constraint.{name}"
        raise InvalidParameter(place, spec, "non-empty strings")
    return spec


def _plain(value: Any) -> Any:
    """Return what JSON has for a mapping or a sequence of another type."""
    if isinstance(value, Mapping):
        return dict(value)
    msg = f"{type(value).__name__} is not JSON"
    raise TypeError(msg)


@attrs.define(eq=False)
class GrammarFactory:
    """Registers one kind of grammar."""

    name: str
    grammar: Callable[[Any], str]
    matchers: Matchers

    def open(self, spec: Any, tokenizer: Tokenizer | None, request: Request) -> Constraint:
        """Compile ``spec``. Raises ValueError with llguidance's message, or a refusal of the request."""
        return self.matchers.open(self.grammar(spec), tokenizer, ends=not request.ignore_eos)
