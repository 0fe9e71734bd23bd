"""OpenAI's own client, which is strict about what it reads: every field that it can send and that is offered."""

import json
import math

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from oarlock.core import Request

SAY = [{"role": "user", "content": "the quick brown fox"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": SAY, "max_tokens": 12, **fields})


@pytest.fixture(scope="module")
def solo(server):
    """What the engine answers to a prompt by itself, without HTTP."""

    def answer(messages=SAY, **fields):
        engine = server.service.engine.engine
        return engine.submit(Request.from_mapping({"messages": messages, "max_tokens": 12, **fields})).result()

    return answer


def test_models_are_listed_and_looked_up(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "oarlock"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered_as_by_the_engine(client, solo):
    answer, alone = chat(client, temperature=0), solo()
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", "tiny", "assistant")
    assert choice.message.content == alone.text
    assert choice.finish_reason == str(alone.finish_reason)
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == alone.usage.generated_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_what_an_answer_says(client, solo):
    alone = solo(seed=5, temperature=1.0)
    pieces = list(chat(client, seed=5, stream=True, stream_options={"include_usage": True}))
    *said, last = pieces
    assert "".join(piece.choices[0].delta.content or "" for piece in said) == alone.text
    assert [piece.choices[0].finish_reason for piece in said if piece.choices[0].finish_reason] == ["length"]
    assert said[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    assert last.usage.completion_tokens == alone.usage.generated_tokens
    assert {piece.usage for piece in said} == {None}
    assert {piece.id for piece in pieces} == {last.id}


def test_without_a_temperature_tokens_are_drawn(client):
    """OpenAI's default is 1; the seed alone then decides."""
    texts = {chat(client, seed=seed).choices[0].message.content for seed in range(6)}
    assert len(texts) > 3
    assert chat(client, seed=3).choices[0].message.content == chat(client, seed=3).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_n_choices_are_n_different_draws(client, solo, stream):
    """A seed counts up from choice to choice."""
    wanted = {place: solo(seed=7 + place, temperature=1.0).text for place in range(3)}
    answer = chat(client, n=3, seed=7, stream=stream)
    if stream:
        texts = dict.fromkeys(range(3), "")
        for piece in answer:
            for choice in piece.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in answer.choices}
    assert texts == wanted
    assert len(set(wanted.values())) == 3


def test_a_negative_seed_is_a_seed(client):
    assert chat(client, seed=-1).choices[0].message.content == chat(client, seed=2**64 - 1).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_ends_the_text_before_itself(client, solo, stream):
    text = solo().text
    stop = text[4:6]
    answer = chat(client, temperature=0, stop=[stop, "never"], stream=stream)
    if stream:
        pieces = list(answer)
        got = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        reason = pieces[-1].choices[0].finish_reason
    else:
        got, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (got, reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_are_the_models_own(client, solo, stream):
    alone = solo(logprobs=3)
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        entries = [e for p in answer if p.choices[0].logprobs for e in p.choices[0].logprobs.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([each.logprob for each in alone.logprobs])
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token
        assert (entry.bytes is None) == ("\ufffd" in entry.token)
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_bias_and_penalties_reach_the_sampler(client, solo):
    first = solo().token_ids[0]
    text = chat(client, temperature=0, logit_bias={str(first): -100}).choices[0].message.content
    assert text == solo(logit_bias={first: -100}).text != solo().text
    punished = chat(client, temperature=0, frequency_penalty=2.0, presence_penalty=1.0, max_tokens=40)
    assert punished.choices[0].message.content == solo(frequency_penalty=2.0, presence_penalty=1.0, max_tokens=40).text


def test_fields_of_ours_go_beside_openais(client, solo):
    answer = chat(client, temperature=0.9, seed=1, extra_body={"top_k": 3, "min_p": 0.01, "ignore_eos": True})
    assert answer.choices[0].message.content == solo(temperature=0.9, seed=1, top_k=3, min_p=0.01, ignore_eos=True).text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_json_by_schema(client, stream):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["boat", "oar"]}, "rows": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["kind", "rows"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "craft", "schema": schema, "strict": True}}
    answer = chat(client, response_format=wanted, seed=2, max_tokens=60, stream=stream)
    if stream:
        text = "".join(piece.choices[0].delta.content or "" for piece in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    read = json.loads(text)
    assert read["kind"] in {"boat", "oar"}
    assert 0 <= read["rows"] <= 9


def test_json_without_a_schema(client):
    text = chat(client, response_format={"type": "json_object"}, seed=2, max_tokens=3).choices[0].message.content
    assert text.startswith("{")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "named"]
)
def test_a_call_that_must_be_made(client, choice, stream):
    """The arguments fit the tool's schema, whatever the model would have said."""
    answer = chat(client, tools=[ADD], tool_choice=choice, seed=4, max_tokens=80, stream=stream)
    call, reason = streamed_call(answer) if stream else whole_call(answer)
    assert reason == "tool_calls"
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert arguments["a"] <= 99
    assert arguments["b"] in {1, 2}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_the_model_makes(client, stream):
    """What mlx-lm's parser reads between the marks becomes a call; text around it stays text."""
    said = {"constraint": {"choice": [f"I add. {CALL}"]}}
    answer = chat(client, tools=[ADD], max_tokens=200, stream=stream, extra_body=said)
    if stream:
        state = ChatCompletionStreamState()
        for piece in answer:
            state.handle_chunk(piece)
        answer = state.get_final_completion()
    call, reason = whole_call(answer)
    assert (answer.choices[0].message.content.strip(), reason) == ("I add.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})


def test_one_call_where_no_two_may_be_made(client):
    said = {"constraint": {"choice": [CALL + CALL]}}
    two = chat(client, tools=[ADD], max_tokens=300, extra_body=said).choices[0]
    one = chat(client, tools=[ADD], max_tokens=300, extra_body=said, parallel_tool_calls=False)
    assert len(two.message.tool_calls) == 2
    assert len(one.choices[0].message.tool_calls) == 1
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens < 200


def test_a_conversation_with_a_call_in_it_is_rendered(client):
    first = chat(client, tools=[ADD], tool_choice="required", seed=4, max_tokens=80).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
    answer = chat(client, messages=[*SAY, first.model_dump(), result], tools=[ADD])
    assert answer.choices[0].finish_reason in {"length", "stop"}


def whole_call(answer):
    (call,) = answer.choices[0].message.tool_calls
    return call, answer.choices[0].finish_reason


def streamed_call(answer):
    state = ChatCompletionStreamState()
    for piece in answer:
        state.handle_chunk(piece)
    return whole_call(state.get_final_completion())


def test_cached_tokens_are_reported(client):
    """The second time, all but the end of a long prompt was computed before."""
    messages = [{"role": "user", "content": "rows and rivers " * 30}]
    apart = {"namespace": "nobody else's"}
    first = chat(client, messages=messages, extra_body=apart).usage
    second = chat(client, messages=messages, extra_body=apart).usage
    assert first.prompt_tokens == second.prompt_tokens > 100
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 100 < second.prompt_tokens_details.cached_tokens < second.prompt_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_completions_of_texts_and_of_tokens(client, server, stream):
    tokenizer = server.service.engine.engine.tokenizer
    prompts = ["the lazy dog", "oars and locks"]
    fields = {"model": "tiny", "max_tokens": 9, "temperature": 0}
    texts = []
    for prompt in (prompts, [tokenizer.encode(each) for each in prompts]):
        answer = client.completions.create(prompt=prompt, stream=stream, **fields)
        got = {0: "", 1: ""}
        for choice in (c for piece in answer for c in piece.choices) if stream else answer.choices:
            got[choice.index] += choice.text
        texts.append(got)
    alone = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in prompts]
    assert texts[0] == texts[1] == dict(enumerate(alone))


def test_completions_with_logprobs_say_where_tokens_begin(client):
    answer = client.completions.create(model="tiny", prompt="rows", max_tokens=8, logprobs=2, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert [len(top) for top in logprobs.top_logprobs] == [2] * len(logprobs.tokens)
    assert logprobs.text_offset[0] == 0
    assert all(math.isfinite(value) and value <= 0 for value in logprobs.token_logprobs)


def test_completions_stop_after_sixteen_tokens_by_themselves(client):
    usage = client.completions.create(model="tiny", prompt="rows", extra_body={"ignore_eos": True}).usage
    assert usage.completion_tokens == 16


def test_a_stream_that_is_closed_frees_its_row(client, server, settled):
    stream = chat(client, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    settled(server)


def test_errors_are_those_of_openai(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-4o")
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "the fox " * 4000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_adapters_are_models_of_their_own(serve, talkative, tmp_path):
    """Listed, asked for by name, in one batch with the model itself; each has the tokens that it has alone."""
    from oarlock.core.engine import Engine
    from oarlock.core.testing.composition import loras
    from oarlock.plugins.models import MlxLmLoader

    folder = tmp_path / "sailor"
    loras.save(folder, MlxLmLoader().load(talkative).model, keys=("self_attn.q_proj", "mlp.down_proj"))
    config = {"adapters": {"sailor": str(folder)}}
    with Engine.load(talkative, config=config) as engine:
        fields = {"messages": SAY, "max_tokens": 12}
        alone = [engine.generate([Request(adapter=name, **fields)])[0].text for name in (None, "sailor")]
    assert alone[0] != alone[1]
    with (
        serve(talkative, config=config) as box,
        openai.OpenAI(base_url=f"{box.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["tiny", "sailor"]
        answers = [chat(client, model=name, temperature=0) for name in ("tiny", "sailor")]
    assert [answer.choices[0].message.content for answer in answers] == alone
    assert [answer.model for answer in answers] == ["tiny", "sailor"]
