"""The kinds of grammar on a tiny model that knows nothing: whatever it would say, what it says is what was asked for."""

import json
import re
import sys

import jsonschema
import numpy as np
import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConstraint, InvalidParameter, NoTokenizer, UnsupportedFeature
from oarlock.plugins.grammar import register_constraints
from oarlock.plugins.grammar.matchers import GrammarConstraint

END, OTHER_END = 0, 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", 'a "quoted" one', "back\\slash", "größe", "two\nlines", "🙂"]


@pytest.fixture
def factories():
    found = []
    register_constraints(found.append)
    return {factory.name: factory for factory in found}


@pytest.fixture
def opened(factories, words):
    """Open a constraint by itself."""
    return lambda kind, spec, **fields: factories[kind].open(spec, words, Request(prompt="x", **fields))


def allowed(constraint):
    constraint.ready()
    return set(np.flatnonzero(constraint.mask()).tolist())


def test_the_five_kinds_are_registered(factories):
    assert list(factories) == ["json_schema", "json_object", "regex", "lark", "choice"]


SAMPLED = [SamplingParams(), *(SamplingParams(temperature=1.0, seed=seed) for seed in range(4))]


@pytest.mark.parametrize("sampling", SAMPLED, ids=lambda params: f"seed {params.seed}")
def test_json_by_a_schema(engine, ask, sampling):
    (result,) = engine.generate([ask("x", "json_schema", PERSON, sampling=sampling)])
    assert str(result.finish_reason) == "stop"
    jsonschema.validate(json.loads(result.text), PERSON)
    assert (
        result.text == json.dumps(json.loads(result.text), separators=(",", ":"), ensure_ascii=False)
        or "\\u" in result.text
    )


@pytest.mark.parametrize("sampling", SAMPLED[1:3], ids=lambda params: f"seed {params.seed}")
@pytest.mark.parametrize(
    ("kind", "spec", "pattern"),
    [
        ("regex", r"[a-f]{3}-[0-9]{2,4}", r"[a-f]{3}-[0-9]{2,4}"),
        ("regex", "größe|名前", "größe|名前"),
        ("lark", 'start: "<" WORD ">"\nWORD: /[a-z]{1,6}/', r"<[a-z]{1,6}>"),
        ("choice", CHOICES, "|".join(map(re.escape, CHOICES))),
        *(("choice", [text], re.escape(text)) for text in CHOICES),
    ],
)
def test_text_by_a_grammar(engine, ask, kind, spec, pattern, sampling):
    (result,) = engine.generate([ask("x", kind, spec, sampling=sampling)])
    assert str(result.finish_reason) == "stop"
    assert re.fullmatch(pattern, result.text)


def test_any_object(opened, words):
    """An object begins with a brace and ends with its own; a list is none."""
    constraint = opened("json_object", True)
    assert {words.decode([token])[0] for token in allowed(constraint)} == {"{"}
    for token in words.encode('{"a":[1,{}]}'):
        assert token in allowed(constraint)
        assert not constraint.terminated
        constraint.accept(token)
    assert constraint.terminated


