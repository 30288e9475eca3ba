"""`asynchooks plan`: what a recorded program would do at other settings, as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from . import argument, numeric, positive
from .plan_program import load_program
from .plan_settings import Target, parse_setting, parse_target, products

if TYPE_CHECKING:
    from ..planning import Plan
    from .plan_output import Row

SUMMARY = "Predict what a recorded program does at other settings, in virtual time."
DESCRIPTION = """\
Read records of real runs, run the same program in virtual time at other settings, with durations \
drawn from the records, and print what each would give: updates per second, staleness, idle share, \
seconds and cost, each with a 90 % interval. The recorded settings are predicted first, beside \
what was measured.

TRACE is a file that record(...) or TraceHook has written. Several are several runs.

VALUES are numbers, true, false, none or texts with commas between them, or ranges: 8..64 doubles \
from 8 to 64, and 1..9..2 goes by 2."""
EPILOG = """\
examples:
Predict a learner with 8, 16, 32 and 64 rollouts at a time:
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64
Find the fastest setting whose staleness stays small, at 2.50 an hour:
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64 \
--set max_staleness=1,2,4 --target "staleness<=2" --price 2.5
Print JSON in place of the table:
  asynchooks plan run.pftrace --program learner.py:main --set concurrency=8..64 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="Read this record of a run.")
    what = parser.add_argument_group("program and settings").add_argument
    what("--program", metavar="FILE:NAME", required=True,
        help="Run this async function, of learner.py:main or package.module:main, whose module is "
        "imported: keep what starts a real run under `if __name__ == '__main__':`. What it prints "
        "goes to stderr.",
    )  # fmt: skip
    what("--set", dest="settings", action="append", default=[], type=argument(parse_setting),
        metavar="NAME=VALUES",
        help="Predict these values of an argument of the program. Several --set are combined.",
    )  # fmt: skip
    how = parser.add_argument_group("predictions").add_argument
    how("--runs", type=numeric(int, 2, "a whole number >= 2"), default=4, metavar="N",
        help="Run each setting N times (default: 4).")  # fmt: skip
    how("--seed", type=numeric(int, 0, "a whole number >= 0"), default=0, metavar="N",
        help="Draw all random numbers from this seed (default: 0).")  # fmt: skip
    how("--processes", type=positive, metavar="N",
        help="Predict in N processes (default: one for each core).")  # fmt: skip
    how("--allow-mismatch", action="store_true",
        help="Print the table even if the recorded settings are missed.")  # fmt: skip
    shown = parser.add_argument_group("output").add_argument
    shown("--updates", type=positive, default=1000, metavar="N",
        help="Print seconds and cost of N updates (default: 1000).")  # fmt: skip
    shown("--price", type=numeric(float, 0, "a finite number >= 0"), metavar="PRICE",
        help="Print the cost at this price an hour.")  # fmt: skip
    shown("--target", type=argument(parse_target), metavar="FIGURE<=VALUE",
        help="Name the best setting whose staleness, max_staleness or idle_share is at most this, "
        "by the upper end of its interval (default: the one with the highest rate).",
    )  # fmt: skip
    shown("--plot", metavar="PATH",
        help="Write a plot of rate and staleness as .png, .svg or .pdf. This needs the extra "
        "plot.")  # fmt: skip
    shown("--json", action="store_true",
        help="Print JSON instead of the table, which needs the extra cli.")  # fmt: skip


def checked(options: argparse.Namespace) -> Callable[[], int]:
    """The function that predicts and prints, and returns the exit code.

    Raises:
        ValueError: arguments do not go together, or a trace cannot be read.
        ImportError: an extra is missing, or the program cannot be imported.
        OSError: a file cannot be read or written.
    """
    from ..planning import Plan
    from ..simulation.output._plots import check_format, check_matplotlib
    from ..simulation.output._whole_file import check_writable

    if not options.json:
        try:
            import rich  # noqa: F401
        except ImportError:
            raise ImportError(
                "the table needs rich, which is not installed; pip install 'asynchooks[cli]', or "
                "give --json"
            ) from None
    if options.plot is not None:
        check_format(options.plot)
        check_matplotlib()
        check_writable(options.plot)
    names = [name for name, _ in options.settings]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"--set gives {sorted(twice)[0]!r} twice; give all its values once, with commas"
        )
    return partial(_run, options, Plan.read(*options.traces), load_program(options.program))


def _run(options: argparse.Namespace, plan: Plan, main: Any) -> int:
    from ..planning import PlanError
    from ..planning._runs import Program
    from .plan_output import Result, print_json, print_recorded, print_result, progress

    settings = products(options.settings)
    try:
        Program.of(main, plan.traces[0].settings, settings[0])
    except TypeError as error:
        raise PlanError(str(error)) from error
    with redirect_stdout(sys.stderr):  # what the program prints is no part of the table or JSON
        checks = plan.checks(main, options.runs, options.seed)
    missed = [each for each in checks if each.is_mismatch]
    if not options.json:
        print_recorded(plan, checks)
    if missed and not options.allow_mismatch:
        if options.json:
            print_json(Result(plan, checks, [], None, options.target, options.updates, None))
        raise PlanError(
            "the recorded settings are missed by more than 10 % beyond chance, so no table is "
            f"printed. {missed[0].reasons()}. --allow-mismatch prints it anyway"
        )
    with progress(len(settings)) as done, redirect_stdout(sys.stderr):
        rows = _rows(options, plan, main, settings, done)
    best = _best(rows, options.target)
    result = Result(plan, checks, rows, best, options.target, options.updates, options.price)
    if options.plot is not None:
        from ..planning._plot import plot_plan

        predictions = [each.prediction for each in rows if each.prediction is not None]
        plot_plan(options.plot, predictions, checks)
    if options.json:
        print_json(result)
    else:
        print_result(result)
    with suppress(ValueError):  # stdout is closed
        sys.stdout.flush()
    return 0 if any(each.prediction is not None for each in rows) else 1


def _rows(
    options: argparse.Namespace,
    plan: Plan,
    main: Any,
    settings: Sequence[dict[str, Any]],
    done: Callable[[], object],
) -> list[Row]:
    """A prediction of each setting, or its error, whatever the number of processes.

    Each is made in a process of its own, which a thread here waits for.

    Args:
        done: called as each setting is done.

    Raises:
        KeyboardInterrupt: Ctrl-C, which ends the processes as well.
    """
    from ..planning._child import kill_children
    from ..simulation._pool import num_cores
    from .plan_output import Row

    def row(own: dict[str, Any]) -> Row:
        try:
            found = plan.predict(
                main, num_runs=options.runs, seed=options.seed,
                allow_mismatch=options.allow_mismatch, **own,
            )  # fmt: skip
        except Exception as error:  # all are shown alike
            return Row(own, None, f"{type(error).__name__}: {error}")
        return Row(own, found, None)

    pool = ThreadPoolExecutor(options.processes or num_cores())
    try:
        futures = [pool.submit(row, each) for each in settings]
        for each in as_completed(futures):
            each.result()
            done()
        return [each.result() for each in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        kill_children()
        raise
    finally:
        pool.shutdown()


def _best(rows: Sequence[Row], target: Target | None) -> Row | None:
    """The one with the highest rate of those that keep the target."""
    kept = [
        each
        for each in rows
        if each.prediction is not None and (target is None or target.is_kept(each.prediction))
    ]
    return max(kept, key=lambda row: row.prediction.rate.value, default=None)  # type: ignore[union-attr]
