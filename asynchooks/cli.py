"""The command line `asynchooks`: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType

from ._cli import Parser, message_of, plan, simulate
from ._errors import PlanError, SimulationError, TraceError
from ._version import __version__

INTERRUPTED = 130
"""A shell's exit code of a process that Ctrl-C ended: 128 and the number of the signal."""

DESCRIPTION = "Train in virtual time, and plan runs."
EPILOG = """\
examples:
  asynchooks simulate --workers 64 --compare async,sync
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64

Run `asynchooks COMMAND --help` for the options of a command, with more examples."""

COMMANDS: dict[str, ModuleType] = {"simulate": simulate, "plan": plan}
"""Each has SUMMARY, DESCRIPTION and EPILOG for its help, and `add_arguments(parser)`.

`checked(options)` returns the function to run, which returns the exit code. It raises ValueError,
OSError or ImportError for arguments that are refused.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; None: those of the process.

    Returns:
        The exit code: 0; 1: the run failed; 2: an argument is refused, by one line on stderr, or
        there is no command, by the help on stderr (argparse exits by SystemExit with 2, and with 0
        after --help); 130: Ctrl-C.
    """
    parser = Parser(prog="asynchooks", description=DESCRIPTION, epilog=EPILOG)
    version = f"asynchooks {__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="Print the version and exit."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EPILOG
        )
        module.add_arguments(command)
    try:
        options, rest = parser.parse_known_args(argv)
        parser = options.parser  # that of the command
        for each in rest:
            if each != "--":
                parser.error(f"{each!r} is no option; {_remedy(each, parser)}")
        if options.command is None:
            parser.print_help(sys.stderr)
            return 2
        try:
            run = COMMANDS[options.command].checked(options)
        except (ValueError, OSError, ImportError) as error:
            return _fail(parser, f"error: {message_of(error)}", 2)
        code: int = run()
        print(end="", flush=True)  # a full disk is an error of this run; there may be no stdout
    except (SimulationError, PlanError, TraceError, OSError) as error:
        return _fail(parser, f"error: {message_of(error)}", 1)
    except KeyboardInterrupt:
        return _fail(parser, "interrupted", INTERRUPTED)
    else:
        return code


def _fail(parser: Parser, message: str, code: int) -> int:
    print(f"{parser.prog}: {message}", file=sys.stderr)
    return code


def _remedy(text: str, parser: Parser) -> str:
    # all options begin with dashes, which alone must not make them similar
    similar = get_close_matches(text, parser._option_string_actions, n=1, cutoff=0.75)
    return f"did you mean {similar[0]!r}?" if similar else f"see {parser.prog} --help"
