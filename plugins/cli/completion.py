"""``oarlock completion``: the script by which a shell completes commands, and quiet while it does. What can be said where, click knows."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

from oarlock.core import manager

PROGRAM = "oarlock"
VARIABLE = "_OARLOCK_COMPLETE"
"""Where a shell's script asks: click derives the name from the program's, and answers before any command runs."""
SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(
    short_help="Print what makes Tab complete commands.",
    epilog='Example: oarlock completion bash, inside eval "$(...)"',
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    r"""Print the script by which SHELL completes commands, options and their values with Tab, those of plugins too.

    \b
    bash 4.4 or newer, a line in ~/.bashrc:
      eval "$(oarlock completion bash)"
    zsh, a line in ~/.zshrc, after compinit:
      eval "$(oarlock completion zsh)"
    fish, once:
      oarlock completion fish > ~/.config/fish/completions/oarlock.fish
    """
    click.echo(SHELLS[shell](context.find_root().command, {}, PROGRAM, VARIABLE).source())


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """While a shell asks, keep warnings and errors off the line that is being typed; else do nothing."""
    if VARIABLE not in os.environ:
        yield
        return
    with contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO())), contextlib.suppress(Exception):
        yield


def installed(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the plugins and distributions that begin so."""
    infos = manager.list_plugins()
    names = {info.name: info.owner for info in infos} | {info.distribution: "all of it" for info in infos}
    return [CompletionItem(name, help=owner) for name, owner in sorted(names.items()) if name.startswith(incomplete)]
