"""How answers end: with a reason, or with one error; and what becomes of rows whose client is gone."""

import asyncio
import json
import socket
import threading
import time

import httpx
import mlx.core as mx
import pytest

from oarlock.core import hookimpl
from oarlock.core.driver import Driver
from oarlock.samplers.callables import per_row

pytestmark = pytest.mark.timeout(180)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAY = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "temperature": 0, "ignore_eos": True}
PLAIN = {"model": "tiny", "prompt": "fox", "temperature": 0, "ignore_eos": True}
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, SAY), (COMPLETIONS, PLAIN)], ids=["chat", "completions"])


def failing(limit):
    """A processor that raises once a row has more than ``limit`` tokens, its prompt's included."""

    def function(tokens, scores):
        if tokens.size >= limit:
            msg = "planted"
            raise RuntimeError(msg)
        return scores

    return function


def not_a_number(limit):
    """One that makes scores NaN from there on."""
    return lambda tokens, scores: scores * (mx.nan if tokens.size >= limit else 1.0)


class Faulty:
    """A plugin whose processors fail where a request says so."""

    @hookimpl
    def register_processors(self, register):
        register(per_row("fails_at", failing))
        register(per_row("nan_at", not_a_number))


@pytest.fixture(scope="module")
def faulty(serve, talkative):
    """A server with such a plugin."""
    with (
        serve(talkative, plugins=[Faulty()]) as box,
        httpx.Client(base_url=box.url, timeout=60, trust_env=False) as box.wire,
    ):
        yield box


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def prompt_tokens(box, path, body):
    return box.wire.post(path, json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"]


PLACES = {"first token": 0, "middle": 5, "last token": 11}


@BOTH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["fails_at", "nan_at"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fault("P-01", "I-02")
def test_a_row_that_fails_ends_its_answer_with_one_error(faulty, path, body, stream, kind, place):
    """Before the first token, in the middle, at the last: one error, one end, and the neighbour has its own tokens."""
    limit = prompt_tokens(faulty, path, body) + PLACES[place]
    asked = {**body, "max_tokens": 12, "extra": {kind: limit}, "stream": stream}
    check_one_error(faulty.wire.post(path, json=asked), stream, PLACES[place])


def check_one_error(answer, stream, tokens):
    if not stream:
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        return
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("[DONE]") == 1
    said = events(answer)
    assert ["error" in each for each in said] == [False] * (len(said) - 1) + [True]
    assert not any(each["choices"][0]["finish_reason"] for each in said[:-1])
    assert len(said) <= tokens + 2


@pytest.mark.fault("P-01", twin=True)
def test_twin_a_stream_without_its_end_is_noticed(faulty, monkeypatch):
    """An error that leaves the stream as it is, the way a bare generator would."""
    from oarlock.plugins.server import answering

    monkeypatch.setattr(answering, "DONE", b"")
    limit = prompt_tokens(faulty, CHAT, SAY) + 2
    answer = faulty.wire.post(CHAT, json={**SAY, "max_tokens": 12, "extra": {"fails_at": limit}, "stream": True})
    with pytest.raises(AssertionError):
        check_one_error(answer, stream=True, tokens=2)


@pytest.mark.fault("I-03", "I-05")
def test_neighbours_of_a_failing_row_get_their_own_answers(faulty):
    """Two run and eight wait while rows fail beside them; the next request is answered at once, and health is well."""
    limit = prompt_tokens(faulty, CHAT, SAY)
    alone = faulty.wire.post(CHAT, json={**SAY, "max_tokens": 30}).json()["choices"]

    async def everyone():
        async with httpx.AsyncClient(base_url=faulty.url, timeout=60, trust_env=False) as client:
            good = [client.post(CHAT, json={**SAY, "max_tokens": 30}) for _ in range(10)]
            bad = [
                client.post(CHAT, json={**SAY, "max_tokens": 30, "extra": {"fails_at": limit + n}}) for n in range(10)
            ]
            return await asyncio.gather(*good, *bad)

    answers = asyncio.run(everyone())
    assert [answer.status_code for answer in answers] == [200] * 10 + [500] * 10
    assert all(answer.json()["choices"] == alone for answer in answers[:10])
    assert faulty.wire.get("/health").status_code == 200
    assert faulty.wire.post(CHAT, json={**SAY, "max_tokens": 3}).status_code == 200


@pytest.mark.fault("I-03")
def test_a_driver_that_fails_fails_what_it_has_and_goes_on(serve, talkative, monkeypatch):
    """Everyone who waits is told, and the next request is answered."""
    decode, failures = Driver.decode, iter([True])

    def broken(self, *given):
        if self.active and next(failures, False):
            msg = "planted in the driver"
            raise RuntimeError(msg)
        return decode(self, *given)

    with serve(talkative) as box, httpx.Client(base_url=box.url, timeout=60, trust_env=False) as wire:
        monkeypatch.setattr(Driver, "decode", broken)
        first = wire.post(CHAT, json={**SAY, "max_tokens": 5, "n": 3})
        assert (first.status_code, first.json()["error"]["code"]) == (500, "engine_failed")
        assert wire.post(CHAT, json={**SAY, "max_tokens": 5}).status_code == 200
        assert wire.get("/health").json() == {"status": "ok"}


def test_health_tells_of_an_engine_whose_thread_is_gone(serve, talkative):
    with serve(talkative) as box, httpx.Client(base_url=box.url, timeout=60, trust_env=False) as wire:
        asyncio.run_coroutine_threadsafe(box.service.engine.close(), box.loop).result(10)
        assert (wire.get("/health").status_code, wire.get("/health").json()["status"]) == (503, "dead")
        assert wire.post(CHAT, json=SAY).status_code == 503


# --- reasons ------------------------------------------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
CAUSES = {
    "length": ({"max_tokens": 4}, "length"),
    "eos": ({"max_tokens": 9, "ignore_eos": False, "logit_bias": {"0": 1000}}, "stop"),
    "stop token": ({"max_tokens": 9, "logit_bias": {"50": 1000}, "stop_token_ids": [50]}, "stop"),
    "stop string": ({"max_tokens": 9, "constraint": {"choice": ["abc"]}, "stop": ["b"]}, "stop"),
    "grammar": ({"max_tokens": 9, "constraint": {"choice": ["abc"]}}, "stop"),
    "call": ({"max_tokens": 200, "constraint": {"choice": [CALL]}, "tools": [ADD]}, "tool_calls"),
    "forced call": ({"max_tokens": 200, "tools": [ADD], "tool_choice": "required", "extra": {}}, "tool_calls"),
    "half a call": ({"max_tokens": 6, "constraint": {"choice": [CALL]}, "tools": [ADD]}, "length"),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.fault("P-03")
def test_each_end_has_its_reason_once(wire, cause):
    """Whole and streamed alike, in chat, with tools and without, and in completions."""
    fields, reason = CAUSES[cause]
    body = {"seed": 1, "ignore_eos": False, **fields}
    check_reason(wire, CHAT, {**SAY, **body}, reason)
    if "tools" not in fields:
        check_reason(wire, CHAT, {**SAY, **body, "tools": [ADD]}, reason)
        check_reason(wire, COMPLETIONS, {**PLAIN, **body}, reason)


def check_reason(wire, path, body, reason):
    whole = wire.post(path, json=body).json()["choices"]
    assert [choice["finish_reason"] for choice in whole] == [reason]
    streamed = [each["choices"][0] for each in events(wire.post(path, json={**body, "stream": True}))]
    assert [each["finish_reason"] for each in streamed] == [None] * (len(streamed) - 1) + [reason]
    text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in streamed)
    assert text == (whole[0]["text"] if "text" in whole[0] else whole[0]["message"]["content"] or "")


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("P-06")
def test_usage_counts_what_was_sent(server, wire):
    """Cold, warm by a part and by the whole, stopped, in streams and over choices: prompts whole, tokens delivered."""
    encode = server.service.engine.engine.tokenizer.encode
    long = "rows and rivers, oars and locks " * 20
    cases = [(long, {}), (long, {}), (long + "more", {}), (long, {"n": 3}), (long, {"stop": ["e"]}), ("x", {})]
    for prompt, fields in cases:
        body = {**PLAIN, "prompt": prompt, "max_tokens": 9, "namespace": "usage", "logprobs": 0, **fields}
        answer = wire.post(COMPLETIONS, json=body).json()
        usage, choices = answer["usage"], answer["choices"]
        assert usage["prompt_tokens"] == len(encode(prompt))
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        assert usage["completion_tokens"] == sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *_, last = events(wire.post(COMPLETIONS, json=counted))
        assert {**last["usage"], "prompt_tokens_details": 0} == {**usage, "prompt_tokens_details": 0}


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
@pytest.mark.fault("K-03")
def test_a_client_that_goes_away_frees_its_rows(serve, talkative, settled, phase, stream):
    """In each phase: cancelled, freed, and a neighbour has its own tokens."""
    config = {"scheduler": {"max_batch": 2, "prefill_chunk": 8}, "state_cache": {"name": "none"}}
    with serve(talkative, config=config) as box, httpx.Client(base_url=box.url, timeout=60, trust_env=False) as wire:
        alone = wire.post(CHAT, json={**SAY, "max_tokens": 60}).json()["choices"]
        neighbour = Neighbour(box.url)
        messages = [{"role": "user", "content": "rows and rivers " * (120 if phase == "prefill" else 1)}]
        rows = 4 if phase == "queue" else 1
        asked = {**SAY, "messages": messages, "max_tokens": 3000, "n": rows, "stream": stream}
        go_away(box, asked, phase)
        assert neighbour.choices() == alone
        settled(box)


PHASES = {
    "queue": lambda mine: sum(row["phase"] == "queued" for row in mine) > 1,
    "prefill": lambda mine: any(row["phase"] == "prefill" for row in mine),
    "decode": lambda mine: any(row["phase"] == "decode" and row["tokens"] > 2 for row in mine),
}


def go_away(box, asked, phase):
    """Ask, wait until a row is in ``phase``, and hang up."""
    host, port = box.url.removeprefix("http://").split(":")
    body = json.dumps(asked).encode()
    with socket.create_connection((host, int(port))) as made:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if PHASES[phase](box.service.board.rows()[-asked.get("n", 1) :]):
                return
    msg = f"no row came to {phase}: {box.service.board.rows()}"
    raise AssertionError(msg)


class Neighbour:
    """Another client, whose answer must not change."""

    def __init__(self, url):
        self._url, self._answer = url, None
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self):
        self._answer = httpx.post(f"{self._url}{CHAT}", json={**SAY, "max_tokens": 60}, timeout=60, trust_env=False)

    def choices(self):
        self._thread.join()
        return self._answer.json()["choices"]


@pytest.mark.fault("K-03", twin=True)
def test_twin_a_server_that_never_looks_is_noticed(serve, talkative, settled, monkeypatch):
    """Were the client's going not noticed, the row would run to its end."""
    from oarlock.plugins.server import answering

    async def never(_receive):
        await asyncio.Event().wait()

    monkeypatch.setattr(answering, "_gone", never)
    with serve(talkative) as box:
        go_away(box, {**SAY, "max_tokens": 700}, "decode")
        with pytest.raises(AssertionError):
            settled(box, seconds=0.3)


@pytest.mark.fault("K-04")
def test_nothing_is_kept_of_a_request_that_is_over(serve, talkative, settled):
    """Hundreds of requests, finished, failed and refused: rows, names and objects are as many as before."""
    import gc

    from oarlock.core.row import Row
    from oarlock.plugins.server.chat import Chat

    config = {"state_cache": {"name": "none"}}
    with serve(talkative, config=config, plugins=[Faulty()]) as box:
        with httpx.Client(base_url=box.url, timeout=60, trust_env=False) as wire:
            for turn in range(40):
                extra = {"fails_at": 3} if turn % 3 == 0 else {}
                wire.post(CHAT, json={**SAY, "max_tokens": 2, "stream": turn % 2 == 0, "extra": extra})
                wire.post(CHAT, json={**SAY, "temperature": -1})
        settled(box)
        gc.collect()
        left = [type(each).__name__ for each in gc.get_objects() if isinstance(each, Row | Chat)]
        assert len(left) <= 4, left
