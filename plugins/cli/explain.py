"""``oarlock explain``: what a model was bound to, and why. The reasons are bind's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from oarlock.plugins.cli.console import print_json
from oarlock.plugins.cli.options import engine_config, engine_options, open_engine

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

TOKENS = 1024
_LAYER = "layer "


@click.command(
    short_help="Show what a model is bound to, and why.",
    epilog="Example: oarlock explain smollm2 --set layouts.layers.0-3=full",
)
@click.argument("model", type=click.Path())
@engine_options
@click.option("--verify", is_flag=True, help="Run the bind probe even where the config turns it off, and show it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; layers are not grouped in it.")
def explain(model: str, verify: bool, as_json: bool, **given: Any) -> None:
    """Show layer by layer what MODEL is bound to, with the reason of each choice.

    With --verify rows of different length are run batched and alone through the composed layouts, and a composition
    that gives other tokens ends with the first layer whose state differs.
    """
    if verify:
        given["settings"] += ("scheduler.verify=true",)
    with open_engine(model, engine_config(**given)) as engine:
        bound = engine.bound
        lines, facts = bound.explain(), _facts(bound)
    if as_json:
        print_json({"model": model, **facts, "parts": lines})
    else:
        _show(lines, facts)


def _facts(bound: BoundModel) -> dict[str, Any]:
    return {
        "model_type": bound.model_type,
        "vocabulary": bound.vocabulary,
        "positions": bound.positions,
        "probe": "passed" if bound.config.scheduler.verify else "off (scheduler.verify)",
        f"cache_bytes_at_{TOKENS}_tokens": bound.bytes_at(TOKENS),
    }


def grouped(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the lines with runs of equal layers as one: "layers 0-29"."""
    runs: list[list[dict[str, str]]] = []
    for line in lines:
        rest = {key: value for key, value in line.items() if key != "part"}
        previous = {key: value for key, value in runs[-1][0].items() if key != "part"} if runs else None
        if rest == previous and line["part"].startswith(_LAYER) and runs[-1][0]["part"].startswith(_LAYER):
            runs[-1].append(line)
        else:
            runs.append([line])
    return [{**run[0], "part": _span(run)} for run in runs]


def _span(run: list[dict[str, str]]) -> str:
    first, last = (line["part"].removeprefix(_LAYER) for line in (run[0], run[-1]))
    return run[0]["part"] if len(run) == 1 else f"layers {first}-{last}"


def _show(lines: list[dict[str, str]], facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False)
    columns = ("part", "kind", "choice", "detail", "reason")
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in grouped(lines):
        table.add_row(*(Text(line[column]) for column in columns))
    console.print(table)
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else "not stated" if value is None else value
        console.print(f"{name.replace('_', ' ')}: {shown}", markup=False, highlight=False, soft_wrap=True)
