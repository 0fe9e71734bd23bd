"""From exceptions to one line and an exit code. What went wrong is said where it is raised."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import click

from oarlock.core.errors import OarlockError, RankLost, ScheduleDiverged
from oarlock.plugins.cli.console import note, one_line

INTERRUPTED = 130


class Failure(click.ClickException):
    """An error of one line that ends a command with exit code 1."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@contextlib.contextmanager
def one_line_errors(traceback: bool) -> Iterator[None]:
    """Turn what a command raises into one line on stderr and its exit code; with ``traceback``, let it through."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        note("interrupted")
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (RankLost, ScheduleDiverged) as error:
        note(f"Error: {one_line(error)}")
        sys.stdout.flush()
        os._exit(1)  # what the ranks were connected by may wait for ever for one that is gone
    except OarlockError as error:
        if traceback:
            raise
        raise Failure(str(error)) from error
    except Exception as error:
        if traceback:
            raise
        msg = f"unexpected {described(error)} (run `oarlock --traceback ...` to see where)"
        raise Failure(msg) from error


def described(error: BaseException) -> str:
    """Return type and text in one line."""
    return f"{type(error).__name__}: {one_line(error) or 'no message'}"


def require_mlx() -> None:
    """Raise a `Failure` that says what to install where MLX cannot be imported."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        if sys.platform == "darwin":
            cure = "pip install --force-reinstall mlx"
        else:
            cure = "pip install 'oarlock[cpu]', or with an NVIDIA GPU 'oarlock[cuda12]' or 'oarlock[cuda13]'"
        msg = f"MLX has no backend here: {cure} ({one_line(error)})"
        raise Failure(msg) from error
