"""The command line `asynchooks`. It knows its sub-commands, and what their errors exit with.

What a sub-command takes and does is said in a file of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import _simulate_command
from ._errors import SimulationError

INTERRUPTED = 130
"""What a shell says of a process that Ctrl-C ended: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; None: those of the process.

    Returns:
        The exit code: 0; 1: the run failed; 2: an argument is refused, by one line on stderr
        (argparse leaves by SystemExit with it, and with 0 after --help); 130: Ctrl-C.
    """
    parser = OneLineParser(
        prog="asynchooks", description="Monitored training sessions and hooks for async/await."
    )
    parser.add_argument("--version", action="version", version=f"asynchooks {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    command = commands.add_parser(
        "simulate", help=_simulate_command.SUMMARY, description=_simulate_command.DESCRIPTION
    )
    _simulate_command.add_arguments(command)
    options = parser.parse_args(argv)
    try:
        try:
            checked = _simulate_command.checked(options)
        except (ValueError, OSError, ImportError) as error:
            return _say(command.prog, error, 2)
        try:
            checked.run()
        except (SimulationError, OSError) as error:
            return _say(command.prog, error, 1)
    except KeyboardInterrupt:
        print(f"{command.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def version() -> str:
    """Of the package that is installed."""
    return importlib.metadata.version("asynchooks")


def _say(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code
