"""Bad input: each kind has its own error with the numbers, raised before any state changes, while others go on."""

import math

import numpy as np
import pytest

from oarlock.core import Request, SamplingParams, errors, hookimpl, intake
from oarlock.core.engine import Engine
from oarlock.samplers.greedy import GreedyRows

NAN = float("nan")


def refused(make, error, **facts):
    """Check that ``make()`` raises ``error`` with these attributes, and that its message names each of them."""
    with pytest.raises(error) as caught:
        make()
    assert type(caught.value) is error
    for name, value in facts.items():
        assert getattr(caught.value, name) == value or (value is NAN and math.isnan(getattr(caught.value, name)))
        assert str(value) in str(caught.value)
    return caught.value


# --- refused where the request is made -------------------------------------------------------------------------------


@pytest.mark.fault("L-04")
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, False, NAN, math.inf, []])
def test_max_tokens_is_a_whole_number_from_1(value):
    refused(lambda: Request(prompt_ids=[1], max_tokens=value), errors.InvalidMaxTokens, got=value, name="max_tokens")


@pytest.mark.parametrize("value", [-0.1, -1, NAN, math.inf, "1", True, None])
def test_temperature_is_a_number_from_0(value):
    refused(lambda: SamplingParams(temperature=value), errors.InvalidTemperature, got=value, name="temperature")


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.0001, 2, NAN, "0.9", True, None])
def test_top_p_is_in_0_to_1(value):
    refused(lambda: SamplingParams(top_p=value), errors.InvalidTopP, got=value, name="top_p")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1), ("top_k", 1.5), ("top_k", True), ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
        ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("seed", "1"), ("logprobs", -1), ("logprobs", 21),
        ("logprobs", True), ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("presence_penalty", NAN),
        ("frequency_penalty", "x"),
    ],
)  # fmt: skip
def test_other_sampling_values_name_themselves(name, value):
    refused(lambda: SamplingParams(**{name: value}), errors.InvalidParameter, got=value, name=name)


@pytest.mark.parametrize(
    ("bias", "named"), [({"x": 1.0}, "x"), ({-1: 1.0}, "-1"), ({5: "a"}, "5"), ({5: NAN}, "5"), ({True: 1.0}, "True")]
)
def test_a_bias_names_the_key(bias, named):
    with pytest.raises(errors.InvalidParameter) as caught:
        SamplingParams(logit_bias=bias)
    assert named in str(caught.value)


def test_a_bias_takes_json_keys():
    assert SamplingParams(logit_bias={"5": 10}) == SamplingParams(logit_bias={5: 10.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", -1), ("min_tokens", 1.0), ("prefill_chunk", 0), ("prefill_chunk", "8"), ("priority", 1.5),
        ("id", ""), ("id", 7), ("stop", ""), ("stop", ["", "x"]), ("stop", [5]), ("stop_token_ids", [-1]),
        ("stop_token_ids", ["5"]), ("checkpoint_interval", 0), ("stop_sequences", [5]), ("stop_sequences", [[]]),
        ("stop_sequences", [["5"]]), ("stop_sequences", "5"), ("stop_sequences", ["56"]), ("stop_sequences", [[-1]]),
    ],
)  # fmt: skip
def test_other_request_values_name_themselves(name, value):
    with pytest.raises(errors.InvalidParameter) as caught:
        Request(prompt_ids=[1], **{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"prompt_ids": [1], "prompt": "a"}, {"prompt": "a", "messages": []}])
def test_exactly_one_prompt_is_given(fields):
    refused(lambda: Request(**fields), errors.InvalidParameter, got=list(fields))


@pytest.mark.parametrize("ids", [[1, "2"], [1.0], [True], [None], [[1, 2]], np.zeros((2, 3), dtype=int)])
def test_prompt_ids_are_whole_numbers(ids):
    """A padded 2-D array is not taken for a prompt."""
    with pytest.raises(errors.InvalidParameter) as caught:
        Request(prompt_ids=ids)
    assert "prompt_ids" in str(caught.value)


def test_prompt_ids_may_be_an_array():
    assert Request(prompt_ids=np.array([3, 1, 2])).prompt_ids == (3, 1, 2)


@pytest.mark.parametrize(
    ("fields", "key", "near"),
    [
        ({"prompt_ids": [1], "max_token": 3}, "max_token", "max_tokens"),
        ({"prompt_ids": [1], "temprature": 3}, "temprature", "temperature"),
        ({"prompt_ids": [1], "sampling": {"topp": 0.5}}, "topp", "top_p"),
        ({"prompt_ids": [1], "on_token": "x"}, "on_token", "on_token"),
        ({"prompt_ids": [1], "zzz": 1}, "zzz", "zzz"),
    ],
)
def test_an_unknown_key_is_named_with_its_nearest(fields, key, near):
    caught = refused(lambda: Request.from_mapping(fields), errors.UnknownRequestKey, key=key)
    assert near in str(caught)


