"""``oarlock doctor``: what a run on this machine stands on, and what to do where that is shaky. It changes nothing."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import attrs
import click

from oarlock.core import manager
from oarlock.plugins.cli import machine
from oarlock.plugins.cli.blocking import blocked, disable_option
from oarlock.plugins.cli.console import busy, print_json
from oarlock.plugins.cli.failures import require_mlx
from oarlock.plugins.cli.versions import versions

MANY = 8.0
"""Sixteen rows that cost this many times one row gain little from batching."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at. ``advice`` says what to do; "" where all is well."""

    name: str
    value: Any
    detail: str = ""
    advice: str = ""


@click.command(
    short_help="Look at this machine and its plugins.", epilog="Example: oarlock doctor --json | python -m json.tool"
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@disable_option
def doctor(as_json: bool) -> None:
    """Look at this machine: device, MLX, the BLAS behind it, what 16 rows cost beside one, and every plugin.

    It needs no model. Findings do not change the exit code; a missing MLX backend does.
    """
    require_mlx()
    with busy("timing products, and importing each plugin in a process of its own"):
        infos = manager.check_plugins(blocked())
        findings = [*_installed(), *_computing(), *_plugins(infos)]
    if as_json:
        advice = [finding.advice for finding in findings if finding.advice]
        plugins = [info.as_dict() for info in infos]
        print_json({"checks": [attrs.asdict(f) for f in findings], "advice": advice, "plugins": plugins})
    else:
        _show(findings)


def _installed() -> list[Finding]:
    found = [
        Finding(name="oarlock", value=importlib.metadata.version("oarlock")),
        Finding(name="python", value=platform.python_version(), detail=f"{platform.system()} {platform.machine()}"),
    ]
    for version in versions():
        name, cure = version.distribution, f"pip install '{version.distribution}{version.tested}'"
        advice = "" if version.in_range else f"{name} {version.installed or '(missing)'} is untested: {cure}"
        found.append(Finding(name=name, value=version.installed, detail=f"tested: {version.tested}", advice=advice))
    return found


def _computing() -> list[Finding]:
    milliseconds, ratio = machine.rows_ratio()
    library = machine.blas_library()  # after the products, which need it
    found = [Finding(name="device", value=machine.device())]
    slow = False
    if machine.on_linux_cpu():
        family = "unknown" if library is None else machine.family(library)
        slow = family == machine.REFERENCE
        advice = f"MLX calls {family}, with which batching gains nothing: {machine.preload_advice()}" if slow else ""
        found.append(Finding(name="blas", value=family, detail=library or "", advice=advice))
    elif sys.platform == "darwin":
        found.append(Finding(name="blas", value="Accelerate"))
    many = f"16 rows cost {ratio:.1f} times one: batching gains little here" if ratio > MANY and not slow else ""
    found.append(
        Finding(
            name="rows",
            value=round(ratio, 2),
            detail=f"16 rows beside 1; they take {milliseconds:.1f} ms",
            advice=f"{many}; run it again on an idle machine" if many else "",
        )
    )
    return found


def _plugins(infos: list[Any]) -> list[Finding]:
    """Return a summary, then one finding for each plugin that does not work."""
    counts = {state: sum(info.state == state for info in infos) for state in ("active", "off", "blocked", "broken")}
    shown = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    found = [Finding(name="plugins", value=shown or "none")]
    for info in infos:
        if info.state == "broken":
            cure = f"mend or uninstall {info.distribution}, or block it: OARLOCK_PLUGINS={info.name}"
            advice = f"{info.owner} is broken: {info.reason}; {cure}"
            found.append(Finding(name=f"plugin {info.name}", value=info.state, detail=info.owner, advice=advice))
        elif info.state == "blocked":
            found.append(Finding(name=f"plugin {info.name}", value=info.state, detail=info.owner))
    return found


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        style = "yellow" if finding.advice else "green"
        table.add_row(*(Text(str(cell), style=style) for cell in (finding.name, finding.value)), Text(finding.detail))
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(f"-> {finding.advice}", markup=False, highlight=False, soft_wrap=True)
