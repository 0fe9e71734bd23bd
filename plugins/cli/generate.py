"""``oarlock generate``: prompts on the command line, answers as they come. How they look is in `views`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import attrs
import click

from oarlock.core.errors import NoChatTemplate
from oarlock.core.request import Request
from oarlock.core.result import Result, TokenEvent
from oarlock.plugins.cli.console import note, print_json
from oarlock.plugins.cli.drive import drive
from oarlock.plugins.cli.options import (
    engine_config,
    engine_options,
    followed,
    open_engine,
    ranks_option,
    request_fields,
    sampling_options,
)
from oarlock.plugins.cli.views import View, choose_view

if TYPE_CHECKING:
    from oarlock.core.engine import Engine


@attrs.define(eq=False, kw_only=True)
class Prompt:
    """One prompt, its request and what became of it. Times are seconds since the first submit."""

    number: int
    text: str
    request: Request
    first: float | None = None
    outcome: Result | BaseException | None = None


@click.command(
    short_help="Answer one or more prompts.",
    epilog="Example: oarlock generate smollm2 'Name three rivers.' 'What is 7 times 8?' --max-tokens 40",
)
@click.argument("model", type=click.Path())
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@click.option("--chat/--raw", default=None, help="Prompts as chat turns (where there is a template), or as they are.")
@click.option("--system", help="System message of every chat.")
@sampling_options
@engine_options
@ranks_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each answer.")
@click.option("--stats", is_flag=True, help="Say at the end what it took.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    chat: bool | None,
    system: str | None,
    as_json: bool,
    stats: bool,
    ranks: bool,
    **given: Any,
) -> None:
    """Answer one or more prompts; several run together. MODEL: a directory, a GGUF file, a hub name, or smollm2.

    A prompt of - is read from standard input.
    """
    if not prompts:
        msg = "give at least one PROMPT, or - to read it from standard input"
        raise click.UsageError(msg)
    if prompts.count("-") > 1:
        msg = "standard input can be one prompt only"
        raise click.UsageError(msg)
    if system is not None and chat is False:
        msg = "--system needs a chat; leave out --raw"
        raise click.UsageError(msg)
    fields = request_fields(given)
    Request.from_mapping({"prompt": "x", **fields})  # what is wrong is said before a model is loaded
    config = engine_config(**given)
    group = followed(model, config, ranks)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    with open_engine(model, config, group) as engine:
        as_chat = _as_chat(engine, chat, system)
        asked = [
            Prompt(number=number, text=text, request=_request(str(number), text, as_chat, system, fields))
            for number, text in enumerate(texts, 1)
        ]
        with choose_view(asked, as_json) as view:
            seconds = _run(engine, asked, view)
        if stats:
            _show_stats(asked, seconds, as_json)
    if any(isinstance(prompt.outcome, BaseException) for prompt in asked):
        raise click.exceptions.Exit(1)


def _as_chat(engine: Engine, wanted: bool | None, system: str | None) -> bool:
    """Say whether prompts go through the chat template: as asked for, else where there is one."""
    if wanted is not None:
        return wanted
    if system is not None:
        return True
    if engine.tokenizer is None:
        return False
    try:
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    except NoChatTemplate as error:
        note(f"prompts are taken as they are: {error.reason} (--raw says so too)")
        return False
    return True


def _request(name: str, text: str, chat: bool, system: str | None, fields: dict[str, Any]) -> Request:
    if not chat:
        return Request.from_mapping({"id": name, "prompt": text, **fields})
    messages = [{"role": "system", "content": system}] if system is not None else []
    return Request.from_mapping({"id": name, "messages": [*messages, {"role": "user", "content": text}], **fields})


def _run(engine: Engine, asked: list[Prompt], view: View) -> float:
    """Run all prompts together and return the seconds it took."""
    start = time.perf_counter()
    by_name = {str(prompt.number): prompt for prompt in asked}

    def event(event: TokenEvent) -> None:
        prompt = by_name[event.request_id]
        if prompt.first is None:
            prompt.first = time.perf_counter() - start
        view.piece(prompt, event.text)

    def finished(prompt: Prompt, outcome: Result | BaseException) -> None:
        prompt.outcome = outcome
        view.finished(prompt, outcome)

    drive(engine, iter(asked), finished, event)
    return time.perf_counter() - start


def _show_stats(asked: list[Prompt], seconds: float, as_json: bool) -> None:
    results = [prompt.outcome for prompt in asked if isinstance(prompt.outcome, Result)]
    tokens = sum(result.usage.generated_tokens for result in results)
    firsts = [prompt.first for prompt in asked if prompt.first is not None]
    numbers = {
        "prompts": len(asked),
        "failed": len(asked) - len(results),
        "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
        "generated_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "mean_first_token_ms": round(1e3 * sum(firsts) / max(1, len(firsts)), 1),
        "seeds": [result.usage.seed for result in results],
    }
    if as_json:
        print_json({"stats": numbers})
    else:
        note(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in numbers.items()))
