"""The group of commands: help, errors and exit codes, what plugins add, and what starting it costs."""

import click
import pytest

from oarlock.core.errors import QueueFull
from oarlock.plugins.cli.app import cli
from oarlock.plugins.cli.failures import one_line_errors

COMMAND = """
import click
from oarlock.core import hookimpl

@click.command(epilog="Example: oarlock {name}")
def command():
    \"\"\"Says hello.\"\"\"
    click.echo("hello from a plugin")

command.name = {name!r}

@hookimpl
def register_commands(register):
    register(command)
"""

MODULES = "import sys\nfrom oarlock.plugins.cli.app import cli\ncli(sys.argv[1:], standalone_mode=False)\n"
MODULES += (
    "print(sorted({n.split('.')[0] for n in sys.modules} & {'mlx', 'mlx_lm', 'transformers', 'rich'}), file=sys.stderr)"
)


def walk(command, path=("oarlock",)):
    """Yield every command with its name."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"), list(walk(cli)), ids=lambda value: "-".join(value) if type(value) is tuple else ""
)
def test_the_help_of_every_command_shows_an_example(path, command, invoke):
    """--help ends with a line that can be typed, and each option says what it is for."""
    shown = " ".join(invoke(*path[1:], "--help").stdout.split())
    assert f"Example: {' '.join(path)}" in shown
    assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_every_command_has_a_short_help_that_fits(invoke):
    """The list of commands is not cut off."""
    assert "..." not in invoke("--help").stdout.partition("Commands:")[2]


def test_the_version_is_that_of_the_distribution(invoke):
    import importlib.metadata

    assert importlib.metadata.version("oarlock") in invoke("--version").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plugins", "--json"]])
def test_help_and_plugins_import_no_mlx(run, arguments):
    """Looking is cheap, and works where MLX does not."""
    loaded = run(*arguments, program=MODULES)
    assert not {"mlx", "mlx_lm", "transformers"} & set(loaded.err.replace("'", " ").split())


def test_commands_of_plugins_appear_and_run(run, distribution):
    """A click command that a plugin registers is a command of oarlock."""
    path = distribution("greeter", "1.0", {"hello": COMMAND.format(name="hello")})
    assert "Says hello." in run("--help", path=path).out
    assert run("hello", path=path).out == "hello from a plugin\n"


@pytest.mark.fault("Q-01")
def test_a_broken_plugin_keeps_no_command_from_working(run, distribution):
    """Neither those of other plugins, nor the list of them; it is named on stderr."""
    distribution("aaa-broken", "2.5", {"bad": "import a_library_that_is_not_installed", "exits": "raise SystemExit(3)"})
    path = distribution("greeter", "1.0", {"hello": COMMAND.format(name="hello")})
    shown = run("--help", path=path)
    assert "Says hello." in shown.out
    assert "a_library_that_is_not_installed" in shown.err
    assert run("hello", path=path).out == "hello from a plugin\n"
    assert "Traceback" not in shown.err


def test_no_plugin_takes_the_name_of_our_command(run, distribution):
    """It is left out with a warning that names the plugin, and ours runs."""
    path = distribution("usurper", "3.0", {"mine": COMMAND.format(name="plugins")})
    shown = run("--help", path=path)
    assert "Says hello." not in shown.out
    assert "usurper 3.0 (mine)" in shown.err
    assert "usurper" in run("plugins", path=path).out


def test_what_is_no_click_command_is_left_out(run, distribution):
    source = "from oarlock.core import hookimpl\nclass C: name = 'odd'\n@hookimpl\ndef register_commands(register): register(C())"
    path = distribution("oddity", "1.0", {"odd": source})
    assert "oddity 1.0 (odd)" in run("--help", path=path).err
    assert "No such command" in run("odd", path=path, code=2).err


@pytest.mark.parametrize("how", ["flag before", "environment", "distribution"])
def test_a_blocked_plugin_brings_no_command(run, distribution, how):
    """OARLOCK_PLUGINS and --disable-plugin name plugins or distributions."""
    path = distribution("greeter", "1.0", {"hello": COMMAND.format(name="hello")})
    variables = (
        {} if how == "flag before" else {"OARLOCK_PLUGINS": "other, hello" if how == "environment" else "Greeter"}
    )
    flags = ["--disable-plugin", "hello"] if how == "flag before" else []
    assert "Says hello." not in run(*flags, "--help", path=path, **variables).out
    assert "No such command" in run(*flags, "hello", path=path, code=2, **variables).err


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (QueueFull(3, 3), 1, "the queue is full"),
        (ValueError("two\nlines"), 1, "unexpected ValueError: two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_line_and_a_code(error, code, shown):
    """No traceback, whatever was raised."""
    from click.testing import CliRunner

    @click.command()
    def fails():
        with one_line_errors(traceback=False):
            raise error

    done = CliRunner().invoke(fails)
    assert done.exit_code == code
    assert shown in done.stderr
    assert done.stderr.count("\n") == 1


def test_traceback_lets_errors_through():
    with pytest.raises(QueueFull), one_line_errors(traceback=True):
        raise QueueFull(3, 3)


@pytest.mark.parametrize("arguments", [["generate", "somewhere", "hi"], ["doctor"]])
def test_a_missing_backend_is_one_line_that_names_the_extra(run, tmp_path, arguments):
    """On Linux MLX alone has none: libmlx.so is what the import asks for."""
    (tmp_path / "path" / "mlx").mkdir(parents=True)
    (tmp_path / "path" / "mlx" / "__init__.py").write_text("")
    (tmp_path / "path" / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    done = run(*arguments, path=tmp_path / "path", code=1)
    assert done.err.count("\n") == 1
    assert "oarlock[cpu]" in done.err or "pip install --force-reinstall mlx" in done.err
    assert "libmlx.so" in done.err


def test_an_unknown_command_is_wrong_usage(invoke):
    assert "No such command" in invoke("genrate", code=2).stderr
