"""Every fenced block of README.md and docs/ is run, and what a page shows below a block is what the block prints.

A block is a test of its own: it runs in a fresh namespace and in an empty directory that holds the files of its page above
it (blocks with a title). What cannot be run stands in `LEFT_OUT` with its reason.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path

import attrs
import pytest

from oarlock.core import device

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)([^\n`]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
SIGNATURE = re.compile(r"def \w+\(.*\) -> [^:]+")

# What is not run: (page, how a line of a shell block begins, or another block) -> why. Each is used, and nothing else stays out.
DRAWING = "a drawing"
LEFT_OUT = {
    ("README.md", "make demo"): "fetches weights; .ci/run does it on its way to the tests",
    ("README.md", "make test"): "runs this test",
    ("README.md", "oarlock serve"): "runs until a signal; tests/plugins/server/test_process.py starts it",
    ("README.md", "· waits"): DRAWING,
    ("README.md", "submit -> queue"): DRAWING,
    ("README.md", "pip install '.[grammar]'"): "installs from a registry; make test did",
    ("docs/architecture.md", "layouts   methods"): DRAWING,
    ("docs/ranks.md", "mlx.launch"): "starts processes; tests/plugins/ranks runs these commands",
    ("docs/installing.md", "podman "): "needs a container engine",
    ("docs/plugins.md", "pip install 'oarlock[kit]'"): "installs from a registry; make test did",
}
# Pages whose blocks are one sequence, each in what the ones before it left: page -> the test that follows it.
FOLLOWED = {
    "docs/server.md": "tests/plugins/server/test_docs.py",
    "docs/tutorial.md": "tests/ecosystem/test_tutorial.py",
}
# Files that a page speaks of and that are the reader's own.
PREPARED = {
    "prompts.jsonl": '{"id": "a", "prompt": "One, two,", "max_tokens": 4}\n{"id": "b", "prompt": "Red", "max_tokens": 3}\n',
}


@attrs.frozen(kw_only=True)
class Block:
    """A fenced block. ``title``: the file that it is; ``output``: what the page shows below it; ``files``: those above it."""

    page: str
    line: int
    language: str
    title: str
    text: str
    output: str | None
    files: dict[str, str]

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page, text):
    """Return the blocks of a page; a ``text`` block right below another is that one's output."""
    found = list(FENCE.finditer(text))
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(found), f"{page}: a fence without its other half"
    made, files, shown = [], {}, None
    for match, below in zip(found, [*found[1:], None], strict=False):
        line = text.count("\n", 0, match.start()) + 1
        title = re.fullmatch(r'(?: title="([\w./-]+)")?', match[3])
        assert title, f'{page}:{line}: {match[3]!r} after the language; allowed is title="FILE"'
        if match is shown:
            continue
        shown = below if below and below[2] == "text" and not text[match.end() : below.start()].strip() else None
        body = {"text": _body(match), "output": _body(shown) if shown else None}
        made.append(Block(page=page, line=line, language=match[2], title=title[1] or "", files=dict(files), **body))
        if title[1]:
            files[title[1]] = body["text"]
    return made


def _body(match):
    return re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)


FOUND = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in FOUND if page not in FOLLOWED]
BLOCKS = [block for page in PAGES for block in blocks(page, (ROOT / page).read_text())]


def units(block):
    """Return what is run or left out by itself: the lines of a shell block, any other block as a whole."""
    if block.language != "sh":
        return [block.text]
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]


def left_out(block, unit):
    """Return the entry of `LEFT_OUT` for a unit of a block, if any."""
    return next((key for key in LEFT_OUT if key[0] == block.page and unit.startswith(key[1])), None)


def runs(block):
    """Return the units of a block that are run."""
    return [unit for unit in units(block) if not left_out(block, unit)]


def parameters(*languages):
    """Return the blocks that are run as parameters; those that need the real model say so."""
    return [
        pytest.param(block, id=block.id, marks=[pytest.mark.weights] * ("smollm2" in block.text))
        for block in BLOCKS
        if block.language in languages and runs(block)
    ]


