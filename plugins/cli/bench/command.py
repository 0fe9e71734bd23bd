"""``oarlock bench``: a user's model on a user's machine, by the harness that our own numbers come from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

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
UNITS = ("tokens a second", "ms a step", "ms stalled")


def _counts(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        msg = f"{text!r}; whole numbers >= 1 with commas between them are allowed, such as 1,4,16"
        raise click.BadParameter(msg)
    return counts


def _workload(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give the command the options that say what is measured."""
    options = (
        click.option("--rows", default="1,4,16", callback=_counts, show_default=True, help="Rows that run together."),
        click.option("--against", type=click.Choice(["mlx-lm"]), help="Let its batch generator do the same, in turns."),
        click.option(
            "--rounds",
            type=click.IntRange(min=LEAST_ROUNDS),
            default=7,
            show_default=True,
            help="Blocks of each side, of which quartiles are taken.",
        ),
        click.option(
            "--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each prompt."
        ),
        click.option(
            "--joiner",
            type=click.IntRange(min=0),
            default=256,
            show_default=True,
            help="Tokens of a prompt that joins while rows run, for which they wait; 0: none joins.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    short_help="Measure a model on this machine.", epilog="Example: oarlock bench smollm2 --rows 1,4 --against mlx-lm"
)
@click.argument("model", type=click.Path())
@_workload
@engine_options
@click.option("--trace", is_flag=True, help="Show where the time of a step goes while prompts arrive beside rows.")
@click.option("--plot", type=click.File("w", "utf-8", lazy=False), help="Draw throughput and stall by rows: FILE.svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(model: str, rows: tuple[int, ...], trace: bool, plot: TextIO | None, as_json: bool, **given: Any) -> None:
    """Decode MODEL greedily on this machine and say how fast it is: medians of short blocks, with their quartiles.

    With --against both sides do a block in every round and the order turns, so that whatever else the machine does falls on
    both; a ratio is taken pair by pair. Two sides that give different tokens are an error, and exit code 1, unless the
    configuration names layouts, which may round what they store.
    """
    config = engine_config(**given)
    most = max(rows) + 1  # with the joiner
    limits = {"max_batch": config.scheduler.max_batch, "max_queued": config.scheduler.max_queued}
    config = config.updated({"scheduler": {name: max(most, value) for name, value in limits.items()}})
    with open_engine(model, config) as engine:
        facts, start = _machine(), time.perf_counter()
        reports, failures = _measured(engine, rows, **given)
        traced = _traced(engine, config, max(rows), given["prompt_tokens"]) if trace else None
    facts["seconds"] = round(time.perf_counter() - start, 1)
    if as_json:
        found = {"model": model, "machine": facts, "reports": [r.plain() for r in reports], "errors": failures}
        print_json(found | ({"trace": attrs.asdict(traced)} if traced else {}))
    else:
        _show(facts, reports, traced)
    if plot is not None:
        from oarlock.plugins.cli.bench.plot import drawn

        plot.write(drawn(model, reports))
    for failure in failures:
        note(f"error: tokens differ from mlx-lm's with {failure}")
    if failures:
        raise click.exceptions.Exit(1)


def _machine() -> dict[str, Any]:
    from oarlock.plugins.cli.bench.pairs import machine

    return machine()


def _measured(
    engine: Engine,
    rows: tuple[int, ...],
    *,
    rounds: int,
    prompt_tokens: int,
    joiner: int,
    against: str | None,
    **_: Any,
) -> tuple[list[Report], list[str]]:
    """Return a report for each number of rows, and what is wrong with those whose tokens differ."""
    from oarlock.plugins.cli.bench.decode import decode
    from oarlock.plugins.cli.bench.pairs import UnequalTokens

    reports, failures = [], []
    for count in rows:
        lengths = [prompt_tokens] * count
        with busy(f"{count} rows, {rounds} rounds"):
            try:
                reports.append(decode(engine, lengths, rounds, joiner=joiner, against=against is not None))
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
    text = ", ".join(f"{key} {value}" for key, value in facts.items())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    units = [unit for unit in UNITS if any(f"oarlock: {unit}" in report.figures for report in reports)]
    table = Table(box=None, pad_edge=False)
    for column in ("rows", "", *units):
        table.add_column(column)
    for report in reports:
        for place, side in enumerate(dict.fromkeys(name.partition(":")[0] for name in report.figures)):
            cells = [
                "" if place else report.facts["rows"],
                side,
                *(report.figures[f"{side}: {unit}"] for unit in units),
            ]
            table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)
    for report in reports:
        ratios = [f"{each.what} {each.ratio}" for each in report.comparisons]
        text = ", ".join([*ratios, f"tokens {report.facts['hash']}"])
        console.print(f"{report.facts['rows']} rows: {text}", markup=False, highlight=False, soft_wrap=True)
    if traced is not None:
        console.print("", *lines(traced), sep="\n", markup=False, highlight=False)
