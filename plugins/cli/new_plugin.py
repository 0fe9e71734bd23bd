"""``oarlock new-plugin``: a package to begin with, which is whole and passes the conformance kit. What it does is the author's."""

from __future__ import annotations

import importlib.resources
import keyword
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import attrs
import click

from oarlock.plugins.cli.console import note

PLACEHOLDER = "example"


@attrs.frozen
class Kind:
    """A kind of plugin: the clauses that prove it, its options in the kit, and how somebody chooses it."""

    contract: str
    variables: tuple[str, ...]
    chosen: str

    def test(self, kind: str) -> str:
        """Return the test file."""
        module, _, contract = self.contract.rpartition(".")
        lines = [f'{kind} = "{PLACEHOLDER}"', *self.variables]
        typed = "from typing import ClassVar\n\n" if any("ClassVar" in line for line in lines) else ""
        body = textwrap.indent("\n".join(lines), "    ")
        return f'''"""The whole contract of {PLACEHOLDER}, clause by clause."""

{typed}from oarlock.core.testing.{module} import {contract}


class TestExample({contract}):
{body}
'''


KINDS: Mapping[str, Kind] = {
    "layout": Kind(
        "layouts.LayoutContract",
        ("tolerance = 0.01  # how far what is read may be from what was written; 0: rounding alone",),
        "oarlock generate smollm2 'Why is the sky blue?' --set layouts.full=example",
    ),
    "method": Kind(
        "methods.MethodContract", (), "oarlock generate smollm2 'Why is the sky blue?' --set method=example"
    ),
    "sampler": Kind(
        "samplers.SamplerContract",
        ('options: ClassVar = {"example": 0.2}',),
        "from Python: Request(prompt=..., sampling=SamplingParams(temperature=1.0, extra={'example': 0.2}))",
    ),
    "processor": Kind(
        "processors.ProcessorContract",
        ('options: ClassVar = {"example": 2.0}',),
        "from Python: Request(prompt=..., sampling=SamplingParams(extra={'example': 2.0}))",
    ),
}

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "oarlock-{distribution}"
version = "0.1"
description = "A {kind} for oarlock."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["oarlock"]

[project.optional-dependencies]
test = ["oarlock[kit]"]

[project.entry-points.oarlock]
{module} = "{module}"

[tool.setuptools]
py-modules = ["{module}"]
"""

README = """\
# oarlock-{distribution}

A {kind} for oarlock, in one file: `{module}.py`. The line under `project.entry-points.oarlock` in `pyproject.toml` is
all that makes it one.

```sh
pip install -e '.[test]'      # beside oarlock, which finds it
oarlock plugins --check       # lists what it registers
pytest                        # proves it, clause by clause
```

It is chosen so:

```
{chosen}
```
"""


@click.command(
    "new-plugin",
    short_help="Write a package to begin a plugin with.",
    epilog="Example: oarlock new-plugin layout my-kv",
)
@click.argument("kind", type=click.Choice(sorted(KINDS)))
@click.argument("name")
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Where; here by default."
)
def new_plugin(kind: str, name: str, into: Path) -> None:
    """Write the package oarlock-NAME into a new directory NAME: one module, its tests, pyproject.toml and a README.

    What it holds is a small plugin that passes the conformance kit as it is; change it step by step and run pytest.
    """
    module = _module(name)
    folder = into / name
    files = package(kind, name, module)
    if folder.exists():
        msg = f"{str(folder)!r} is there already; names of no file or directory in {str(into.resolve())!r} are allowed"
        raise click.BadParameter(msg, param_hint="NAME")
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    note(f"wrote {', '.join(str(folder / path) for path in files)}")
    note(f"next: cd {folder} && pip install -e '.[test]' && pytest")


def package(kind: str, name: str, module: str) -> dict[str, str]:
    """Return the files of a package by path: a plugin called ``module``, distributed as oarlock-``name``."""
    source = importlib.resources.files("oarlock.plugins.starters").joinpath(f"{kind}.py").read_text("utf-8")
    values = {"distribution": name, "module": module, "kind": kind, "chosen": KINDS[kind].chosen}
    return {
        f"{module}.py": _named(source, module),
        f"tests/test_{module}.py": _named(KINDS[kind].test(kind), module),
        "pyproject.toml": PROJECT.format(**values),
        "README.md": _named(README.format(**values), module),
    }


def _named(text: str, module: str) -> str:
    """Put the plugin's own name where the starter has its placeholder."""
    words = "".join(word.capitalize() for word in module.split("_"))
    return text.replace(PLACEHOLDER.capitalize(), words).replace(PLACEHOLDER, module)


def _module(name: str) -> str:
    """Return the module of a distribution of that name. Raises click.BadParameter."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", name) or keyword.iskeyword(module) or module == PLACEHOLDER:
        allowed = f"small letters, digits and - between them, a letter first, no word of Python and not {PLACEHOLDER!r}"
        msg = f"{name!r}; allowed are {allowed}"
        raise click.BadParameter(msg, param_hint="NAME")
    return module
