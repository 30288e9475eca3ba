"""The command line `asynchooks`. It knows its sub-commands, and what their errors exit with.

What a sub-command takes and does is said in a file of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from ._cli import launch as _launch_command
from ._cli import simulate as _simulate_command
from ._errors import SimulationError
from ._version import version

INTERRUPTED = 130
"""What a shell says of a process that Ctrl-C ended: 128 and the number of the signal."""


class Run(Protocol):
    """What arguments ask for; its `run` returns the exit code."""

    def run(self) -> int: ...


class Command(Protocol):
    """What the module of a sub-command has."""

    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def checked(self, options: argparse.Namespace, /) -> Run: ...


COMMANDS: dict[str, Command] = {"simulate": _simulate_command, "launch": _launch_command}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; None: those of the process.

    Returns:
        The exit code: 0; 1: the run failed; 2: an argument is refused, by one line on stderr
        (argparse leaves by SystemExit with it, and with 0 after --help); 130: Ctrl-C. That of
        `launch` may be any: it is its processes' own.
    """
    parser = OneLineParser(
        prog="asynchooks", description="Monitored training sessions and hooks for async/await."
    )
    parser.add_argument("--version", action="version", version=f"asynchooks {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        command.set_defaults(prog=command.prog)
        module.add_arguments(command)
    options = parser.parse_args(argv)
    prog: str = options.prog
    try:
        try:
            checked = COMMANDS[options.command].checked(options)
        except (ValueError, OSError, ImportError) as error:
            return _say(prog, error, 2)
        try:
            return checked.run()
        except (SimulationError, OSError) as error:
            return _say(prog, error, 1)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _say(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code
