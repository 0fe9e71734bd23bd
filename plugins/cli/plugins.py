"""``oarlock plugins``: what is installed, and on demand what works. It repairs and removes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from oarlock.core import manager
from oarlock.plugins.cli.blocking import blocked, disable_option
from oarlock.plugins.cli.console import busy, print_json

COLOURS = {"active": "green", "broken": "red", "blocked": "yellow", "off": "dim"}


@click.command(
    short_help="List the installed plugins.",
    epilog="Example: oarlock plugins --check, and to run without one of them: OARLOCK_PLUGINS=name oarlock ...",
)
@click.option("--check", is_flag=True, help="Import each plugin in a child process; say what it registers.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@disable_option
def plugins(check: bool, as_json: bool) -> None:
    """List the installed plugins: name, distribution, version, blocked or not.

    Without --check nothing is imported. A broken plugin is shown with its reason; the exit code stays 0.
    """
    if check:
        with busy("importing each plugin in a process of its own"):
            infos = manager.check_plugins(blocked())
    else:
        infos = manager.list_plugins(blocked())
    if as_json:
        print_json([info.as_dict() for info in infos])
    else:
        show(infos, check=check)


def show(infos: Sequence[Any], *, check: bool) -> None:
    """Print the table, and below it why plugins are not active."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False)
    for title in ("plugin", "distribution", "version", "state", *(("API", "registers") if check else ())):
        table.add_column(title, overflow="fold")
    for info in infos:
        registered = "; ".join(f"{kind} {', '.join(names)}" for kind, names in info.registered.items())
        more = (str(info.api or ""), registered) if check else ()
        cells = (info.name, info.distribution, info.version, info.state, *more)
        table.add_row(*(Text(cell, style=COLOURS.get(info.state, "")) for cell in cells))
    console.print(table)
    for info in infos:
        if info.state == "broken":
            console.print(f"{info.owner} is broken: {info.reason}", markup=False, soft_wrap=True)
