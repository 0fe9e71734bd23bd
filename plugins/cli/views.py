"""How answers look: pieces as they come, blocks as they end, live panels on a terminal, or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import click

from oarlock.core.result import Result
from oarlock.plugins.cli.console import harmless, note, print_json
from oarlock.plugins.cli.failures import described
from oarlock.plugins.cli.records import error_fields, result_fields

if TYPE_CHECKING:
    from rich.console import Group

TITLE = 70  # characters of a prompt that are shown above its answer


class Asked(Protocol):
    """A prompt as the views see it."""

    number: int
    text: str


class View:
    """Shows what happens. Text pieces are printed as they are: they never have to be taken back."""

    def piece(self, prompt: Asked, text: str) -> None:
        """Called for each piece of text."""

    def finished(self, prompt: Asked, outcome: Result | BaseException) -> None:
        """Called once a prompt, at its end."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *error: object) -> None:
        """Put the terminal in order, also after an error."""


def choose_view(asked: Sequence[Asked], as_json: bool) -> View:
    """Return the view that fits the number of prompts and where stdout goes."""
    if as_json:
        return JsonView()
    if len(asked) == 1:
        return StreamView()
    from rich.console import Console

    return LiveView(asked) if Console().is_terminal else BlockView()


class JsonView(View):
    """One object a line, as prompts end."""

    def finished(self, prompt: Asked, outcome: Result | BaseException) -> None:
        fields = result_fields(outcome) if isinstance(outcome, Result) else error_fields(outcome)
        print_json({"id": str(prompt.number), "prompt": prompt.text, **fields})


class StreamView(View):
    """A lone answer, piece by piece."""

    _open = False

    def piece(self, prompt: Asked, text: str) -> None:
        if text:
            self._open = True
            click.echo(harmless(text) if sys.stdout.isatty() else text, nl=False)

    def finished(self, prompt: Asked, outcome: Result | BaseException) -> None:
        if self._open or isinstance(outcome, Result):
            click.echo()
        self._open = False
        if isinstance(outcome, Result):
            show_logprobs(outcome)
        else:
            note(f"Error: {described(outcome)}")

    def __exit__(self, *error: object) -> None:
        if self._open:
            click.echo()


class BlockView(View):
    """Several answers, each printed whole when it is there."""

    def finished(self, prompt: Asked, outcome: Result | BaseException) -> None:
        if isinstance(outcome, Result):
            click.echo(f"[{prompt.number}] {title(prompt)}\n{outcome.text}\n")
            show_logprobs(outcome)
        else:
            note(f"Error: prompt {prompt.number}: {described(outcome)}")


class LiveView(View):
    """Several answers that grow side by side on a terminal."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        from rich.live import Live

        self._asked = asked
        self._texts = {prompt.number: "" for prompt in asked}
        self._ends: dict[int, Result | BaseException] = {}
        self._live = Live(refresh_per_second=8, get_renderable=self._picture)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        for outcome in self._ends.values():
            show_logprobs(outcome)

    def piece(self, prompt: Asked, text: str) -> None:
        self._texts[prompt.number] += text

    def finished(self, prompt: Asked, outcome: Result | BaseException) -> None:
        self._ends[prompt.number] = outcome

    def _picture(self) -> Group:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        panels = []
        for prompt in self._asked:
            end = self._ends.get(prompt.number)
            failed = isinstance(end, BaseException)
            text = self._texts[prompt.number] + (f"\n{described(end)}" if isinstance(end, BaseException) else "")
            style = "red" if failed else "yellow" if end is None else "green"
            name = Text(f"[{prompt.number}] {title(prompt)}")
            panels.append(Panel(Text(harmless(text)), title=name, title_align="left", border_style=style))
        return Group(*panels)


def title(prompt: Asked) -> str:
    """Return the beginning of a prompt in one line."""
    text = harmless(" ".join(prompt.text.split()))
    return text if len(text) <= TITLE else f"{text[: TITLE - 3]}..."


def show_logprobs(outcome: Any) -> None:
    """Print one line a token, where log-probabilities were asked for."""
    for item in getattr(outcome, "logprobs", None) or ():
        top = ", ".join(f"{token} {logprob:.4f}" for token, logprob in item.top)
        click.echo(f"  token {item.token}  {item.logprob:.4f}" + (f"  best: {top}" if top else ""))
