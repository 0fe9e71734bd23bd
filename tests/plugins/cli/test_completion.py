"""`oarlock completion`: a real bash completes from the script; zsh and fish get click's own scripts for this program."""

import os
import shlex
import subprocess
import sys

import pytest

from oarlock.plugins.cli.completion import SHELLS

PLUGIN = """
import click
from oarlock.core import hookimpl

@click.command("salute", short_help="Says hello.")
@click.option("--loud", is_flag=True, help="Shout.")
@click.option("--tongue", type=click.Choice(["danish", "dutch", "finnish"]), help="Which.")
def salute(loud, tongue): ...

@hookimpl
def register_commands(register):
    register(salute)
"""
PROGRAM = '#!/bin/sh\nexec {python} -c "from oarlock.plugins.cli import main; main()" "$@"\n'
BASH = """
source ./script
complete -p oarlock >&2
for line in "${LINES_TYPED[@]}"; do
  IFS=' ' read -ra COMP_WORDS <<< "$line"
  [[ $line == *' ' ]] && COMP_WORDS+=('')
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  COMPREPLY=()
  compopt() { echo "compopt $1 $2"; }
  _oarlock_completion oarlock "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
  echo "$line|${COMPREPLY[*]}"
done
"""


@pytest.fixture
def types(tmp_path, invoke, distribution):
    """Say what bash offers for each line, where a plugin with a command is installed and another is broken."""

    def ask(*lines):
        distribution("aaa-broken", "2.5", {"bad": "import a_library_that_is_not_installed"})
        path = distribution("saluter", "1.0", {"hello": PLUGIN})
        (tmp_path / "script").write_text(invoke("completion", "bash").stdout)
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "oarlock").write_text(PROGRAM.format(python=sys.executable))
        (tmp_path / "bin" / "oarlock").chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        environment |= {"PYTHONPATH": str(path)}
        environment.pop("OARLOCK_PLUGINS", None)
        code = f"LINES_TYPED=({' '.join(map(shlex.quote, lines))})\n{BASH}"
        command = ["bash", "--norc", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        assert done.stderr == "complete -o nosort -F _oarlock_completion oarlock\n"
        return dict(line.split("|", 1) if "|" in line else (line, "") for line in done.stdout.splitlines())

    return ask


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_bash_completes_commands_options_and_values(types):
    """Ours and a plugin's; a plugin that is broken, and every warning, stay off the line."""
    said = types(
        "oarlock sa",
        "oarlock doctor --js",
        "oarlock completion ",
        "oarlock generate somewhere --dtype b",
        "oarlock salute --",
        "oarlock salute --tongue d",
        "oarlock --disable-plugin salu",
        "oarlock --disable-plugin hello sa",
        "oarlock generate ./mo",
    )
    assert said.pop("compopt -o default") == ""
    assert {line.removeprefix("oarlock "): offered for line, offered in said.items()} == {
        "sa": "salute",
        "doctor --js": "--json",
        "completion ": "bash zsh fish",
        "generate somewhere --dtype b": "bfloat16",
        "salute --": "--loud --tongue --help",
        "salute --tongue d": "danish dutch",
        "--disable-plugin salu": "saluter",
        "--disable-plugin hello sa": "",
        "generate ./mo": "",  # bash's own files
    }


@pytest.mark.parametrize(
    ("shell", "pieces"),
    [
        ("zsh", ["#compdef oarlock", "compdef _oarlock_completion oarlock", "_OARLOCK_COMPLETE=zsh_complete oarlock"]),
        ("fish", ["complete --no-files --command oarlock", "_OARLOCK_COMPLETE=fish_complete"]),
    ],
)
def test_the_other_shells_get_a_script_that_asks_this_program(shell, pieces, invoke):
    said = invoke("completion", shell).stdout
    assert [piece for piece in pieces if piece not in said] == []


@pytest.mark.parametrize(("shell", "word"), [("zsh", "2"), ("fish", "be")])
def test_they_are_answered(shell, word, run):
    """With what they send, and the help of each command beside it."""
    typed = "oarlock --traceback be"
    said = run(COMP_WORDS=typed, COMP_CWORD=word, _OARLOCK_COMPLETE=f"{shell}_complete")
    shown = {
        "zsh": "plain\nbench\nMeasure a model on this machine.\n",
        "fish": "plain,bench\tMeasure a model on this machine.\n",
    }
    assert (said.out, said.err) == (shown[shell], "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_help_says_where_each_script_goes(shell, invoke):
    assert f"oarlock completion {shell}" in invoke("completion", "--help").stdout


def test_another_shell_is_wrong_usage(invoke):
    assert "'bash', 'zsh', 'fish'" in invoke("completion", "tcsh", code=2).stderr


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "raise RuntimeError('no')"])
def test_what_fails_while_a_shell_asks_says_nothing(source, run, tmp_path):
    """A command whose own values cannot be had costs those alone."""
    program = "from oarlock.plugins.cli import app, main\ndef values(*_):\n    " + source + "\n"
    program += "app.cli.commands['generate'].params[0].shell_complete = values\nmain()\n"
    line = {"COMP_WORDS": "oarlock generate x", "COMP_CWORD": "2", "_OARLOCK_COMPLETE": "bash_complete"}
    said = run(program=program, code=None, **line)
    assert (said.out, said.err) == ("", "")
