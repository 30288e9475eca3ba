"""What plans predict, and what real runs of the same programs then give.

    python -m tests.benchmarks.planning [batching gradients seen_gradients pytorch]
        [--secs 25] [--recorded-secs 60] [--runs 5] [--keep DIR]

Each program is recorded once at one or two settings. Others are then planned from that, and run
really, each run in a process of its own. With `--keep` the recordings stay in DIR, and those that
are there are not made again. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asynchooks.planning import Figures, Plan, Prediction, Trace

from .._report import parts_of, print_table, run_afresh
from ._programs import PROGRAMS, Settings, run_recorded, text_of


class Row(NamedTuple):
    """One setting of a program."""

    prediction: Prediction
    measured: Sequence[Figures]

    def error(self, name: str) -> float:
        """In %, of the prediction to the mean of all runs; NaN if the program has no such one."""
        mean = statistics.fmean(getattr(each, name) for each in self.measured)
        return 100 * abs(getattr(self.prediction, name).value / mean - 1.0) if mean else 0.0

    def num_covered(self, name: str) -> int:
        """Runs that are in the interval."""
        estimate = getattr(self.prediction, name)
        return sum(estimate.covers(getattr(each, name)) for each in self.measured)


def recording(name: str, path: Path, settings: Settings) -> Trace:
    """The trace of one real run; the one at the path if there is one."""
    done = path.with_suffix(".done")
    if not done.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        run_afresh("asyncio", run_recorded, name, path, settings)
        done.touch()
    return Trace.read(path)


def rows_of(
    name: str, directory: Path, secs: float, recorded_secs: float, num_runs: int
) -> list[Row]:
    program = PROGRAMS[name]

    def run(settings: Settings, number: int, for_secs: float) -> Trace:
        place = directory / name / text_of(settings).replace(", ", "_") / f"{number}.pftrace"
        return recording(name, place, {**program.always, **settings, "secs": for_secs})

    recorded = [run(each, -1, recorded_secs) for each in program.recorded]
    plan, rows = Plan(recorded), []
    for trace in recorded:
        print(plan, plan.check(program.main, trace=trace), flush=True)
    for settings in program.planned:
        given = {**program.always, **settings, "secs": secs}
        prediction = plan.predict(program.main, allow_mismatch=True, **given)
        measured = [run(settings, number, secs).figures() for number in range(num_runs)]
        rows.append(Row(prediction, measured))
    return rows


def measure(name: str, directory: Path, secs: float, recorded_secs: float, num_runs: int) -> None:
    """How large errors are, and how many runs the intervals cover."""
    rows, lines = rows_of(name, directory, secs, recorded_secs, num_runs), []
    for is_beyond, label in ((False, "load recorded"), (True, "beyond it")):
        some = [each for each in rows if each.prediction.is_extrapolated is is_beyond]
        line, num_covered, total = [label, str(len(some))], 0, 0
        for figure in ("rate", "staleness"):
            found = [each for each in some if not math.isnan(each.error(figure))]
            errors = [each.error(figure) for each in found] or [math.nan]
            line.append(f"{statistics.median(errors):.1f} % ({max(errors):.1f} %)")
            num_covered += sum(each.num_covered(figure) for each in found)
            total += len(found) * num_runs
        lines.append([*line, f"{num_covered} of {total}"])
    off = [f"{figure} off by, median (most)" for figure in ("rate", "staleness")]
    print_table(name, ["", "settings", *off, "covered"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning")
    parser.add_argument("name", nargs="*", help=f"of a program: {', '.join(PROGRAMS)}")
    parser.add_argument("--secs", type=float, default=25.0, help="of each run that is planned")
    parser.add_argument("--recorded-secs", type=float, default=60.0, help="of each recording")
    parser.add_argument("--runs", type=int, default=5, help="real ones of each setting")
    parser.add_argument("--keep", type=Path, help="a directory for the recordings")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        args = chosen.keep or Path(temporary), chosen.secs, chosen.recorded_secs, chosen.runs
        parts = {each: partial(measure, each, *args) for each in PROGRAMS}
        parts_of(parts, chosen.name)


if __name__ == "__main__":
    main()
