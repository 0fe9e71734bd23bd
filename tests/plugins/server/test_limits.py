"""What is not taken: without the key, too large, too many; and what a server that drains still does."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import pytest

pytestmark = pytest.mark.timeout(180)
CHAT = "/v1/chat/completions"
SAY = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(serve, talkative):
    """A server with a key, two rows, three places in the queue, and bodies of at most 2,000 bytes."""
    config = {"scheduler": {"max_batch": 2, "max_queued": 3}, "state_cache": {"name": "none"}}
    with serve(talkative, config=config, key="secret", max_body=2000) as box:
        headers = {"authorization": "Bearer secret"}
        with httpx.Client(base_url=box.url, timeout=60, trust_env=False, headers=headers) as box.wire:
            yield box


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secrét"])
def test_without_the_key_nothing_is_answered_but_the_page_and_health(small, header):
    with httpx.Client(base_url=small.url, timeout=60, trust_env=False) as client:
        headers = {} if header is None else {"authorization": header.encode()}
        for method, path in (
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", "/status"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == client.get("/").status_code == 200
    assert small.wire.post(CHAT, json={**SAY, "max_tokens": 1}).status_code == 200


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


def test_scripts_of_named_web_pages_may_ask(serve, talkative):
    """A browser asks first, and without the key; then it asks with it, and hands the answer on only where it is told to."""
    ours = "http://localhost:3000"
    with (
        serve(talkative, key="secret", origins=(ours,)) as box,
        httpx.Client(base_url=box.url, timeout=60, trust_env=False) as client,
    ):
        for origin, status in ((ours, 200), ("http://elsewhere.example", 400)):
            asked = client.options(CHAT, headers={"origin": origin, **PREFLIGHT})
            headers = {"origin": origin, "authorization": "Bearer secret"}
            answer = client.post(CHAT, json={**SAY, "max_tokens": 1}, headers=headers)
            allowed = [each.headers.get("access-control-allow-origin") for each in (asked, answer)]
            assert allowed == [origin if origin == ours else None] * 2
            assert (asked.status_code, answer.status_code) == (status, 200)
        assert client.post(CHAT, json=SAY, headers={"origin": ours}).status_code == 401


def test_scripts_of_other_web_pages_are_kept_out(small):
    headers = {"origin": "http://localhost:3000"}
    assert small.wire.options(CHAT, headers={**headers, **PREFLIGHT}).status_code == 405
    answer = small.wire.post(CHAT, json={**SAY, "max_tokens": 1}, headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_official_client_reads_the_refusal(small):
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(small):
    large = {**SAY, "messages": [{"role": "user", "content": "x" * 3000}]}
    assert small.wire.post(CHAT, json=large).status_code == 413

    def pieces():
        for _ in range(100):
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    assert small.wire.post(CHAT, content=pieces(), headers=headers).status_code == 413
    assert small.wire.post(CHAT, json={**SAY, "max_tokens": 1}).status_code == 200


def test_a_full_queue_asks_to_come_again(small, settled):
    """429 with Retry-After, all choices or none; who was taken is answered."""

    async def everyone():
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=small.url, timeout=60, trust_env=False, headers=headers) as client:
            return await asyncio.gather(*[client.post(CHAT, json={**SAY, "max_tokens": 150}) for _ in range(24)])

    answers = asyncio.run(everyone())
    counts = {status: sum(answer.status_code == status for answer in answers) for status in (200, 429)}
    assert counts[200] >= 3
    assert counts[429] > 0
    assert sum(counts.values()) == 24
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "rate_limit_error"
    assert small.wire.post(CHAT, json={**SAY, "n": 4}).json()["error"]["param"] == "n"
    settled(small)


def test_a_request_that_never_fits_is_refused_with_the_numbers(serve, talkative):
    config = {"scheduler": {"kv_budget": 200_000}}
    with serve(talkative, config=config) as box, httpx.Client(base_url=box.url, timeout=60, trust_env=False) as client:
        answer = client.post(CHAT, json={**SAY, "max_tokens": 3000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large"), answer.text
        assert "200000" in answer.json()["error"]["message"].replace(",", "")
        assert client.post(CHAT, json={**SAY, "max_tokens": 3}).status_code == 200


# --- draining -----------------------------------------------------------------------------------------------------


class Streaming:
    """A stream in a thread of its own."""

    def __init__(self, box, tokens):
        self.begun, self.lines = threading.Event(), []
        self._box, self._tokens = box, tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(20)

    def _read(self):
        body = {**SAY, "max_tokens": self._tokens, "stream": True}
        asking = httpx.stream("POST", f"{self._box.url}{CHAT}", json=body, timeout=60, trust_env=False)
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            asking as answer,
        ):  # cut off: what was read is what there is
            for line in answer.iter_lines():
                self.lines += [line] if line else []
                if len(self.lines) > 3:
                    self.begun.set()

    def end(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.lines


def test_what_runs_is_finished_and_nothing_else_is_taken(serve, talkative):
    """The first signal: 503 for who comes, the whole stream for who is there, then the end."""
    with serve(talkative, drain_seconds=60) as box:
        with httpx.Client(base_url=box.url, timeout=60, trust_env=False) as client:
            stream = Streaming(box, 400)
            box.loop.call_soon_threadsafe(box.server.handle_exit, 15, None)
            until = time.monotonic() + 10
            while client.get("/health").status_code == 200 and time.monotonic() < until:
                pass
            assert client.get("/health").json() == {"status": "draining"}
            refused = client.post(CHAT, json=SAY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert "retry-after" in refused.headers
        lines = stream.end()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_what_takes_too_long_is_ended_with_an_error(serve, talkative):
    with serve(talkative, drain_seconds=0.2) as box:
        stream = Streaming(box, 3900)
        box.loop.call_soon_threadsafe(box.server.handle_exit, 15, None)
        lines = stream.end()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "draining"


def test_a_second_signal_ends_at_once(serve, talkative):
    with serve(talkative, drain_seconds=60) as box:
        stream = Streaming(box, 3900)
        for _ in range(2):
            box.loop.call_soon_threadsafe(box.server.handle_exit, 2, None)
        lines = stream.end()
    assert not any('"finish_reason":"length"' in line for line in lines)


def test_a_port_that_is_taken_is_said(talkative, invoke_serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = invoke_serve(talkative, "--port", port)
    assert done.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tool-parser", "os"], "json_tools"),
        (["--allow-origin", "localhost:3000"], "a scheme and a host"),
        (["--allow-origin", "http://localhost:3000/page"], "a scheme and a host"),
        (["--temperature", "-1"], "temperature"),
        (["--port", "70000"], "70000"),
        (["--drain-seconds", "-1"], "-1"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(invoke_serve, options, said):
    done = invoke_serve("/no/such/model", *options)
    assert done.exit_code != 0
    assert said in done.output
    assert "no/such" not in done.output


@pytest.fixture
def invoke_serve():
    """Run ``oarlock serve`` in this process."""
    from click.testing import CliRunner

    from oarlock.plugins.cli.app import cli

    return lambda *arguments: CliRunner().invoke(cli, ["serve", *map(str, arguments)], prog_name="oarlock")