# --- where a block runs ------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Lay out the directory of a block, on the import path as an installed package would be, and go there."""

    def lay_out(block):
        for name, text in {**PREPARED, **block.files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if "pyproject.toml" in block.files:
            install(tomllib.loads(block.files["pyproject.toml"])["project"], tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.delenv("OARLOCK_PLUGINS", raising=False)
        # As a reader runs it, not in the order of a GPU's steps, which tests/conftest.py sets.
        monkeypatch.setattr(device, "MEANT", runpy.run_path(device.__file__)["MEANT"])

    before = set(sys.modules)
    yield lay_out
    own = [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]
    for name in {*own} - before:
        del sys.modules[name]


def install(project, folder):
    """Write the metadata by which a package in ``folder`` is found."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = [f"{name} = {value}" for name, value in project["entry-points"]["oarlock"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[oarlock]", *entries, ""]))


def agrees(wanted, got):
    """Say whether a page shows what was printed; ``...`` stands for anything."""
    wanted, got = ("".join(f"{line.rstrip()}\n" for line in text.strip().splitlines()) for text in (wanted, got))
    return doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)


def compare(block, got):
    """Fail where a page shows something else."""
    if block.output is not None and not agrees(block.output, got):
        pytest.fail(f"{block.id} shows\n{block.output}\nand it prints\n{got}", pytrace=False)


# --- one language each --------------------------------------------------------------------------------------------


def execute(block):
    """Run a Python block and return what it prints; where output is shown, an error is printed as an interpreter does."""
    printed = io.StringIO()
    names = {"__name__": Path(block.title).stem or "example"}
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(block.text, block.id, "exec"), names)  # noqa: S102 - the page is ours
        except Exception:
            if block.output is None:
                raise
            printed.write(traceback.format_exc())
    return printed.getvalue()


def run(line, *, whole):
    """Run a line of a shell block and return what it prints and its exit code. ``whole``: the kit is not only collected."""
    words = shlex.split(line, comments=True)
    if words[0] == "oarlock":
        return run_oarlock(words[1:])
    if words[0] == "pytest":
        return run_pytest([*words[1:], *([] if whole else ["--collect-only"])])
    done = subprocess.run(["sh", "-ec", line], check=False, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr, done.returncode


def run_oarlock(words):
    """Run a command of ours in this process."""
    from click.testing import CliRunner

    from oarlock.plugins.cli.app import cli

    done = CliRunner().invoke(cli, words, prog_name="oarlock")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output, done.exit_code


def run_pytest(words):
    """Run pytest in this process, away from the settings of this checkout."""
    printed = io.StringIO()
    alone = [f"-pno:{plugin}" for plugin in ("cacheprovider", "asyncio", "timeout", "xdist", "hypothesispytest")]
    with contextlib.redirect_stdout(printed):
        code = pytest.main([*words, *alone, "--rootdir=.", "-c/dev/null"])
    return printed.getvalue(), int(code)


def is_signatures(block):
    """Whether a Python block is a list of signatures, which nothing can execute."""
    return all(SIGNATURE.fullmatch(line) for line in block.text.splitlines())


@pytest.mark.parametrize("block", parameters("python"))
def test_python(block, place):
    """It runs as it stands; hooks are shown by the signatures that they have."""
    if is_signatures(block):
        from oarlock.core import hookspecs

        for line in block.text.splitlines():
            name = re.match(r"def (\w+)", line)[1]
            assert line == f"def {name}{inspect.signature(getattr(hookspecs, name))}".replace("'", "")
        return
    place(block)
    compare(block, execute(block))


@pytest.mark.parametrize("block", parameters("sh"))
def test_commands(block, place):
    """Every line runs and succeeds, or fails as the page shows."""
    place(block)
    shown = block.output is not None
    printed = []
    for line in runs(block):
        got, code = run(line, whole=shown)
        assert shown or code == 0, f"{block.id}: {line}: exit code {code}\n{got}"
        printed.append(got)
    compare(block, "".join(printed))


@pytest.mark.parametrize("block", parameters("toml"))
def test_settings(block, place):
    """A package's entry points name something; all else is a configuration, and a tiny model binds with it."""
    from oarlock.core import manager
    from oarlock.core.bind import bind
    from oarlock.core.config import EngineConfig
    from oarlock.core.testing import models

    given = tomllib.loads(block.text)
    if "project" in given:
        entries = given["project"]["entry-points"]["oarlock"]
        assert all(re.fullmatch(r"[a-z]\w*(\.\w+)*(:\w+)?", target) for target in entries.values())
        return
    config = EngineConfig.load(given)
    place(block)
    given.pop("adapters", None)  # directories of the reader's
    bind(models.build("tiny-full", hidden_size=256), EngineConfig.load(given), manager.build(config))


# --- nothing stays out ------------------------------------------------------------------------------------------


def test_every_block_is_run_or_left_out_with_a_reason():
    """Each is of a language that has a test, or stands in `LEFT_OUT`."""
    stray = [block.id for block in BLOCKS if block.language not in ("python", "sh", "toml") and runs(block)]
    assert not stray, f"no test runs these: {stray}"


def test_what_is_left_out_is_there():
    """An exception that no page needs any more goes."""
    assert {left_out(block, unit) for block in BLOCKS for unit in units(block)} - {None} == set(LEFT_OUT)
    assert len(LEFT_OUT) == 10


def test_pages_that_are_followed_have_their_test():
    """And there is such a page."""
    assert set(FOLLOWED) <= set(FOUND)
    for page, test in FOLLOWED.items():
        assert page in (ROOT / test).read_text(), f"{test} does not read {page}"


def page(text):
    """Return the blocks of a page whose fences are written with quotes."""
    return blocks("docs/a.md", text.replace("'''", "```"))


def test_a_wrong_output_is_found(place):
    """The twin of all comparisons."""
    right, wrong = page("'''python\nprint(3)\n'''\n\n'''text\n3\n'''\n'''python\nprint(3)\n'''\n'''text\n4\n'''\n")
    compare(right, execute(right))
    with pytest.raises(pytest.fail.Exception, match=r"docs/a\.md:8 shows\n4"):
        compare(wrong, execute(wrong))


def test_an_error_is_shown_as_an_interpreter_does():
    (block,) = page("'''python\nint('x')\n'''\n\n'''text\nTraceback ...\nValueError: ... 'x'\n'''\n")
    compare(block, execute(block))
    with pytest.raises(ValueError, match="x"):
        execute(attrs.evolve(block, output=None))


def test_a_failing_command_is_found(place):
    """Where a page shows no output, the exit code counts."""
    (block,) = page("'''sh\noarlock explain nowhere-to-be-found\n'''\n")
    place(block)
    with pytest.raises(AssertionError, match="nowhere-to-be-found: exit code 1"):
        test_commands(block, place)
    test_commands(attrs.evolve(block, output="Error: ...nowhere-to-be-found..."), place)
    assert run("false", whole=False) == ("", 1)


def test_blocks_know_the_files_above_them():
    """And each block is alone otherwise; text between a block and its output parts them."""
    text = "'''toml title=\"a.toml\"\n[model]\n'''\n'''sh\ncat a.toml\n'''\nprints\n'''text\n[model]\n'''\n"
    first, second, third = page(text)
    assert (first.title, second.files) == ("a.toml", {"a.toml": "[model]\n"})
    assert (second.output, third.language, third.line) == (None, "text", 8)


def test_half_a_fence_and_other_words_are_refused():
    for text in ("'''python\nx = 1\n", "'''python linenums\nx = 1\n'''\n"):
        with pytest.raises(AssertionError, match=r"docs/a\.md"):
            page(text)
