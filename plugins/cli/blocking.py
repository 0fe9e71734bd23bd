"""Which plugins the command line blocks: ``OARLOCK_PLUGINS`` and ``--disable-plugin``. The config has its own list."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from oarlock.plugins.cli.completion import installed

ENVIRONMENT = "OARLOCK_PLUGINS"
_KEY = "oarlock.disabled"


def _remember(context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> None:
    context.meta.setdefault(_KEY, []).extend(names)


def disable_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--disable-plugin``."""
    return click.option(
        "--disable-plugin",
        multiple=True,
        metavar="NAME",
        is_eager=True,  # before --help, which lists commands of plugins
        expose_value=False,
        callback=_remember,
        shell_complete=installed,
        help=f"Do not load a plugin or distribution (repeatable; {ENVIRONMENT}=a,b does the same).",
    )(command)


def blocked(context: click.Context | None = None) -> tuple[str, ...]:
    """Return the names that the environment and the flags of this run block; ``context`` where none is current."""
    named = [name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",")]
    context = context or click.get_current_context()
    return tuple(name for name in (*named, *context.meta.get(_KEY, ())) if name)
