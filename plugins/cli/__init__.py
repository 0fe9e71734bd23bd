"""The command line: ``oarlock generate | batch | plugins | new-plugin | explain | doctor | bench | ...``, and what plugins add.

It decides nothing about generation: every command is a thin driver of the public engine.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the console script and exit with its code: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        from oarlock.plugins.cli.app import cli
        from oarlock.plugins.cli.completion import PROGRAM, quietly
        from oarlock.plugins.cli.console import set_up

        with quietly():
            set_up()
            cli(prog_name=PROGRAM)
    except KeyboardInterrupt:  # before or after click looks after it
        sys.exit(130)
