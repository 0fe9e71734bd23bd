"""A server on a free port of this machine, in a thread of this process, with a tiny model whose template knows tools."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m['role'] == 'tool' else m['role'] }}|>{{ m['content'] }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>{{ tool_call.function.name }}</tool_call>{% endfor %}"
    "{# tool_call.name #}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def talkative(saved, tmp_path_factory):
    """The directory of a tiny model."""
    return saved(tmp_path_factory.mktemp("talkative"), template=TEMPLATE)


@contextlib.contextmanager
def serving(
    source, *, name="tiny", config=None, plugins=(), defaults=None, drain_seconds=5.0, tool_format=None, **options
):
    """Serve until the block ends; yield its URL, the service, the server, and its loop."""
    import uvicorn

    from oarlock.core.config import EngineConfig
    from oarlock.plugins.server.app import create_app
    from oarlock.plugins.server.service import open_service
    from oarlock.plugins.server.serving import DrainingServer, address, listen

    made, ready, box = listen("127.0.0.1", 0), threading.Event(), SimpleNamespace(error=None)

    async def main():
        settings = EngineConfig.load(config)
        made_of = {"config": settings, "plugins": plugins, "defaults": defaults, "tool_format": tool_format}
        box.loop, box.service = asyncio.get_running_loop(), await open_service(source, name, **made_of)
        wire = uvicorn.Config(create_app(box.service, **options), log_level="error", lifespan="off")
        async with box.service.engine:
            box.server = DrainingServer(wire, box.service, drain_seconds)
            ready.set()
            await box.server.serve(sockets=[made])

    def run():
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - raised where the server was asked for
            box.error = error
        ready.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    ready.wait()
    try:
        if box.error is not None:
            raise box.error
        box.url = address(made)
        yield box
    finally:
        if box.error is None:
            box.server.should_exit = True
        thread.join(30)
        made.close()
    if box.error is not None:
        raise box.error


@pytest.fixture(scope="session")
def serve():
    """Start servers: ``with serve(directory, config=...) as box``."""
    return serving


@pytest.fixture(scope="session")
def server(talkative):
    """One server that tests share; none of them changes it."""
    with serving(talkative) as box:
        yield box


@pytest.fixture(scope="session")
def client(server):
    """The official client of the shared server."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def wire(server):
    """Plain HTTP to the shared server."""
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as made:
        yield made


@pytest.fixture(scope="session")
def eventually():
    """Wait until something holds, and assert it."""

    def wait(what, seconds=10):
        until = time.monotonic() + seconds
        while not what() and time.monotonic() < until:
            time.sleep(0.02)
        assert what()

    return wait


@pytest.fixture
def settled():
    """Wait until a server has nothing left: no row, no answer, no cache of a running row."""

    def wait(box, seconds=5.0):
        until = time.monotonic() + seconds
        while (left := _left(box)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, left

    return wait


def _left(box):
    stats = box.service.engine.stats()
    counts = {key: stats[key] for key in ("active_rows", "pending_rows", "kv_bytes")}
    counts |= {"answering": box.service.answering, "board": len(box.service.board)}
    return {key: value for key, value in counts.items() if value}


@pytest.fixture(scope="module")
def browser(imported):
    """A headless Chromium: it takes time of a core as long as it shows anything, so it ends with the module."""
    module = imported(Path(__file__).parent / "browser.py")
    if module.find() is None:
        pytest.skip("Chromium is not installed")
    with module.Browser() as made:
        yield made
