"""What goes over the wire, without a client that hides it: statuses, bodies, frames, headers."""

import json
import shutil
import socket
import subprocess

import pytest

pytestmark = pytest.mark.timeout(120)
SAY = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 6, "temperature": 0}
PLAIN = {"model": "tiny", "prompt": "fox", "max_tokens": 6, "temperature": 0}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, SAY), (COMPLETIONS, PLAIN)], ids=["chat", "completions"])


def frames(text):
    """The events of a stream, in order; each is one line of data."""
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


@BOTH
def test_a_stream_ends_once(wire, path, body):
    answer = wire.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *said, last = frames(answer.text)
    pieces = [json.loads(each) for each in said]
    assert last == "[DONE]"
    assert [p["choices"][0]["finish_reason"] for p in pieces if p["choices"][0]["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1, 2]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"\xff\xfe\x00", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": "tiny"}', "invalid_value"),
        (b'{"messages": []}', "missing_required_parameter"),
    ],
    ids=["empty", "torn", "list", "text", "no-text", "deep", "no-messages", "no-model"],
)
@pytest.mark.fault("P-02")
def test_a_body_that_is_none_is_refused(wire, body, code):
    answer = wire.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert wire.post(CHAT, json=SAY).status_code == 200


@pytest.mark.fault("P-02", twin=True)
def test_twin_a_handler_that_forgets_to_refuse_is_noticed(wire, monkeypatch):
    """A body that is no JSON, read as an empty object."""
    from oarlock.plugins.server import answering

    async def careless(_request):
        return {}

    monkeypatch.setattr(answering, "_json", careless)
    with pytest.raises(AssertionError):
        test_a_body_that_is_none_is_refused(wire, b"{", "invalid_json")


WRONG = {
    "temperature": ["hot", -1, [], True],
    "top_p": [0, 2, "x"],
    "n": [0, -1, 1.5, "2", True, 10_000],
    "max_tokens": [0, -1, 1.5, "5", True],
    "seed": [1.5, "x", 2**65],
    "stop": [5, [""], [1]],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}],
    "logprobs": ["yes", 1],
    "top_logprobs": [3],
    "logit_bias": [[1], {"x": 1}, {"1": "a"}, {"99999": 1}],
    "frequency_penalty": ["x"],
    "messages": [None, "hi", [], [1], [{"role": "king", "content": "x"}], [{"role": "user"}]],
    "response_format": [{"type": "xml"}, "json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}],
    "tools": [{}, [{}], [{"type": "function", "function": {}}]],
    "tool_choice": ["required", "sometimes"],
    "parallel_tool_calls": ["no"],
    "min_tokens": [-1, 7],
    "stop_token_ids": [[-1], [10**6]],
    "constraint": [{"rhyme": True}, {"regex": "("}],
    "method": ["telepathy"],
    "extra": [{"nothing_reads_it": 1}, 5],
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.fault("P-07", "P-02")
def test_a_wrong_value_is_refused_by_the_name_of_its_field(wire, field):
    """400, the field, and nothing else: no row, no entry on the board, and the next request is answered."""
    for value in WRONG[field]:
        answer = wire.post(CHAT, json={**SAY, field: value})
        error = answer.json()["error"]
        assert answer.status_code == 400, (field, value, answer.text)
        assert error["type"] == "invalid_request_error"
        named = "response_format" if field == "constraint" else field  # a format is a constraint to the engine
        assert (error["param"] or "").partition("[")[0].partition(".")[0] in {field, named}, (value, error)
        assert "\n" not in error["message"]
    assert wire.post(CHAT, json=SAY).status_code == 200


# Every field of OpenAI's two interfaces with a value that asks for something, and what answers it: an effect, a label,
# or a refusal that names it.
OFFERED = {
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -100},
    "logprobs": True,
    "max_completion_tokens": 6,
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "seed": 3,
    "stop": ["x"],
    "stream": True,
    "temperature": 0.5,
    "tool_choice": "none",
    "tools": [],
    "top_p": 0.5,
}
LABELS = {"metadata": {"a": "b"}, "safety_identifier": "x", "user": "me", "prompt_cache_key": "k"}
NOT_OFFERED = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "service_tier": "flex",
    "store": True,
    "verbosity": "high",
    "web_search_options": {},
    "echo": True,
    "best_of": 3,
    "suffix": "x",
}


