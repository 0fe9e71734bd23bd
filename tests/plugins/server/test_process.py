"""``oarlock serve`` as a process: what it prints, signals, adapters, the makers' advice, and two servers on one directory."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.timeout(180)
CHAT = "/v1/chat/completions"
SAY = {"model": "talkative", "messages": [{"role": "user", "content": "rows and rivers " * 20}], "max_tokens": 8}
PROGRAM = "from oarlock.plugins.cli import main; main()"


class Process:
    """A server in a process of its own, on a free port."""

    def __init__(self, *arguments, **variables):
        command = [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments), "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": "", **variables}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"its page at (\S+)/", line):
                self.url = found[1]
                break
        else:
            raise AssertionError(self.said)
        self._rest = threading.Thread(target=lambda: self.said.extend(self.process.stderr))
        self._rest.start()
        self.wire = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wire.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._rest.join()
        self.process.stderr.close()

    def end(self, with_signal=signal.SIGTERM):
        """Send a signal and return the exit code."""
        self.process.send_signal(with_signal)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def named(talkative, saved, tmp_path_factory):
    """The same model in a directory with a name."""
    folder = tmp_path_factory.mktemp("named") / "talkative"
    folder.mkdir()
    return saved(folder)


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_on_this_machine_alone_and_a_signal_ends_it_well(named, with_signal):
    with Process(named) as server:
        assert server.url.startswith("http://127.0.0.1:")
        answer = server.wire.post(CHAT, json=SAY)
        assert answer.status_code == 200, answer.text
        assert server.wire.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert server.end(with_signal) == 0
    assert not any("Traceback" in line or "error" in line.lower() for line in server.said), server.said


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.fault("J-06")
def test_an_idle_server_is_idle(named):
    """After one request: hardly any time of a processor, and the next one is answered."""
    with Process(named) as server:
        assert server.wire.post(CHAT, json=SAY).status_code == 200
        before = processor_seconds(server.process.pid)
        time.sleep(3)
        assert processor_seconds(server.process.pid) - before < 0.15
        assert server.wire.post(CHAT, json=SAY).status_code == 200


def processor_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_key_comes_from_the_environment(named):
    with Process(named, OARLOCK_API_KEY="secret") as server:
        assert server.wire.get("/v1/models").status_code == 401
        assert server.wire.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert "secret" not in "".join(server.said)


def test_two_servers_share_a_directory(named, tmp_path, eventually):
    """What one has computed of a prompt, the other reads: replicas behind a balancer."""
    options = ["--set", f"state_cache.disk={tmp_path}", "--set", "state_cache.publish_min_tokens=32"]
    with Process(named, *options) as one, Process(named, *options) as other:
        first = one.wire.post(CHAT, json={**SAY, "seed": 1}).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        eventually(lambda: list(tmp_path.rglob("*.safetensors")), seconds=20)
        second = other.wire.post(CHAT, json={**SAY, "seed": 1}).json()
        assert second["choices"] == first["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert other.wire.get("/status").json()["stats"]["state_cache"]["disk_hits"] == 1
        assert one.end() == other.end() == 0


def test_the_makers_advice_holds_where_nobody_says_otherwise(serve, saved, tmp_path):
    """generation_config.json, under the server's options, under the request's own fields."""
    model = saved(tmp_path)
    advice = {"do_sample": True, "temperature": 0.7, "top_k": 3, "eos_token_id": 0}
    Path(model, "generation_config.json").write_text(json.dumps(advice))
    body = {"model": "tiny", "messages": SAY["messages"], "max_tokens": 8, "seed": 4, "ignore_eos": True}
    with serve(model) as advised, httpx.Client(base_url=advised.url, timeout=60, trust_env=False) as wire:
        plain = wire.post(CHAT, json=body).json()["choices"]
        assert plain == wire.post(CHAT, json={**body, "temperature": 0.7, "top_k": 3}).json()["choices"]
        hot = wire.post(CHAT, json={**body, "temperature": 1.0, "top_k": 0}).json()["choices"]
    Path(model, "generation_config.json").unlink()
    with serve(model) as plainly, httpx.Client(base_url=plainly.url, timeout=60, trust_env=False) as wire:
        assert wire.post(CHAT, json=body).json()["choices"] == hot != plain
    told = serve(model, defaults={"temperature": 0.7, "top_k": 3})
    with told as box, httpx.Client(base_url=box.url, timeout=60, trust_env=False) as wire:
        assert wire.post(CHAT, json=body).json()["choices"] == plain
