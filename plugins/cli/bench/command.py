"""``oarlock bench``: a user's model on a user's machine, by the harness that our own numbers come from."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import attrs
import click

from oarlock.plugins.cli.console import busy, note, print_json
from oarlock.plugins.cli.options import engine_config, engine_options, open_engine

if TYPE_CHECKING:
    from oarlock.core.config import EngineConfig
    from oarlock.core.engine import Engine
    from oarlock.core.observe import StepReport
    from oarlock.plugins.cli.bench.pairs import Report

LEAST_ROUNDS = 5
ANSWER = 24
"""Tokens of each answer under ``--trace``."""
UNITS = ("tokens a second", "ms a step")


def _counts(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        msg = f"{text!r}; whole numbers >= 1 with commas between them are allowed, such as 1,4,16"
        raise click.BadParameter(msg)
    return counts


@click.command(
    short_help="Measure a model on this machine.", epilog="Example: oarlock bench smollm2 --rows 1,4 --against mlx-lm"
)
@click.argument("model")
@click.option("--rows", default="1,4,16", callback=_counts, show_default=True, help="Rows that decode together.")
@click.option("--against", type=click.Choice(["mlx-lm"]), help="Let its batch generator do the same, in turns.")
@click.option(
    "--rounds",
    type=click.IntRange(min=LEAST_ROUNDS),
    default=7,
    show_default=True,
    help="Blocks of each side, of which quartiles are taken.",
)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each prompt."
)
@click.option("--trace", is_flag=True, help="Show where the time of a step goes while prompts arrive beside rows.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    model: str,
    rows: tuple[int, ...],
    against: str | None,
    rounds: int,
    prompt_tokens: int,
    trace: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Decode MODEL greedily on this machine and say how fast it is: medians of short blocks, with their quartiles.

    With --against both sides do a block in every round and the order turns, so that whatever else the machine does falls on
    both; a ratio is taken pair by pair. Two sides that give different tokens are an error, and exit code 1, unless the
    configuration names layouts, which may round what they store.
    """
    config = engine_config(**given)
    most = {"max_batch": max(*rows, config.scheduler.max_batch), "max_queued": max(*rows, config.scheduler.max_queued)}
    config = config.updated({"scheduler": most})
    with open_engine(model, config) as engine:
        facts, start = _machine(), time.perf_counter()
        reports, failures = _measured(engine, rows, rounds, prompt_tokens, against=against is not None)
        traced = _traced(engine, config, max(rows), prompt_tokens) if trace else None
    facts["seconds"] = round(time.perf_counter() - start, 1)
    if as_json:
        found = {"model": model, "machine": facts, "reports": [r.plain() for r in reports], "errors": failures}
        print_json(found | ({"trace": attrs.asdict(traced)} if traced else {}))
    else:
        _show(facts, reports, traced)
    for failure in failures:
        note(f"error: tokens differ from mlx-lm's with {failure}")
    if failures:
        raise click.exceptions.Exit(1)


def _machine() -> dict[str, Any]:
    from oarlock.plugins.cli.bench.pairs import machine

    return machine()


def _measured(
    engine: Engine, rows: tuple[int, ...], rounds: int, prompt_tokens: int, *, against: bool
) -> tuple[list[Report], list[str]]:
    """Return a report for each number of rows, and what is wrong with those whose tokens differ."""
    from oarlock.plugins.cli.bench.decode import decode
    from oarlock.plugins.cli.bench.pairs import UnequalTokens

    reports, failures = [], []
    for count in rows:
        with busy(f"{count} rows, {rounds} rounds"):
            try:
                reports.append(decode(engine, [prompt_tokens] * count, rounds, against=against))
            except UnequalTokens as error:
                failures.append(f"{count} rows: {error}")
    return reports, failures


def _traced(engine: Engine, config: EngineConfig, rows: int, longest: int) -> StepReport:
    """Run a mixed load twice on an engine of its own, and report the second time."""
    from oarlock.core.engine import Engine
    from oarlock.core.observe import StepTrace
    from oarlock.plugins.cli.bench.prompts import prompts
    from oarlock.plugins.cli.bench.trace import load, uneven

    trace, bound = StepTrace(), engine.bound
    asked = prompts(engine.tokenizer, bound.vocabulary, uneven(2 * rows + 4, longest))
    with (
        busy("tracing steps"),
        Engine(bound.model, engine.tokenizer, config=config, plugins=[trace], positions=bound.positions) as observed,
    ):
        load(observed, asked, ANSWER)
        trace.report()
        load(observed, asked, ANSWER)
    return trace.report()


def _show(facts: dict[str, Any], reports: list[Report], traced: StepReport | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from oarlock.plugins.cli.bench.trace import lines

    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("rows", "", *UNITS, *(["times mlx-lm"] if any(r.comparisons for r in reports) else [])):
        table.add_column(column)
    for report in reports:
        for place, side in enumerate(dict.fromkeys(name.partition(":")[0] for name in report.figures)):
            first = "" if place else report.facts["rows"]
            ratios = [] if place else [each.ratio for each in report.comparisons]
            cells = [first, side, *(report.figures[f"{side}: {unit}"] for unit in UNITS), *ratios]
            table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)
    for report in reports:
        console.print(f"tokens of {report.facts['rows']} rows: {report.facts['hash']}", markup=False, highlight=False)
    if traced is not None:
        console.print("", *lines(traced), sep="\n", markup=False, highlight=False)
