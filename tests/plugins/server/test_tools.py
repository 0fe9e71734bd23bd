"""Calls found in text as it comes: however it is cut, what is shown and what is called is the same."""

import json
import random

import pytest

from oarlock.core.contracts.loader import ToolFormat
from oarlock.plugins.server.failures import Refusal
from oarlock.plugins.server.tools import Calls, read_tools

TAGGED = ToolFormat(start="<tool_call>", end="</tool_call>", parse=lambda text, _tools: json.loads(text))
ENDLESS = ToolFormat(start="[TOOL_CALLS]", end="", parse=lambda text, _tools: json.loads(text))


def add(**arguments):
    return json.dumps({"name": "add", "arguments": arguments})


TEXTS = [
    ("no call at all", "no call at all", []),
    ("a < b and <tool", "a < b and <tool", []),
    (f"so: <tool_call>{add(a=1)}</tool_call> done", "so:  done", [{"a": 1}]),
    (f"<tool_call>{add(a=1)}</tool_call><tool_call>{add(b=2)}</tool_call>", "", [{"a": 1}, {"b": 2}]),
    ("<tool_call>not JSON</tool_call>!", "<tool_call>not JSON</tool_call>!", []),
    (f"<tool_call>{add(a=1)}", "", [{"a": 1}]),
    ("<tool_call>half of a ca", "<tool_call>half of a ca", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (f"<<<tool_call>{add(t='</tool')}</tool_call>>", "<<>", [{"t": "</tool"}]),
]


def read(reader, pieces):
    shown, called = "", []
    for piece in pieces:
        text, calls = reader.push(piece)
        shown, called = shown + text, called + calls
    text, calls = reader.finish()
    return shown + text, [json.loads(call["function"]["arguments"]) for call in called + calls]


def cut(text, dice):
    places = sorted(dice.sample(range(1, len(text)), min(len(text) - 1, dice.randint(0, 6))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("text", "shown", "arguments"), TEXTS, ids=range(len(TEXTS)))
def test_however_a_text_is_cut_it_is_read_alike(text, shown, arguments):
    for seed in range(60):
        reader = Calls(tools=(), format=TAGGED, parallel=True)
        assert read(reader, cut(text, random.Random(seed))) == (shown, arguments)
    assert read(Calls(tools=(), format=TAGGED, parallel=True), list(text)) == (shown, arguments)


def test_nothing_of_a_mark_is_shown_early():
    """What may still become a call is held back; what cannot is not."""
    reader = Calls(tools=(), format=TAGGED, parallel=True)
    assert reader.push("x <tool")[0] == "x "
    assert reader.push("box")[0] == "<toolbox"


def test_a_format_without_an_end_takes_the_rest():
    reader = Calls(tools=(), format=ENDLESS, parallel=True)
    assert read(reader, [f"hm [TOOL_CALLS]{add(a=1)}"]) == ("hm ", [{"a": 1}])


def test_a_whole_answer_is_one_call():
    reader = Calls(tools=(), whole=True, parallel=False)
    assert read(reader, list(add(a=3))) == ("", [{"a": 3}])
    cut_off = Calls(tools=(), whole=True, parallel=False)
    assert read(cut_off, ['{"name": "ad']) == ('{"name": "ad', [])


def test_after_one_call_nothing_is_wanted_where_one_is_all():
    reader = Calls(tools=(), format=TAGGED, parallel=False)
    text = f"<tool_call>{add(a=1)}</tool_call> and <tool_call>{add(b=2)}</tool_call>"
    assert read(reader, cut(text, random.Random(1))) == ("", [{"a": 1}])
    assert reader.full


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_where_nobody_knows_how_the_model_calls_a_call_can_still_be_forced():
    with pytest.raises(Refusal) as caught:
        read_tools({"tools": [TOOL]}, None)
    assert caught.value.param == "tools"
    forced = read_tools({"tools": [TOOL], "tool_choice": "required"}, None)
    assert forced.constraint["json_schema"]["properties"]["name"] == {"const": "add"}
    assert read_tools({"tools": [TOOL], "tool_choice": "none"}, None).reader() is None


def test_a_tool_that_is_not_there_cannot_be_chosen():
    choice = {"type": "function", "function": {"name": "subtract"}}
    with pytest.raises(Refusal, match="add"):
        read_tools({"tools": [TOOL], "tool_choice": choice}, TAGGED)
