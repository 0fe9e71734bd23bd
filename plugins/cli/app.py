"""The group of commands: ours, and those that plugins register. What a command does stands in its own file."""

from __future__ import annotations

from typing import Any

import click

from oarlock.core import manager
from oarlock.plugins.cli.batch import batch
from oarlock.plugins.cli.bench.command import bench
from oarlock.plugins.cli.blocking import blocked, disable_option
from oarlock.plugins.cli.completion import completion
from oarlock.plugins.cli.console import note
from oarlock.plugins.cli.doctor import doctor
from oarlock.plugins.cli.explain import explain
from oarlock.plugins.cli.failures import described, one_line_errors
from oarlock.plugins.cli.generate import generate
from oarlock.plugins.cli.new_plugin import new_plugin
from oarlock.plugins.cli.plugins import plugins
from oarlock.plugins.server.command import serve

_FOUND = "oarlock.commands"


class Commands(click.Group):
    """Our commands first; plugins are loaded only for a name that is not ours, and to list what there is."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*sorted(self.commands), *sorted(self.registered(ctx))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(cmd_name) or self.registered(ctx).get(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors(ctx.params["traceback"]):
            return super().invoke(ctx)

    def registered(self, ctx: click.Context) -> dict[str, click.Command]:
        """Return the commands of third-party plugins; whatever is wrong with one costs that one only.

        Our own distribution is left out: it brings its commands here, and its other parts need not be imported.
        """
        if _FOUND not in ctx.meta:
            ctx.meta[_FOUND] = {}
            try:
                registry = manager.build(disable=("oarlock", *blocked(ctx))).registries.commands
            except Exception as error:  # noqa: BLE001 - no plugin may keep a command from working
                note(f"warning: no plugin commands: {described(error)}")
                return {}
            for name, command in ((name, registry.get(name)) for name in registry.names()):
                if name in self.commands:
                    note(f"warning: command {name!r} of {registry.owner(name)} left out: oarlock has one of that name")
                elif not isinstance(command, click.Command):
                    note(f"warning: command {name!r} of {registry.owner(name)} left out: it is no click command")
                else:
                    ctx.meta[_FOUND][name] = command
        found: dict[str, click.Command] = ctx.meta[_FOUND]
        return found


@click.group(
    cls=Commands,
    commands=[batch, bench, completion, doctor, explain, generate, new_plugin, plugins, serve],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: oarlock generate smollm2 'Why is the sky blue?'",
)
@click.version_option(package_name="oarlock")
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
@disable_option
def cli(traceback: bool) -> None:
    """Run language models on MLX: many requests in one batch, made of plugins."""