def test_rows_with_and_without_a_grammar_get_what_each_gets_alone(tiny, words, ask):
    """Greedy and sampled, in one batch, with and without the pipeline."""
    asked = [
        ask("the quick", max_tokens=40),
        ask("brown fox", "json_schema", PERSON),
        ask("fox", "regex", "[a-z]{30}", sampling=SamplingParams(temperature=1.0, seed=4)),
        ask("true", max_tokens=40, sampling=SamplingParams(temperature=0.8, seed=9)),
        ask("null", "choice", CHOICES),
    ]
    alone = []
    for request in asked:
        with Engine(tiny, words, config={"scheduler": {"verify": False}}) as engine:
            alone += engine.generate([request])
    for pipeline in (True, False):
        with Engine(tiny, words, config={"scheduler": {"verify": False, "pipeline": pipeline}}) as engine:
            together = engine.generate(asked)
            assert engine.stats()["recoveries"] == 0
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
        assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_must_follow_is_what_would_have_been_drawn(tiny, words, ask, monkeypatch, rows, pipeline):
    """By masks of one token after the other: the same tokens, none of them forced."""
    schema = {**PERSON, "properties": {**PERSON["properties"], "colour": {"const": "the quick brown fox"}}}
    sampling = [SamplingParams(), *(SamplingParams(temperature=1.0, seed=seed) for seed in range(2))]
    asked = [ask("x", "json_schema", schema, sampling=params) for params in sampling[:rows]]
    config = {"scheduler": {"verify": False, "pipeline": pipeline}}
    with Engine(tiny, words, config=config) as engine:
        forced = engine.generate(asked)
        monkeypatch.setattr(GrammarConstraint, "forced", lambda constraint: ())
        drawn = engine.generate(asked)
    assert [result.token_ids for result in forced] == [result.token_ids for result in drawn]
    assert [str(result.finish_reason) for result in forced] == ["stop"] * rows
    assert sum(result.usage.forced_tokens for result in forced) >= 3
    assert not any(result.usage.forced_tokens for result in drawn)


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
def test_fixed_text_is_appended_beside_rows_that_have_none(tiny, words, ask, pipeline, adaptive):
    """The method `fill` on templates: the tokens of `plain`, many of them forced, in fewer steps."""
    asked = [
        ask("the quick", "regex", "the quick brown fox [a-z]{3} value, count [0-9], the brown fox", max_tokens=80),
        ask("brown fox", max_tokens=30),
        ask("x", "lark", 'start: "name: " WORD "; true, false, null; fox"\nWORD: /[a-z]{1,6}/', max_tokens=80),
        ask("true", max_tokens=20, sampling=SamplingParams(temperature=0.8, seed=9)),
    ]
    config = {"scheduler": {"verify": False, "pipeline": pipeline}}
    with Engine(tiny, words, config=config) as engine:
        drawn = engine.generate(asked)
    assert not any(result.usage.forced_tokens for result in drawn)  # a free row keeps them single
    with Engine(tiny, words, config={**config, "method": {"name": "fill", "adaptive": adaptive}}) as engine:
        filled = engine.generate(asked)
        assert engine.stats()["recoveries"] == 0
    assert [r.token_ids for r in filled] == [r.token_ids for r in drawn]
    assert [r.finish_reason for r in filled] == [r.finish_reason for r in drawn]
    forced = [result.usage.forced_tokens for result in filled]
    assert forced[1] == forced[3] == 0
    if not adaptive:
        assert forced[0] > 5
        assert forced[2] > 5


# --- what a mask says ----------------------------------------------------------------------------------------------


def test_a_mask_is_as_wide_as_the_tokenizer(opened, words):
    """The model has more ids: they are the core's to forbid."""
    assert opened("regex", "a").mask().shape == (310,)


def test_every_end_token_is_allowed_where_the_grammar_may_end(opened, words):
    """And nowhere else; to a row that does not mind them they are no tokens at all."""
    constraint = opened("regex", "ab?")
    assert allowed(constraint) == set(words.encode("a"))
    constraint.accept(*words.encode("a"))
    assert allowed(constraint) == {END, OTHER_END, *words.encode("b")}
    unending = opened("regex", "ab?", ignore_eos=True)
    unending.accept(*words.encode("a"))
    assert allowed(unending) == set(words.encode("b"))


def test_tokens_are_taken_back(opened, words):
    """One, several, and those that had satisfied the grammar."""
    constraint = opened("regex", "(ab|cd)e")
    first = allowed(constraint)
    masks = []
    for token in words.encode("abe"):
        masks.append(allowed(constraint))
        constraint.accept(token)
    assert constraint.terminated
    constraint.rollback(1)
    assert not constraint.terminated
    assert allowed(constraint) == masks[-1]
    constraint.rollback(len(masks) - 1)
    assert allowed(constraint) == first
    for token in words.encode("cde"):
        constraint.accept(token)
    assert constraint.terminated


