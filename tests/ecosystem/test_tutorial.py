"""docs/tutorial.md, followed to the letter in a fresh directory: what it shows is what comes."""

import fnmatch
import os
import re
import subprocess
import time

import pytest

BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 1500


def blocks(text):
    """Yield (language, attributes, body) of each fenced block."""
    for language, attributes, body in BLOCK.findall(text):
        yield language, dict(re.findall(r'(\w+)="([^"]*)"', attributes)), body


def shows(said, shown):
    """Whether the lines of ``shown`` come in ``said``, in order; ``...`` stands for anything, also between lines."""
    pattern = "*".join(line.strip() for line in shown.splitlines())
    pattern = re.sub(r"\*?(\.\.\.)\*?", "*", pattern.replace("[", "[[]"))
    return fnmatch.fnmatchcase(" ".join(said.split()), "*" + " ".join(pattern.split()) + "*")


class Reader:
    """Who follows the page: a directory, an environment of its own, and what was typed."""

    def __init__(self, house, folder):
        self.folder, self.typed = folder, 0
        scripts = house.python.parent
        command = "import sys; from oarlock.plugins.cli import main; sys.exit(main())"
        for name, start in {"pip": "-m pip", "pytest": "-m pytest", "oarlock": f'-c "{command}"'}.items():
            (scripts / name).write_text(f'#!/bin/sh\nexec "{house.python}" {start} "$@"\n')
            (scripts / name).chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
        self.environment.pop("PYTHONPATH", None)

    def types(self, body):
        """Run shell lines as typed, and return what they said and whether they went well."""
        said, well = "", True
        for line in body.splitlines():
            self.typed += 1
            if line.startswith("cd "):
                self.folder = self.folder / line.removeprefix("cd ")
                continue
            done = subprocess.run(
                ["sh", "-c", line],
                cwd=self.folder,
                env=self.environment,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
            )
            said, well = said + done.stdout, well and done.returncode == 0
        return said, well

    def writes(self, attributes, body):
        """Make a file the block, or put the block in the place of one line of it."""
        path = self.folder / attributes["title"]
        self.typed += len(body.splitlines())
        if (old := attributes.get("replaces")) is not None:
            text = path.read_text()
            assert text.count(old + "\n") == 1
            body = text.replace(old + "\n", body)
        path.write_text(body)


@pytest.mark.long
@pytest.mark.weights
@pytest.mark.timeout(2400)
def test_who_follows_the_tutorial_gets_what_it_shows(root, house_of, tmp_path):
    """Each command goes well, but those whose output is shown with a failure."""
    reader = Reader(house_of(tmp_path / "venv"), tmp_path)
    page = list(blocks((root / "docs" / "tutorial.md").read_text()))
    began, shown = time.monotonic(), 0
    for place, (language, attributes, body) in enumerate(page):
        if "title" in attributes:
            reader.writes(attributes, body)
        elif language == "sh":
            wanted = page[place + 1][2] if page[place + 1][0] == "text" else ""
            said, well = reader.types(body)
            assert well is not (" failed" in wanted), f"{body}{said[-3000:]}"
            assert shows(said, wanted), f"{body}said\n{said[-3000:]}\nand not\n{wanted}"
            shown += bool(wanted)
    assert shown == sum(language == "text" for language, _, _ in page)
    print(f"{reader.typed} lines typed in {time.monotonic() - began:.0f} s")


def test_what_is_shown_must_come():
    assert shows("a b\nc failed in 3 s\n", "a ...\n...failed...")
    assert not shows("a b\nc passed in 3 s\n", "a ...\n...failed...")
    assert shows("x [1, 2] y", "[1, 2]")
    assert not shows("x 1 y", "[1, 2]")
