"""The command line `asynchooks`: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from ._cli import launch, simulate
from ._errors import SimulationError
from ._version import __version__

INTERRUPTED = 130
"""A shell's exit code of a process that Ctrl-C ended: 128 and the number of the signal."""


class Command(Protocol):
    """The module of a sub-command."""

    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def checked(self, options: argparse.Namespace, /) -> Callable[[], int]:
        """The function to run, which returns the exit code."""


COMMANDS: dict[str, Command] = {"simulate": simulate, "launch": launch}


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
    parser.add_argument("--version", action="version", version=f"asynchooks {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        command.set_defaults(prog=command.prog)
        module.add_arguments(command)
    options = parser.parse_args(argv)
    try:
        try:
            run = COMMANDS[options.command].checked(options)
        except (ValueError, OSError, ImportError) as error:
            return _fail(options.prog, error, 2)
        try:
            return run()
        except (SimulationError, OSError) as error:
            return _fail(options.prog, error, 1)
    except KeyboardInterrupt:
        print(f"{options.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _fail(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage, which --help shows."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
