"""What plans predict, and what real runs of the same programs then give.

    python -m tests.benchmarks.planning [batching gradients seen_gradients pytorch] [--secs 25]

Each program is recorded once at one or two settings. Others are then planned from that, and run
really, each run in a process of its own. Nothing else should run on the machine.
"""

import argparse
import logging
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asynchooks.planning import Figures, Plan, Prediction, Trace

from .._report import parts_of, print_table, run_afresh
from ._programs import PROGRAMS, Settings, run_recorded

RECORDED_SECS, NUM_RUNS = 60.0, 5
FIGURES = "rate", "staleness"


class Judged(NamedTuple):
    """One figure of one setting, beside real runs."""

    figure: str
    error: float
    """In %, of the prediction to the mean of all runs."""
    covered: Sequence[bool]
    """Whether each run is in the interval."""


def judged(prediction: Prediction, runs: Sequence[Figures]) -> list[Judged]:
    found = []
    for figure in FIGURES:
        truths, estimate = [getattr(each, figure) for each in runs], getattr(prediction, figure)
        mean = statistics.fmean(truths)
        if mean > 0:  # else, or with NaN, the program has no such one
            error = 100 * abs(estimate.value / mean - 1.0)
            found.append(Judged(figure, error, [estimate.covers(each) for each in truths]))
    return found


def print_judged(title: str, rows: Mapping[str, Sequence[Judged]]) -> None:
    """How large errors are, and how many runs the intervals cover, of each row and in all."""
    lines = []
    for label, all_found in rows.items():
        line, every = [label], [is_in for each in all_found for is_in in each.covered]
        for figure in FIGURES:
            some = [each for each in all_found if each.figure == figure]
            errors = [each.error for each in some] or [math.nan]
            covered = [is_in for each in some for is_in in each.covered] or [False]
            line.append(f"{statistics.median(errors):.1f} % ({max(errors):.1f} %)")
            line.append(f"{100 * statistics.fmean(covered):.0f} % of {len(covered)}")
        lines.append([*line, f"{100 * statistics.fmean(every):.0f} %" if every else "-"])
    columns = [f"{figure}: {what}" for figure in FIGURES for what in ("off by (most)", "covered")]
    print_table(title, ["", *columns, "all covered"], lines)


def recording(name: str, settings: Settings) -> Trace:
    """The trace of one real run."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.pftrace")
        run_afresh("asyncio", run_recorded, name, path, settings)
        return Trace.read(path)


def measure(name: str, secs: float) -> None:
    program, rows = PROGRAMS[name], dict[str, list[Judged]]()
    recorded = [
        recording(name, {**program.always, **each, "secs": RECORDED_SECS})
        for each in program.recorded
    ]
    plan = Plan(recorded)
    for trace in recorded:
        print(plan, plan.check(program.main, trace=trace), flush=True)
    for settings in program.planned:
        given = {**program.always, **settings, "secs": secs}
        prediction = plan.predict(program.main, allow_mismatch=True, **given)
        runs = [recording(name, given).figures() for _ in range(NUM_RUNS)]
        label = "beyond it" if prediction.is_extrapolated else "load recorded"
        rows.setdefault(label, []).extend(judged(prediction, runs))
    print_judged(name, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning")
    parser.add_argument("name", nargs="*", help=f"of a program: {', '.join(PROGRAMS)}")
    parser.add_argument("--secs", type=float, default=25.0, help="of each run that is planned")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    parts_of({each: partial(measure, each, chosen.secs) for each in PROGRAMS}, chosen.name)
