"""docs/server.md, followed: the server is started as it says, its clients are run, and what it shows is what they print."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess

import pytest

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HERE = "http://127.0.0.1:8080"


@pytest.mark.weights
@pytest.mark.timeout(240)
def test_the_page_about_the_server_is_followed(serve, root):
    """Each block, in order. Those that start servers are started in tests of their own, on free ports."""
    blocks = FENCE.findall((root / "docs" / "server.md").read_text())
    assert [language for language, _ in blocks] == ["sh", "sh", "python", "text", "sh"]
    (_, start), (_, curl), (_, client), (_, shown), (_, replicas) = blocks
    for line in [start.splitlines()[-1], *replicas.splitlines()]:
        check_options(line)
    with serve("smollm2", name="smollm2") as box:
        if shutil.which("curl") is not None:
            done = subprocess.run(shlex.split(curl.replace(HERE, box.url)), capture_output=True, text=True, check=True)
            pieces = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
            said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
            assert said == shown.strip()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(client.replace(HERE, box.url), "docs/server.md", "exec"), {})  # noqa: S102 - the page's own
        assert printed.getvalue() == shown


def check_options(line):
    """A command of the page parses."""
    from oarlock.plugins.server.command import serve

    words = shlex.split(line)
    assert words[:2] == ["oarlock", "serve"]
    serve.make_context("serve", words[2:])


def test_every_field_and_status_is_on_the_page(root):
    """What the code knows stands in the tables."""
    from oarlock.plugins.server import chat, completions, fields

    page = (root / "docs" / "server.md").read_text()
    offered = {*fields.SHARED, *fields.OWN, *fields.LABELS, *chat.FIELDS, *completions.FIELDS} - {
        "prompt_cache_retention"
    }
    assert [name for name in sorted(offered) if f"`{name}" not in page] == []
