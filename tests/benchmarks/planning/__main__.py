"""What plans predict, and what real runs of the same programs then give.

    python -m tests.benchmarks.planning [batching gradients seen_gradients pytorch]
        [--secs 25] [--recorded-secs 60] [--runs 5] [--keep DIR] [--json FILE]

Each program is recorded once at one or two settings. Others are then planned from that, and run
really, each run in a process of its own. With `--keep` the recordings stay in DIR, and those that
are there are not made again. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynchooks.planning import Figures, Plan, Prediction, Trace

from .._report import print_table
from ._programs import PROGRAMS, Program, Settings

ROOT = Path(__file__).parents[3]
MOST_SECS_MORE = 120.0
"""Beyond those that a program trains for, after which a run is given up."""


@dataclass(frozen=True)
class Row:
    """One setting of a program."""

    program: str
    settings: Settings
    prediction: Prediction
    measured: Sequence[Figures]

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in self.measured)

    def error(self, name: str) -> float:
        """Relative, of the prediction to the mean of all runs."""
        mean = self.mean(name)
        return float(getattr(self.prediction, name).value) / mean - 1.0 if mean else 0.0

    def num_covered(self, name: str) -> int:
        """Runs that are in the interval."""
        estimate = getattr(self.prediction, name)
        return sum(estimate.covers(getattr(each, name)) for each in self.measured)

    def has(self, name: str) -> bool:
        return all(getattr(each, name) == getattr(each, name) for each in self.measured)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "program": self.program,
            "settings": dict(self.settings),
            "is_extrapolated": self.prediction.is_extrapolated,
            "notes": self.prediction.notes,
            "measured": [each._asdict() for each in self.measured],
            "predicted": {
                name: getattr(self.prediction, name)._asdict()
                for name in ("rate", "staleness", "max_staleness", "idle_share")
            },
        }


def text_of(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as recorded"


def recording(name: str, directory: Path, settings: Settings) -> Trace:
    """The trace of one real run; the one in the directory if there is one."""
    if not (directory / "done").exists():
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", f"{__package__}._run_once", name, str(directory)]
        subprocess.run(
            [*command, json.dumps(dict(settings))],
            cwd=ROOT, check=True, timeout=settings["secs"] + MOST_SECS_MORE,
        )  # fmt: skip
        (directory / "done").touch()
    return Trace.read(directory / "run.pftrace")


def rows_of(
    name: str, program: Program, directory: Path, secs: float, recorded_secs: float, num_runs: int
) -> Iterator[Row]:
    def run(settings: Settings, number: int, for_secs: float) -> Trace:
        all_settings = {**program.always, **settings, "secs": for_secs}
        place = directory / name / text_of(settings).replace(", ", "_") / str(number)
        return recording(name, place, all_settings)

    recorded = [run(each, -1, recorded_secs) for each in program.recorded]
    plan = Plan(recorded)
    print(plan, flush=True)
    for trace in recorded:
        print(plan.check(program.main, trace=trace), flush=True)
    for settings in program.planned:
        begun = time.perf_counter()
        prediction = plan.predict(
            program.main, allow_mismatch=True, **{**program.always, **settings, "secs": secs}
        )
        planned_secs = time.perf_counter() - begun
        measured = [run(settings, number, secs).figures() for number in range(num_runs)]
        row = Row(name, settings, prediction, measured)
        print(f"{name}: {text_of(settings)} planned in {planned_secs:.1f} s", flush=True)
        yield row


def cells(row: Row) -> list[str]:
    found = [text_of(row.settings)]
    for name in ("rate", "staleness"):
        if not row.has(name):
            found += ["", "", "", ""]
            continue
        found += [
            f"{row.mean(name):.4g}",
            str(getattr(row.prediction, name)),
            f"{100 * row.error(name):+.1f} %",
            f"{row.num_covered(name)}/{len(row.measured)}",
        ]
    return [*found, "beyond what was recorded" if row.prediction.is_extrapolated else ""]


def summary(name: str, rows: Sequence[Row]) -> str:
    """One line: how large errors are, and how many runs the intervals cover."""
    parts = []
    for is_beyond, label in ((False, "recorded loads"), (True, "beyond")):
        some = [each for each in rows if each.prediction.is_extrapolated is is_beyond]
        if not some:
            continue
        errors = [abs(each.error("rate")) for each in some]
        with_staleness = [each for each in some if each.has("staleness")]
        stale = [abs(each.error("staleness")) for each in with_staleness]
        covered = sum(each.num_covered("rate") for each in some)
        covered += sum(each.num_covered("staleness") for each in with_staleness)
        total = sum(len(each.measured) for each in [*some, *with_staleness])
        text = f"rate off by {100 * statistics.median(errors):.1f} % (at most "
        text += f"{100 * max(errors):.1f} %)"
        if stale:
            text += f", staleness by {100 * statistics.median(stale):.1f} % (at most "
            text += f"{100 * max(stale):.1f} %)"
        share = 100 * covered / total
        parts.append(
            f"{label}: {len(some)} settings, {text}, {share:.0f} % of {total} figures covered"
        )
    return f"{name}: " + "; ".join(parts)


@contextmanager
def kept(directory: str | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory).absolute()
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


HEADER = [
    "setting", "updates/s", "predicted", "off", "covered", "staleness", "predicted", "off",
    "covered", "",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning")
    parser.add_argument("name", nargs="*", help=f"of a program: {', '.join(PROGRAMS)}")
    parser.add_argument("--secs", type=float, default=25.0, help="of each run that is planned")
    parser.add_argument("--recorded-secs", type=float, default=60.0, help="of each recording")
    parser.add_argument("--runs", type=int, default=5, help="real ones of each setting")
    parser.add_argument("--keep", help="a directory for the recordings")
    parser.add_argument("--json", help="a file for all figures")
    chosen = parser.parse_args()
    if unknown := set(chosen.name) - set(PROGRAMS):
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    logging.disable(logging.WARNING)
    lines, everything = [], []
    with kept(chosen.keep) as directory:
        for name in chosen.name or PROGRAMS:
            rows = list(
                rows_of(
                    name, PROGRAMS[name], directory, chosen.secs, chosen.recorded_secs, chosen.runs
                )
            )
            print_table(name, HEADER, [cells(each) for each in rows])
            lines.append(summary(name, rows))
            print(lines[-1], flush=True)
            everything += [each.as_dict() for each in rows]
    print("", *lines, sep="\n")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