# --- refused by the engine ---------------------------------------------------------------------------------------------


def engine_cases():
    """Requests that are sound in themselves, and what an engine without tokenizer and with 40 positions says."""
    yield "empty", {"prompt_ids": []}, errors.EmptyPrompt, {}
    yield "too large an id", {"prompt_ids": [1, 97]}, errors.TokenOutOfRange, {"token": 97, "position": 1}
    yield "a negative id", {"prompt_ids": [-1]}, errors.TokenOutOfRange, {"token": -1, "position": 0}
    yield "a stop id", {"prompt_ids": [1], "stop_token_ids": [3, 97]}, errors.TokenOutOfRange, {
        "field": "stop_token_ids", "token": 97,
    }  # fmt: skip
    yield "too long", {"prompt_ids": [1] * 40}, errors.PromptTooLong, {"prompt_tokens": 40, "positions": 40}
    yield "stop strings", {"prompt_ids": [1], "stop": "x"}, errors.NoTokenizer, {"field": "stop"}
    yield "text", {"prompt": "hello"}, errors.NoTokenizer, {"field": "prompt"}
    yield "messages", {"messages": [{"role": "user", "content": "x"}]}, errors.NoTokenizer, {"field": "messages"}
    yield "method", {"prompt_ids": [1], "method": "plane"}, errors.UnknownName, {"name": "plane"}
    yield "adapter", {"prompt_ids": [1], "adapter": "mine"}, errors.UnknownName, {"name": "mine"}
    yield "inputs", {"prompt_ids": [1], "inputs": object()}, errors.InvalidParameter, {"name": "inputs"}
    yield "a checkpoint", {"prompt_ids": [1], "checkpoint_interval": 1}, errors.UnsupportedFeature, {
        "field": "checkpoint_interval"
    }  # fmt: skip
    yield "constraint", {"prompt_ids": [1], "constraint": {"rgx": "a"}}, errors.UnknownName, {"name": "rgx"}
    yield "a stop sequence", {"prompt_ids": [1], "stop_sequences": [[3], [4, 97]]}, errors.TokenOutOfRange, {
        "field": "stop_sequences", "token": 97, "position": 1,
    }  # fmt: skip
    yield "a bias", {"prompt_ids": [1], "sampling": SamplingParams(logit_bias={97: 1.0})}, errors.TokenOutOfRange, {
        "field": "logit_bias", "token": 97,
    }  # fmt: skip
    for extra, error, facts in (
        ({"no_repeat_ngrams": 2}, errors.UnknownRequestKey, {"key": "no_repeat_ngrams"}),
        ({"no_repeat_ngram": 0}, errors.InvalidParameter, {"name": "no_repeat_ngram", "got": 0}),
        ({"no_repeat_ngram": True}, errors.InvalidParameter, {"name": "no_repeat_ngram", "got": True}),
        ({"banned_tokens": [1, 97]}, errors.InvalidParameter, {"name": "banned_tokens", "got": 97}),
        ({"banned_tokens": "ab"}, errors.InvalidParameter, {"name": "banned_tokens", "got": "ab"}),
        ({"banned_tokens": list(range(97))}, errors.InvalidParameter, {"name": "banned_tokens"}),
    ):
        name = " ".join(f"{key} {str(value)[:9]}" for key, value in extra.items())
        yield name, {"prompt_ids": [1], "sampling": SamplingParams(extra=extra)}, error, facts


CASES = list(engine_cases())


