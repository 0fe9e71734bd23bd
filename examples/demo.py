"""Eight chat prompts through SmolLM2-135M-Instruct, at most four rows at a time: watch rows join and leave.

Run it with ``make demo``. On a terminal the answers grow side by side; elsewhere one line tells each event.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from oarlock.core import OarlockError, Request
from oarlock.core.engine import Engine

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Name three rivers in Europe.",
    "Write a short poem about the sea.",
    "What is 7 times 8?",
    "Give me one tip for sleeping better.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
)
MAX_BATCH = 4
MAX_TOKENS = 64
CHART = 48  # characters of the picture at the end


@dataclass(eq=False)
class Line:
    """One request as the demo shows it. Times are seconds since the first submit."""

    name: str
    question: str
    clock: float
    joined: float | None = None
    first: float | None = None
    left: float | None = None
    tokens: int = 0
    answer: str = ""

    def join(self) -> None:
        self.joined = time.perf_counter() - self.clock

    @property
    def state(self) -> str:
        if self.joined is None:
            return "waits"
        if self.first is None:
            return "reads"
        return "writes" if self.left is None else "done"

    def chart(self, total: float) -> str:
        """Draw the request's life: waiting, reading the prompt, writing."""
        marks = [(self.joined, "·"), (self.first, "░"), (self.left, "█")]
        drawn = ""
        for until, mark in marks:
            drawn += mark * (round(CHART * (until or total) / total) - len(drawn))
        return drawn.ljust(CHART)


def shorten(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def inside(lines: list[Line]) -> str:
    return f"{sum(line.state in {'reads', 'writes'} for line in lines)} of {MAX_BATCH}"


def picture(lines: list[Line], width: int) -> Group:
    """The live view: a table with the tail of each answer."""
    table = Table(expand=True)
    for title, size in (("", 2), ("question", 30), ("", 6), ("tokens", 6)):
        table.add_column(title, width=size, no_wrap=True)
    table.add_column("answer", ratio=1, no_wrap=True)
    tail = max(10, width - 60)  # the other columns and the borders
    colour = {"waits": "dim", "reads": "yellow", "writes": "green", "done": ""}
    for line in lines:
        cells = (line.name, line.question, line.state, str(line.tokens), " ".join(line.answer.split())[-tail:])
        table.add_row(*(Text(cell, style=colour[line.state]) for cell in cells))
    return Group(table, Text(f"rows in the batch: {inside(lines)}"))


def follow(engine: Engine, lines: list[Line], requests: list[Request], console: Console) -> None:
    """Stream all requests and keep the lines up to date."""
    by_name = {line.name: line for line in lines}
    live = Live(console=console, refresh_per_second=8, get_renderable=lambda: picture(lines, console.width))
    told: set[str] = set()
    with live if console.is_terminal else nullcontext():
        for event in engine.stream(requests):
            line, now = by_name[event.request_id], time.perf_counter() - by_name[event.request_id].clock
            line.first = line.first or now
            line.answer += event.text
            line.tokens += event.token is not None
            if event.finish_reason is not None:
                line.left = now
            if console.is_terminal:
                continue
            if line.name not in told:
                told.add(line.name)
                console.print(f"{now:5.1f} s  {inside(lines)}  {line.name} joined: {line.question}", markup=False)
            if line.left is not None:
                text = f"{now:5.1f} s  {inside(lines)}  {line.name} leaves: {shorten(line.answer, 150)}"
                console.print(text, markup=False, soft_wrap=True)


def main() -> None:
    console = Console(highlight=False)
    console.print("Loading SmolLM2-135M-Instruct ...")
    with Engine.load("smollm2", config={"scheduler": {"max_batch": MAX_BATCH}}) as engine:
        start = time.perf_counter()
        lines = [Line(str(number), question, start) for number, question in enumerate(QUESTIONS, 1)]
        requests = [
            Request(
                id=line.name,
                messages=[{"role": "user", "content": line.question}],
                max_tokens=MAX_TOKENS,
                on_admitted=line.join,
            )
            for line in lines
        ]
        follow(engine, lines, requests, console)
        total = time.perf_counter() - start
    console.print(f"\n{total:.1f} s from left to right: · waits  ░ reads its prompt  █ writes")
    for line in lines:
        console.print(
            f"{line.name} {shorten(line.question, 28):28} |{line.chart(total)}|", markup=False, soft_wrap=True
        )
    tokens = sum(line.tokens for line in lines)
    wait = mean(line.first or total for line in lines)
    console.print(
        f"{len(lines)} requests, {tokens} tokens, {tokens / total:.1f} tokens per second, "
        f"mean time to first token {wait * 1000:.0f} ms",
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        main()
    except OarlockError as error:
        sys.exit(str(error))
