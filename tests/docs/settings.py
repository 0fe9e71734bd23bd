"""Write docs/config.md: every key of the configuration and every option of a built-in plugin, read from the attrs classes.

Run it: `make config`. What a value may be is what the engine says when it refuses one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import tomllib
from pathlib import Path

import attrs

from oarlock.core import manager
from oarlock.core.choices import evolved, parse_options
from oarlock.core.config import KINDS, EngineConfig
from oarlock.core.errors import InvalidConfigValue
from oarlock.plugins import policies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"
NAMES = {
    "layouts.kinds": ", ".join(f"`{kind}`" for kind in KINDS),
    "layouts.layers": "`layers.PATH`",
    "method.options": "an option's name",
    "adapters.named": "a name",
}
"""Keys that are no field's name."""
CHOICES = {
    "scheduler.policy": {},
    "layouts.kinds": {KINDS[0]: 0},
    "layouts.layers": {"0": 0},
    "adapters.named": {"a": 0},
}
"""Keys that choose plugins, with a value of which the engine refuses the choice."""
OPTIONS = {
    "layout": "Layouts", "method": "Methods", "proposer": "Proposers", "policy": "Policies", "adapter": "Adapters"
}  # fmt: skip
HEAD = """# Configuration

One TOML file, mapping or `EngineConfig` is the whole configuration of an engine: `Engine.load(source, config=...)`, or
`--config FILE` and `--set SECTION.KEY=VALUE` on the command line. Every key may be left out; an unknown key is an error that
names the nearest known one. A key that chooses a plugin takes its name, or a table of its name and its options.

This page is made by `make config` from `core/config.py` and the option classes of the built-in plugins.

```toml
[scheduler]
max_batch = 8
kv_budget = "4GiB"
policy = { name = "fair_share", patience = 8 }

[layouts]
full = { name = "quantized", bits = 8, group_size = 64 }

[layouts.layers]
"0-1" = "full"

[method]
name = "speculative"
proposer = { name = "ngram", max_n = 6 }
```

`oarlock explain MODEL --config FILE` shows what a model gets by it, layer by layer.
"""


PROMISES = f"""
{policies.__doc__.split(chr(10) * 2)[1].rstrip()}
"""


class Anything:
    """What no key takes."""

    def __repr__(self) -> str:
        return "anything"


def said(cls):
    """Return {field: the docstring below it} of a class, from its source."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0].body
    pairs = itertools.pairwise(body)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def toml(value):
    """Return a default as it would stand in the file."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return "[]" if value == () else "{}" if value == {} else str(value)


def allowed(build):
    """Return what may stand where ``build`` puts a value, in the words with which it refuses one."""
    try:
        build(Anything())
    except InvalidConfigValue as error:
        return error.allowed
    except ValueError as error:
        return str(error)
    msg = "a setting that takes anything is not checked"
    raise AssertionError(msg)


def row(*cells):
    """Return a line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"


def section(name, cls):
    """Return one section of the file."""
    notes = said(cls)
    text = f"\n## `[{name}]`\n\n{cls.__doc__.split(': ', 1)[1].split(chr(10))[0].capitalize()}\n\n"
    text += row("key", "type", "default", "allowed", "") + "|---|---|---|---|---|\n"
    for field in attrs.fields(cls):
        key = f"{name}.{field.name}"
        may_be = "any option of the method" if key == "method.options" else may(field, key)
        kind = "`str`, table" if key in CHOICES else f"`{field.type}`"
        default = "" if field.default == {} else f"`{toml(field.default)}`"
        text += row(NAMES.get(key, f"`{field.name}`"), kind, default, may_be, notes[field.name])
    return text


def may(field, key):
    """Return what a key may be."""
    return allowed(lambda value: field.converter(CHOICES.get(key, value)))


def options(kind, registries):
    """Return the options of one kind of plugin, those that have none apart."""
    registry = registries.of(kind)
    text, without = f"\n## {OPTIONS[kind]}\n{PROMISES if kind == 'policy' else ''}", []
    for name in registry.names():
        plugin = registry.get(name)
        fields, cls, build = made_from(plugin)
        if not fields:
            without.append(f"`{name}`")
            continue
        text += f"\n### `{name}`\n\n{inspect.cleandoc(cls.__doc__)}\n\n"
        text += row("option", "type", "default", "allowed") + "|---|---|---|---|\n"
        for field in fields:
            default = "" if field.default in (attrs.NOTHING, "", None) else f"`{toml(field.default)}`"
            text += row(f"`{field.alias}`", f"`{field.type}`", default, refusal(build, field))
    return text + (f"\nWithout options: {', '.join(without)}.\n" if without else "")


def made_from(plugin):
    """Return a plugin's option fields, the class that says what they mean, and how it is built from a table of them."""
    if hasattr(plugin, "options"):
        cls = plugin.options
        return attrs.fields(cls), cls, lambda given: parse_options(cls, given, "x")
    fields = [field for field in attrs.fields(type(plugin)) if field.init and field.name != "name"]
    return fields, type(plugin), lambda given: evolved(plugin, given, "x")


def refusal(build, field):
    """Return what an option may be: of a refusal, what follows the value that was got."""
    text = allowed(lambda value: build({field.alias: value}))
    text = text.partition("; ")[2] or text.partition(" must be ")[2] or text
    text = re.sub(r",? (is|are) allowed$", "", text.partition(" (got")[0])
    return re.sub(r"^in \((.*)\)$", r"\1", text)


def page():
    """Return docs/config.md."""
    parts = [section(field.name, field.default.factory) for field in attrs.fields(EngineConfig)]
    registries = manager.build(disable=["oarlock"], plugins=built_in()).registries
    return HEAD + "".join(parts) + "".join(options(kind, registries) for kind in OPTIONS)


def built_in():
    """Return our own plugins, and nobody else's that happen to be installed."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["oarlock"]
    return [importlib.import_module(target) for target in entries.values()]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