@pytest.mark.fault("P-07")
def test_every_field_is_offered_or_refused(wire):
    for field, value in OFFERED.items():
        body = {key: each for key, each in SAY.items() if (key, field) != ("max_tokens", "max_completion_tokens")}
        assert wire.post(CHAT, json={**body, field: value}).status_code == 200, field
    plain = wire.post(CHAT, json=SAY).json()["choices"]
    for field, value in LABELS.items():
        assert wire.post(CHAT, json={**SAY, field: value}).json()["choices"] == plain, field
    for field, value in NOT_OFFERED.items():
        answer = wire.post(CHAT, json={**SAY, field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert wire.post(CHAT, json={**SAY, field: None}).status_code == 200, field


@BOTH
@pytest.mark.fault("P-07")
def test_a_misspelt_field_is_refused_with_the_right_one(wire, path, body):
    answer = wire.post(path, json={**body, "temprature": 0.5})
    assert answer.status_code == 400
    assert "did you mean 'temperature'" in answer.json()["error"]["message"]


@pytest.mark.fault("P-07", twin=True)
def test_twin_a_field_that_is_dropped_is_noticed(wire, monkeypatch):
    """Were unknown fields left out without a word, the check above would see it."""
    from oarlock.plugins.server import fields

    check = fields.check
    known = {*fields.SHARED, *fields.OWN, *fields.LABELS, *fields.NEUTRAL}
    monkeypatch.setattr(
        fields, "check", lambda body, own: check({k: v for k, v in body.items() if k in {*known, *own}}, own)
    )
    with pytest.raises(AssertionError):
        test_a_misspelt_field_is_refused_with_the_right_one(wire, CHAT, SAY)


def test_no_prompt_is_too_short(wire):
    """L-07 through HTTP: one word, one letter, nothing."""
    for length in range(13):
        for path, body in (
            (CHAT, {**SAY, "messages": [{"role": "user", "content": "x" * length}]}),
            (COMPLETIONS, PLAIN),
        ):
            options = {"logprobs": True if path == CHAT else 1, "n": 2, "seed": 1, "stop": ["zz"]}
            given = {**body, **options} if path == CHAT else {**body, **options, "prompt": "x" * (length + 1)}
            assert wire.post(path, json=given).status_code == 200, (path, length)
    empty = wire.post(COMPLETIONS, json={**PLAIN, "prompt": ""})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "prompt")


def test_other_paths_and_methods_are_refused_in_the_same_shape(wire):
    for method, path, status in (("GET", CHAT, 405), ("POST", "/v1/embeddings", 404), ("GET", "/etc/passwd", 404)):
        answer = wire.request(method, path)
        assert answer.status_code == status
        assert path in answer.json()["error"]["message"]


def test_another_content_type_is_refused(wire):
    """A foreign web page can send a form or plain text to this machine without being asked, JSON it cannot."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = wire.post(CHAT, content=json.dumps(SAY), headers={"content-type": kind})
        assert answer.status_code == 415


def test_a_foreign_host_is_refused(serve, talkative):
    with serve(talkative, hosts=("localhost", "127.0.0.1", "::1")) as box:
        import httpx

        with httpx.Client(base_url=box.url, trust_env=False) as client:
            assert client.get("/health").status_code == 200
            for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example"):
                assert client.get("/health", headers={"host": host}).status_code == 403
            for host in ("localhost:1", "[::1]:80", "127.0.0.1"):
                assert client.get("/health", headers={"host": host}).status_code == 200


def test_health_and_metrics(wire, eventually):
    assert wire.get("/health").json() == {"status": "ok"}
    before = metric(wire, "oarlock_generated_tokens_total")
    usage = wire.post(CHAT, json=SAY).json()["usage"]
    eventually(lambda: metric(wire, "oarlock_generated_tokens_total") == before + usage["completion_tokens"])
    assert metric(wire, 'oarlock_http_responses_total{path="/v1/chat/completions",status="200"}') > 0
    wire.get("/no/such/path")
    assert metric(wire, 'oarlock_http_responses_total{path="other",status="404"}') > 0
    assert metric(wire, "oarlock_active_rows") == 0


def test_the_status_shows_rows_gauges_and_layers(wire, eventually):
    with wire.stream(
        "POST", CHAT, json={**SAY, "n": 2, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if '"content":"' in line and '"content":""' not in line:
                break
        eventually(lambda: [row["phase"] for row in wire.get("/status").json()["rows"]] == ["decode", "decode"])
        eventually(lambda: all(row["tokens"] > 1 for row in wire.get("/status").json()["rows"]))
        status = wire.get("/status").json()
        assert status["stats"]["kv_bytes_by_layout"]["full"] == status["stats"]["kv_bytes"] > 0
        assert {"layer 0", "layer 1"} <= {line["part"] for line in status["composition"]}
    eventually(lambda: wire.get("/status").json()["rows"] == [])


def metric(wire, name):
    for line in wire.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


def test_curl_streams(server):
    """Frame by frame, as the README says it."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({**SAY, "stream": True})
    command = [curl, "-sN", f"{server.url}{CHAT}", "-H", "content-type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *said, last = frames(done.stdout)
    assert last == "[DONE]"
    assert all(json.loads(each)["object"] == "chat.completion.chunk" for each in said)


@pytest.mark.fault("P-02")
def test_a_socket_that_closes_at_any_point_hurts_nobody(server, wire, settled):
    """Closed after each piece of the head and of the body, and while the answer comes, beside a stream that goes on."""
    alone = wire.post(CHAT, json={**SAY, "max_tokens": 200, "ignore_eos": True}).json()["choices"]
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**SAY, "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    whole = head.encode() + body
    with wire.stream("POST", CHAT, json={**SAY, "max_tokens": 200, "ignore_eos": True, "stream": True}) as beside:
        lines = beside.iter_lines()
        next(lines)
        for cut in (0, 10, len(head) - 2, len(head) + 5, len(whole) - 1, len(whole)):
            for read in (0, 1, 300) if cut == len(whole) else (0,):
                with socket.create_connection((host, int(port)), timeout=20) as made:
                    made.sendall(whole[:cut])
                    if read:
                        made.recv(read)
        said = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in said)
    assert text == alone[0]["message"]["content"]
    settled(server)
