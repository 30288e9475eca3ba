"""The command line `asynchooks`: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol

from ._cli import HelpFormatter, plan, simulate
from ._errors import PlanError, SimulationError, TraceError
from ._version import __version__

INTERRUPTED = 130
"""A shell's exit code of a process that Ctrl-C ended: 128 and the number of the signal."""

DESCRIPTION = "Train in virtual time, and plan runs."
EPILOG = """examples:
  asynchooks simulate --workers 64 --compare async,sync
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64

Run `asynchooks COMMAND --help` for the options of a command, with more examples."""


class Command(Protocol):
    """The module of a sub-command."""

    SUMMARY: str
    DESCRIPTION: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def checked(self, options: argparse.Namespace, /) -> Callable[[], int]:
        """The function to run, which returns the exit code."""


COMMANDS: dict[str, Command] = {"simulate": simulate, "plan": plan}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; None: those of the process.

    Returns:
        The exit code: 0; 1: the run failed; 2: an argument is refused, by one line on stderr, or
        there is no command, by the help on stderr (argparse exits by SystemExit with 2, and with 0
        after --help); 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog="asynchooks", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"asynchooks {__version__}",
        help="Print the version and exit.")  # fmt: skip
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EPILOG
        )
        command.set_defaults(parser=command)
        module.add_arguments(command)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(unknown("command", arguments[0], COMMANDS, parser.prog))
    options, rest = parser.parse_known_args(arguments)
    if rest and rest != ["--"]:
        options.parser.refuse(rest)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    prog = options.parser.prog
    try:
        try:
            run = COMMANDS[options.command].checked(options)
        except (ValueError, OSError, ImportError) as error:
            return _fail(prog, error, 2)
        try:
            return run()
        except (SimulationError, PlanError, TraceError, OSError) as error:
            return _fail(prog, error, 1)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _fail(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code


def unknown(what: str, text: str, known: Iterable[str], prog: str) -> str:
    """The message about a command or option that does not exist, with the most similar one."""
    names = {each.lstrip("-"): each for each in known}  # dashes make all options similar
    similar = get_close_matches(text.lstrip("-"), names, n=1)
    remedy = f"did you mean {names[similar[0]]!r}?" if similar else f"see {prog} --help"
    return f"there is no {what} {text!r}; {remedy}"


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage, which --help shows.

    Options have to be written out: a prefix that is accepted today would be ambiguous, or mean
    something else, when an option is added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=HelpFormatter, allow_abbrev=False, add_help=False, **options
        )
        self.add_argument("-h", "--help", action="help", help="Print this help and exit.")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        """Report the arguments that the parser did not recognise."""
        for place, text in enumerate(arguments):
            if text == "--":  # what follows is no option
                arguments = [*arguments[:place], *arguments[place + 1 :]]
                break
            if text.startswith("-"):
                option = text.partition("=")[0]
                self.error(unknown("option", option, self._option_string_actions, self.prog))
        self.error(f"{arguments[0]!r} is one argument too many; see {self.prog} --help")
