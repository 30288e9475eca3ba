"""What plans predict, and what real runs of the same programs then give.

    python -m tests.benchmarks.planning [batching gradients seen_gradients pytorch] [--secs 25]

Each program is recorded once at one or two settings. Others are then planned from that, and run
really, each run in a process of its own. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from functools import partial
from pathlib import Path

from asynchooks.planning import Plan, Trace

from .._report import parts_of, run_afresh
from ._programs import PROGRAMS, Judged, Settings, judged, print_judged, run_recorded

RECORDED_SECS, NUM_RUNS = 60.0, 5


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
