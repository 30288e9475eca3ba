"""`asynchooks plan`: what a recorded program would do at other settings, as a table."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

from ..simulation.output._bar import progress
from . import argument, number, plot_file, positive
from .output import check_rich
from .plan_program import load_program
from .plan_settings import parse_setting, parse_target

if TYPE_CHECKING:
    from ..planning import Plan, Prediction

SUMMARY = "Predict what a recorded program does at other settings, in virtual time."
DESCRIPTION = """\
Read records of real runs, run the same program in virtual time at other
settings, with durations drawn from the records, and print what each would
give: updates per second, staleness, idle share, seconds and cost, each with a
90 % interval. The recorded settings are predicted first, beside what was
measured.

TRACE is a file that record(...) or TraceHook has written. Several are several
runs.

VALUES are numbers, true, false, none or texts with commas between them, or
ranges: 8..64 doubles from 8 to 64."""
EPILOG = """\
examples:
Predict a learner with 8, 16, 32 and 64 rollouts at a time:
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64
Find the fastest setting whose staleness stays small, at 2.50 an hour:
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64 \
--set max_staleness=1,2,4 --target "staleness<=2" --price 2.5
Print JSON in place of the table:
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64 --json"""


_KILL_EVERY_SECS = 0.05
"""Between looks for children of threads that were about to fork one when Ctrl-C came."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="Read this record of a run.")
    add = parser.add_argument_group("program and settings").add_argument
    add(
        "--program",
        metavar="FILE:NAME",
        help="Run this async function, of learner.py:main or package.module:main, whose module is "
        "imported: keep what starts a real run under `if __name__ == '__main__':`. What it prints "
        "goes to stderr.",
    )
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=argument(parse_setting),
        metavar="NAME=VALUES",
        help="Predict these values of an argument of the program. Several --set are combined.",
    )
    add = parser.add_argument_group("predictions").add_argument
    add(
        "--runs",
        type=number(int, "a whole number >= 2", 2),
        default=4,
        metavar="N",
        help="Run each setting N times (default: 4).",
    )
    add(
        "--processes",
        type=positive,
        metavar="N",
        help="Predict in N processes (default: one for each core).",
    )
    add(
        "--allow-mismatch",
        action="store_true",
        help="Print the table even if the recorded settings are missed.",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--updates",
        type=positive,
        default=1000,
        metavar="N",
        help="Print seconds and cost of N updates (default: 1000).",
    )
    add(
        "--price",
        type=number(float, "a finite number >= 0"),
        metavar="PRICE",
        help="Print the cost at this price an hour.",
    )
    add(
        "--target",
        type=argument(parse_target),
        metavar="FIGURE<=VALUE",
        help="Name the best setting whose staleness, max_staleness or idle_share is at most this, "
        "by the upper end of its interval (default: the one with the highest rate).",
    )
    add(
        "--plot",
        type=plot_file,
        metavar="PATH",
        help="Write a plot of rate and staleness as .png, .svg or .pdf. This needs the extra plot.",
    )
    add(
        "--json",
        action="store_true",
        help="Print JSON instead of the table, which needs the extra cli.",
    )


def checked(options: argparse.Namespace) -> Callable[[], int]:
    """The function that predicts and prints, and returns the exit code.

    Raises:
        ValueError: arguments do not go together, or a trace cannot be read.
        ImportError: the table cannot be printed, or the program cannot be imported.
        OSError: a file cannot be read.
    """
    from ..planning import Plan

    if options.program is None:  # not by argparse, which would say it of a misspelt one as well
        raise ValueError("--program is missing; give FILE:NAME, as --program learner.py:main")
    if not options.json:
        check_rich()
    values: dict[str, list[Any]] = {}
    for name, each in options.settings:
        if name in values:
            raise ValueError(f"--set gives {name!r} twice; give all its values once, with commas")
        values[name] = each
    settings = [
        dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
    ]
    plan = Plan.read(*options.traces)
    return partial(_run, options, plan, load_program(options.program), settings)


def _run(
    options: argparse.Namespace, plan: Plan, main: Any, settings: Sequence[Mapping[str, Any]]
) -> int:
    """Check the plan by the recorded settings, predict the others, and print all of it.

    The exit code is 1 if there is no prediction at all.
    """
    from ..planning import PlanError, Prediction, plot_plan
    from ..planning._runs import settings_of
    from .plan_output import print_answer, print_recorded

    try:
        settings_of(main, plan.traces[0].settings, settings[0])
    except TypeError as error:
        raise PlanError(str(error)) from error
    with redirect_stdout(sys.stderr):  # what the program prints is no part of the table or JSON
        checks = plan.checks(main, options.runs)
    missed = [each for each in checks if each.is_mismatch]
    if not options.json:
        print_recorded(plan, checks)
    if missed and not options.allow_mismatch:
        if options.json:
            print_answer(options, plan, checks, [])
        raise PlanError(
            "the recorded settings are missed by more than 10 % beyond chance, so no table is "
            f"printed. {missed[0].reasons()}. --allow-mismatch prints it anyway"
        )
    with progress("settings", len(settings)) as show, redirect_stdout(sys.stderr):
        found = _predictions(options, plan, main, settings, show)
    predictions = [each for each in found if isinstance(each, Prediction)]
    if options.plot is not None:
        plot_plan(options.plot, predictions, checks)
    print_answer(options, plan, checks, list(zip(settings, found, strict=True)))
    return 0 if predictions else 1


def _predictions(
    options: argparse.Namespace,
    plan: Plan,
    main: Any,
    settings: Sequence[Mapping[str, Any]],
    show: Callable[[float], object],
) -> list[Prediction | str]:
    """A prediction of each setting, or its error, whatever the number of processes.

    Each is made in a process of its own, which a thread here waits for.

    Args:
        show: called with how many are done.

    Raises:
        KeyboardInterrupt: Ctrl-C, which ends the processes as well.
    """
    from ..planning._child import kill_children
    from ..simulation._pool import num_cores

    def predicted(own: Mapping[str, Any]) -> Prediction | str:
        try:
            return plan.predict(
                main, num_runs=options.runs, allow_mismatch=options.allow_mismatch, **own
            )
        except Exception as error:  # all are shown alike
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(options.processes or num_cores()) as pool:
        futures = []
        try:
            for each in settings:
                futures.append(pool.submit(predicted, each))
            for num_done, _ in enumerate(as_completed(futures), 1):
                show(num_done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_children()
            while wait(futures, timeout=_KILL_EVERY_SECS).not_done:
                kill_children()  # of a thread that was about to fork
            raise
        return [each.result() for each in futures]
