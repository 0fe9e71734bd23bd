"""The two streams of a command: answers on stdout, everything else on stderr. It knows no command."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import structlog

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_CONTROLS = "\n\t"


def set_up() -> None:
    """Send log lines to stderr, so that stdout stays readable for programs, and never fail on a character."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, _line],
        wrapper_class=structlog.make_filtering_bound_logger(20),  # info and above
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _line(_logger: Any, _method: str, event: Any) -> str:
    """Render one log event: ``warning: plugin broken, plugin=x, reason=y``."""
    if event.pop("exc_info", None) and (error := sys.exception()) is not None:
        if isinstance(error, KeyboardInterrupt):
            raise structlog.DropEvent
        event["error"] = f"{type(error).__name__}: {error}"
    level, name = event.pop("level"), str(event.pop("event")).replace("_", " ")
    return ", ".join([f"{level}: {name}", *(f"{key}={one_line(value)}" for key, value in event.items())])


def one_line(value: object) -> str:
    """Return text without line breaks."""
    return " ".join(str(value).split())


def note(text: str) -> None:
    """Say something on stderr."""
    click.echo(text, err=True)


def stderr() -> Console:
    """Return a rich console on the present stderr."""
    from rich.console import Console

    return Console(stderr=True)


@contextlib.contextmanager
def busy(text: str) -> Iterator[None]:
    """Show a spinner on stderr while something takes its time; on no terminal, nothing."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout."""
    click.echo(to_json(value, sys.stdout.encoding))


def to_json(value: Any, encoding: str = "utf-8") -> str:
    """Return one line of strict JSON: what is not finite becomes null; escapes only where ``encoding`` needs them."""
    text = json.dumps(_strict(value), ensure_ascii=False, allow_nan=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = json.dumps(_strict(value), allow_nan=False)
    return text


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def harmless(text: str) -> str:
    """Return text with control characters made visible: a model must not steer the reader's terminal."""
    if text.isprintable():
        return text
    return "".join(c if c in _SHOWN_CONTROLS or ord(c) > 159 or 31 < ord(c) < 127 else _symbol(c) for c in text)


def _symbol(character: str) -> str:
    """Return the Unicode picture of a control character."""
    code = ord(character)
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"
