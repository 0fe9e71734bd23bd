"""``oarlock batch``: a file of requests to a file of answers. How lines are read and written is said elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import attrs
import click

from oarlock.core.errors import InvalidParameter
from oarlock.core.request import Request
from oarlock.core.result import Result
from oarlock.plugins.cli import inputs
from oarlock.plugins.cli.answers import STDOUT, Answers, check_paths
from oarlock.plugins.cli.console import note, print_json, stderr
from oarlock.plugins.cli.drive import drive
from oarlock.plugins.cli.failures import Failure
from oarlock.plugins.cli.options import (
    engine_config,
    engine_options,
    followed,
    open_engine,
    ranks_option,
    request_fields,
    sampling_options,
)
from oarlock.plugins.cli.records import error_fields, result_fields

if TYPE_CHECKING:
    from rich.progress import Progress

    from oarlock.core.config import EngineConfig
    from oarlock.core.engine import Engine

_PATH = click.Path()


_checkpoint_interval = click.option(
    "--checkpoint-interval",
    type=click.IntRange(min=1),
    default=64,
    metavar="N",
    help="Tokens of an answer between two checkpoints.  [default: 64]",
)


@click.command(
    short_help="Answer a file of requests.",
    epilog="Example: oarlock batch questions.jsonl -o answers.jsonl --max-tokens 64, then again with --resume",
)
@click.argument("source", type=_PATH, metavar="IN.jsonl")
@click.option(
    "-o", "--output", type=_PATH, required=True, metavar="OUT.jsonl", help="One JSON object a line; - is stdout."
)
@click.option("--model", type=_PATH, metavar="MODEL", default="smollm2", show_default=True, help="As in generate.")
@click.option("--resume", is_flag=True, help="Go on with OUT.jsonl: skip the ids that it answers, redo its errors.")
@click.option("--overwrite", is_flag=True, help="Drop the answers that stand in OUT.jsonl.")
@click.option(
    "--checkpoint", type=_PATH, metavar="DIR", help="Store there how far answers are; the same command goes on from it."
)
@_checkpoint_interval
@sampling_options
@engine_options
@ranks_option
@click.option("--json", "as_json", is_flag=True, help="Print the closing counts as a JSON object.")
def batch(
    source: str,
    output: str,
    model: str,
    resume: bool,
    overwrite: bool,
    checkpoint: str | None,
    checkpoint_interval: int,
    as_json: bool,
    ranks: bool,
    **given: Any,
) -> None:
    """Answer a file of requests: one JSON object a line with "id", "prompt" or "messages" or "prompt_ids".

    A line may have any other field of a request; the options are for lines that do not. Answers are written as they
    come, in any order. A bad line becomes a record with "error" and its "line", the others go on, and the exit code
    is 1. IN.jsonl may be - for standard input. What --checkpoint stored survives whatever ends the process.
    """
    resume = resume or (checkpoint is not None and not overwrite)
    _check_options(source, output, resume=resume, overwrite=overwrite, as_json=as_json)
    defaults = request_fields(given)
    Request.from_mapping({"prompt": "x", **defaults})  # what is wrong is said before a model is loaded
    config = engine_config(**given)
    if checkpoint is not None:
        config = _with_checkpoints(config, checkpoint)
        defaults["checkpoint_interval"] = checkpoint_interval
    group = followed(model, config, ranks)
    with contextlib.ExitStack() as opened:
        lines = opened.enter_context(_open(source))
        answers = opened.enter_context(Answers(output, resume=resume, overwrite=overwrite))
        engine = opened.enter_context(open_engine(model, config, group))
        progress = opened.enter_context(_progress())
        answers.begin()
        run = Run(answers=answers, defaults=defaults, progress=progress, total=_count(source, progress))
        run.drive(engine, lines, resumable=output != STDOUT)
    _report(run.counts(), as_json)
    if run.failed:
        raise click.exceptions.Exit(1)


@attrs.define(eq=False, kw_only=True)
class Run:
    """One pass over the input. In memory are the requests in flight, and the ids."""

    answers: Answers
    defaults: dict[str, Any]
    progress: Progress
    total: int | None
    answered: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    start: float = attrs.field(factory=time.perf_counter)

    def drive(self, engine: Engine, lines: IO[bytes], *, resumable: bool) -> None:
        """Answer every line, or say on stderr how far it came."""
        task = self.progress.add_task("answers", total=self.total, speed="")

        def finished(line: inputs.Line, outcome: Result | BaseException) -> None:
            if isinstance(outcome, Result):
                self.answered += 1
                self.tokens += outcome.usage.generated_tokens
                self.answers.write({"id": line.id, **result_fields(outcome)})
            else:
                self._refuse(line, outcome)
            done = self.answered + self.failed + self.skipped
            self.progress.update(task, completed=done, speed=f"{self.tokens / self.seconds:.1f} tokens/s")

        try:
            drive(engine, self._good(lines), finished)
        except BaseException:
            if resumable:
                note(f"{self.answered} answered before this stopped; --resume goes on from there")
            raise

    def _good(self, lines: IO[bytes]) -> Iterator[inputs.Line]:
        """Yield the lines to run; the others are settled here."""
        seen: set[str] = set()
        for line in inputs.read(lines, self.defaults):
            if line.name in seen:
                self._refuse(line, InvalidParameter("id", line.id, "each id once; an earlier line has it"))
                continue
            seen.add(line.name)
            if isinstance(line, inputs.BadLine):
                self._refuse(line, line.error)
            elif line.name in self.answers.answered:
                self.skipped += 1
            else:
                yield line

    def _refuse(self, line: inputs.Line | inputs.BadLine, error: BaseException) -> None:
        self.failed += 1
        self.answers.write({"id": line.id, "line": line.number, **error_fields(error)})

    @property
    def seconds(self) -> float:
        """Seconds since the model was loaded."""
        return time.perf_counter() - self.start

    def counts(self) -> dict[str, Any]:
        """Return what came of it."""
        return {
            "answered": self.answered,
            "errors": self.failed,
            "skipped": self.skipped,
            "generated_tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
        }


def _check_options(source: str, output: str, *, resume: bool, overwrite: bool, as_json: bool) -> None:
    if resume and (overwrite or output == STDOUT):
        msg = "--resume and --checkpoint do not go with -o -, nor --resume with --overwrite"
        raise click.UsageError(msg)
    if as_json and output == STDOUT:
        msg = "--json and -o - would both print on standard output"
        raise click.UsageError(msg)
    check_paths(source, output)


def _with_checkpoints(config: EngineConfig, directory: str) -> EngineConfig:
    """Return ``config`` with checkpoints, and nothing but checkpoints, in ``directory``."""
    own = {} if config.state_cache.name != "none" else {"name": "memory", "prefix_bytes": 0}
    return config.updated({"state_cache": {**own, "checkpoints": directory}})


def _open(source: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    if source == STDOUT:
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return Path(source).open("rb")
    except OSError as error:
        msg = f"cannot read {source}: {error.strerror}"
        raise Failure(msg) from error


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[speed]}"))
    return Progress(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal)


def _count(source: str, progress: Progress) -> int | None:
    """Return the number of lines for the bar; None where nobody sees it, or it cannot be known."""
    if progress.disable or source == STDOUT or not Path(source).is_file():
        return None
    with Path(source).open("rb") as file:
        return sum(bool(line.strip()) for line in file)


def _report(counts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(counts)
    else:
        note(", ".join(f"{value} {key.replace('_', ' ')}" for key, value in counts.items()))