def test_forced_tokens_are_those_that_must_follow(opened, words):
    """In the words of the tokenizer; where there is a choice there are none."""
    constraint = opened("json_schema", PERSON)
    forced = list(constraint.forced())
    assert words.decode(forced) == '{"name":"'[: len(words.decode(forced))]
    assert forced
    for token in forced:
        assert token in allowed(constraint)
        constraint.accept(token)
    assert opened("regex", "[ab]c").forced() == []


def test_a_token_that_is_not_allowed_is_refused(opened, words):
    constraint = opened("regex", "ab")
    with pytest.raises(ValueError, match="token"):
        constraint.accept(*words.encode("x"))


# --- what is refused -----------------------------------------------------------------------------------------------

BROKEN = {
    "regex": ("a(b", "unclosed group"),
    "lark": ('start: "a" |\nother: /x', "2"),
    "json_schema": ({"type": "strin"}, "strin"),
}


@pytest.mark.parametrize(("kind", "spec", "says"), [(kind, *rest) for kind, rest in BROKEN.items()], ids=BROKEN)
def test_what_does_not_compile_is_said_in_the_librarys_words(engine, ask, kind, spec, says):
    """In one line; the rest of the batch goes on."""
    running = engine.submit(ask("the", max_tokens=8))
    engine.step()
    with pytest.raises(InvalidConstraint, match=says) as caught:
        engine.submit(ask("x", kind, spec))
    assert caught.value.constraint == kind
    assert "\n" not in str(caught.value)
    assert len(running.result().token_ids) == 8


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json_schema", "text"), ("json_schema", {"enum": [object()]}), ("json_object", {}), ("regex", 7), ("regex", ""),
        ("lark", None), ("choice", []), ("choice", "text"), ("choice", ["a", ""]), ("choice", ["a", 3]),
    ],
)  # fmt: skip
def test_a_spec_of_another_kind_is_refused_with_what_is_allowed(engine, ask, kind, spec):
    with pytest.raises(InvalidParameter) as caught:
        engine.submit(ask("x", kind, spec))
    assert caught.value.name == f"constraint.{kind}"


def test_tokens_alone_are_not_enough(tiny):
    """An engine without a tokenizer, or with one that cannot tell the bytes of its tokens."""

    class Opaque:
        eos_token_ids = frozenset()
        decode = staticmethod(str)

    for tokenizer, error in ((None, NoTokenizer), (Opaque(), UnsupportedFeature)):
        with Engine(tiny, tokenizer, config={"scheduler": {"verify": False}}) as engine, pytest.raises(error):
            engine.submit(Request(prompt_ids=[1], constraint={"regex": "a"}))


def test_without_the_library_the_extra_is_named(engine, ask, monkeypatch):
    """Engines start without it, and requests that need none do not notice."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedFeature, match=r"oarlock\[grammar\]"):
        engine.submit(ask("x", "regex", "a"))
    (result,) = engine.generate([ask("the", max_tokens=4)])
    assert len(result.token_ids) == 4


def test_grammars_are_compiled_once_and_only_so_many_kept(factories, words):
    """Rows of one schema share what was compiled, and not where they stand."""
    first, second = (factories["regex"].open("ab", words, Request(prompt="x")) for _ in range(2))
    matchers = factories["regex"].matchers
    assert len(matchers._compiled) == 1
    first.accept(*words.encode("a"))
    assert allowed(second) == {*words.encode("a"), *({*words.encode("ab")} if len(words.encode("ab")) == 1 else ())}
    for n in range(80):
        factories["regex"].open(f"a{{{n + 1}}}", words, Request(prompt="x"))
    assert len(matchers._compiled) == 64