@pytest.mark.fault("L-06")
@pytest.mark.parametrize(("fields", "error", "facts"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_bad_request_changes_nothing(engines, successor, ask, counted, fields, error, facts):
    """Nothing is queued, and the running row and a later one get their tokens."""
    engine = engines(successor, positions=40)
    running = engine.submit(ask(0, 9))
    engine.step()
    before, forwards = engine.stats(), successor.calls
    caught = refused(lambda: engine.submit(Request(**fields)), error, **facts)
    assert isinstance(caught, ValueError | LookupError)
    assert engine.stats() == before
    assert successor.calls == forwards
    late = engine.submit(ask(20, 4))
    assert (running.result().token_ids, late.result().token_ids) == (counted(0, 9), counted(20, 4))


@pytest.mark.parametrize(
    ("field", "plugin"),
    [("presence_penalty", "penalties"), ("logit_bias", "bias"), ("min_tokens", "bias"), ("extra", "ngrams")],
)
def test_what_no_plugin_applies_is_refused(successor, field, plugin):
    """The same request is taken where the plugin is there."""
    value = {"presence_penalty": 0.5, "logit_bias": {3: 1.0}, "min_tokens": 2, "extra": {"no_repeat_ngram": 2}}[field]
    fields = {"min_tokens": value} if field == "min_tokens" else {"sampling": SamplingParams(**{field: value})}
    request = Request(prompt_ids=[1], max_tokens=3, **fields)
    with Engine(successor) as engine:
        engine.submit(request).result()
    with Engine(successor, config={"plugins": {"disable": [plugin]}}) as engine:
        if field == "extra":
            caught = refused(lambda: engine.submit(request), errors.UnknownRequestKey, key="no_repeat_ngram")
            assert "banned_tokens" in str(caught)
        else:
            refused(lambda: engine.submit(request), errors.UnsupportedFeature, field=field)


class Own:
    """A third party's sampler, for rows at temperature 0.125 alone; it reads one key of its own."""

    name, is_argmax_invariant, extra = "own", False, frozenset({"own_key"})

    @hookimpl
    def register_samplers(self, register):
        register(self)

    def handles(self, params):
        return params.temperature == 0.125

    def check(self, params, vocabulary):
        if params.extra["own_key"] != vocabulary:
            raise errors.InvalidParameter("own_key", params.extra["own_key"], f"{vocabulary}")

    def open(self, params):
        return GreedyRows()


def test_a_key_that_the_rows_own_sampler_does_not_read_is_refused(engines, successor, ask):
    """Whatever other samplers read: nothing is ignored. Keys of processors are read for every row."""
    engine = engines(successor, plugins=[Own()])

    def submit(temperature, **extra):
        return engine.submit(ask(1, 2, sampling=SamplingParams(temperature=temperature, extra=extra))).result()

    assert submit(0.125, own_key=97, no_repeat_ngram=2).token_ids == (2, 3)
    assert submit(0.0, top_n_sigma=1.0).token_ids == (2, 3)
    refused(lambda: submit(0.125, own_key=96), errors.InvalidParameter, name="own_key", got=96)
    caught = refused(lambda: submit(0.125, top_n_sigma=1.0), errors.UnsupportedFeature, field="top_n_sigma")
    assert "'own'" in str(caught)
    caught = refused(lambda: submit(0.5, own_key=97), errors.UnsupportedFeature, field="own_key")
    assert "'categorical'" in str(caught)
    refused(lambda: submit(0.0, own_key=97), errors.UnsupportedFeature, field="own_key")


def test_generate_with_one_bad_request_raises_its_error(engines, successor, ask):
    """What was submitted before it runs on; nothing hangs."""
    engine = engines(successor)
    with pytest.raises(errors.TokenOutOfRange):
        engine.generate([ask(0, 3), ask(97, 3), ask(5, 3)])
    while engine.step():
        pass
    assert engine.stats()["active_rows"] == 0


def test_ids_are_checked_against_the_embedding_not_the_tokenizer(engines, successor, letters):
    """MLX reads behind the embedding's last row without an error."""
    tokenizer = letters()
    tokenizer.encode = lambda text: [96] if text == "last" else [97]
    engine = engines(successor, tokenizer)
    assert engine.submit(Request(prompt="last", max_tokens=1)).result().token_ids == (0,)
    refused(lambda: engine.submit(Request(prompt="beyond")), errors.TokenOutOfRange, token=97, vocabulary=97)


def test_empty_text_is_an_empty_prompt(engines, successor, letters):
    refused(lambda: engines(successor, letters()).submit(Request(prompt="")), errors.EmptyPrompt)


def test_messages_without_a_template_say_so(engines, successor, letters):
    """And prompts still work."""
    engine = engines(successor, letters())
    message = {"role": "user", "content": "x"}
    refused(lambda: engine.submit(Request(messages=[message])), errors.NoChatTemplate)
    assert engine.submit(Request(prompt="a", max_tokens=2)).result().token_ids == (1, 2)


def test_an_engine_that_checks_no_ids_is_found(engines, successor, letters, monkeypatch):
    """The twin."""
    monkeypatch.setattr(intake, "_check_ids", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_ids_are_checked_against_the_embedding_not_the_tokenizer(engines, successor, letters)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.EmptyPrompt, ValueError), (errors.TokenOutOfRange, ValueError), (errors.PromptTooLong, ValueError),
        (errors.InvalidMaxTokens, ValueError), (errors.NoTokenizer, ValueError), (errors.UnknownRequestKey, ValueError),
        (errors.QueueFull, RuntimeError), (errors.EngineClosed, RuntimeError), (errors.UnknownName, LookupError),
    ],
)  # fmt: skip
def test_errors_are_what_a_caller_expects(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, errors.OarlockError)
