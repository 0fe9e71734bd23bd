"""JSON by schemas on SmolLM2, beside rows that are free: everything parses and validates, and nobody else notices."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from attrs import evolve

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.models import load_model

pytestmark = pytest.mark.weights
FREE = ("Name three rivers.", "What is 7 times 8?", "Write a short story about an oar.", "Why is the sky blue?")
FREE_TOKENS, MOST = 24, 400


@pytest.fixture(scope="module")
def loaded():
    config = EngineConfig.load({"model": {"dtype": "float32"}})
    return load_model("smollm2", config, build(config))


@pytest.fixture(scope="module")
def schemas(request, imported):
    """The hundred schemas by name, read from the file beside this one."""
    return imported(request.path.parent / "schemas.py").SCHEMAS


def engine(loaded, *plugins, **scheduler):
    return Engine(loaded.model, loaded.tokenizer, config={"scheduler": {"verify": False, **scheduler}}, plugins=plugins)


def chat(text, **fields):
    return Request(messages=[{"role": "user", "content": text}], **fields)


def by_schema(name, schema, seed):
    """Half of the rows are greedy."""
    sampling = SamplingParams(temperature=0.8, seed=seed) if seed % 2 else SamplingParams()
    asked = f"Give me an example of {name.partition(',')[0]} as JSON."
    return chat(asked, id=name, max_tokens=MOST, sampling=sampling, constraint={"json_schema": schema})


def free(turn):
    text = FREE[turn % len(FREE)]
    return chat(text, id=f"free {turn}", max_tokens=FREE_TOKENS)


class Shares:
    """Counts the steps of constrained rows, and those that free rows shared."""

    def __init__(self):
        self.steps = self.shared = 0

    @hookimpl
    def step_finished(self, step):
        kinds = {name.startswith("free") for name in step.decode_ids}
        self.steps += False in kinds
        self.shared += len(kinds) == 2


def check(loaded, schemas, **scheduler):
    """Run schemas in company and compare with what is promised; return the results by name, and who shared steps."""
    with engine(loaded, max_batch=1) as lone:
        alone = [lone.generate([free(turn)])[0].token_ids for turn in range(len(FREE))]
    watch, asked = Shares(), []
    for turn, (name, schema) in enumerate(schemas.items()):
        asked += [by_schema(name, schema, turn)] + ([free(turn // 2)] if turn % 2 == 0 else [])
    with engine(loaded, watch, max_batch=8, **scheduler) as together:
        results = dict(zip((request.id for request in asked), together.generate(asked), strict=True))
        assert together.stats()["recoveries"] == 0
    for name, schema in schemas.items():
        assert str(results[name].finish_reason) == "stop", name
        value = json.loads(results[name].text)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)
    for name, result in results.items():
        if name.startswith("free"):
            assert result.token_ids == alone[int(name.split()[1]) % len(FREE)]
    return results, watch


@pytest.mark.parametrize("pipeline", [True, pytest.param(False, marks=pytest.mark.long)])
def test_some_schemas_beside_free_rows(loaded, schemas, pipeline):
    """One in twenty, in both orders of a step; the tokens are those of each row alone."""
    some = dict(list(schemas.items())[12::20])
    assert len(some) == 5
    results, _ = check(loaded, some, pipeline=pipeline)
    with engine(loaded, max_batch=1) as lone:
        alone = lone.generate([by_schema(name, schema, turn) for turn, (name, schema) in enumerate(some.items())])
    assert [results[name].token_ids for name in some] == [result.token_ids for result in alone]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_schemas_beside_free_rows(loaded, schemas):
    assert len(schemas) == 100
    _, watch = check(loaded, schemas)
    assert watch.shared >= 0.8 * watch.steps


def test_text_by_a_pattern_and_by_choice(loaded):
    """With the vocabulary that the GGUF file has."""
    with engine(loaded) as opened:
        asked = [
            chat("What is the capital of France?", constraint={"choice": ["London", "Paris", "Rome"]}),
            chat("When did the second world war end?", constraint={"regex": "19[0-9]{2}"}),
            chat("Say yes or no: is water wet?", constraint={"lark": 'start: ("Yes" | "No") ", " /[a-z ]{3,20}/ "."'}),
        ]
        capital, year, answer = (result.text for result in opened.generate(asked))
    assert capital in {"London", "Paris", "Rome"}
    assert re.fullmatch("19[0-9]{2}", year)
    assert answer.startswith(("Yes, ", "No, "))
    assert answer.endswith(".")


TEMPLATE = (
    "Dear (Anna|Boris|Clara),\n\nthank you for your order number [0-9]{4}, which we received on (Monday|Tuesday|Friday)\\. "
    "It will be sent to you within [1-9] days\\. If you have questions about it, please write to us at any time\\.\n\n"
    "Yours sincerely,\nthe team of (Oarlock|Rowing) Supplies"
)


class Letters:
    """Counts the steps in which a letter is written."""

    def __init__(self):
        self.steps = 0

    @hookimpl
    def step_finished(self, step):
        self.steps += any(name.startswith("letter") for name in step.decode_ids)


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_template_is_filled_in_a_fraction_of_its_steps(loaded, pipeline):
    """The method `fill`, beside rows that are free: the same letter, of which nearly all was known."""
    sampling = SamplingParams(temperature=0.8, seed=3)
    letters = [
        chat(f"Write letter {n}.", id=f"letter {n}", max_tokens=120, constraint={"regex": TEMPLATE}) for n in range(2)
    ]
    asked = [letters[0], free(0), evolve(letters[1], sampling=sampling), free(1)]
    results, steps = {}, {}
    for method in ({"name": "plain"}, {"name": "fill", "adaptive": False}):
        watch = Letters()
        config = {"scheduler": {"verify": False, "pipeline": pipeline}, "method": method}
        with Engine(loaded.model, loaded.tokenizer, config=config, plugins=[watch]) as opened:
            results[method["name"]], steps[method["name"]] = opened.generate(asked), watch.steps
            assert opened.stats()["recoveries"] == 0
    for one, two in zip(results["fill"], results["plain"], strict=True):
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)
    letter, _, other, _ = results["fill"]
    assert re.fullmatch(TEMPLATE, letter.text)
    for result in (letter, other):
        assert result.usage.forced_tokens > 0.6 * result.usage.generated_tokens
    assert steps["fill"] < 0.5 * steps["plain"], steps
