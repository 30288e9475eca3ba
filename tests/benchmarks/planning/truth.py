"""How often intervals hold, and how far predictions are off, where the truth is known.

    python -m tests.benchmarks.planning.truth [rollouts shared_rollouts gradients opaque_gradients]
        [--recordings 40] [--secs 25] [--recorded-secs 60]

A run in virtual time, whose services are given, stands for a recording. What is planned from it is
compared with further runs of the same services. Nothing is measured: figures are of virtual time,
and the same on every machine.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asynchooks.planning import Dependence, Plan, Service

from .._report import parts_of, print_table
from ._programs import PROGRAMS, Program
from .programs import batching, gradients

NUM_SAMPLES = 20_000
FIRST_HELD_OUT_SEED = 10_000


class Result(NamedTuple):
    """One figure of one setting, predicted from one recording."""

    name: str
    error: float
    is_covered: bool


def service(
    name: str, samples: Any, dependence: Dependence = Dependence.FREE, **options: Any
) -> Service:
    num = len(samples)
    options.setdefault("sizes", np.full(num, math.nan))
    options.setdefault("workers", np.full(num, -1))
    return Service(name, dependence, samples, load_high=1e9, **options)


def truths() -> Mapping[str, tuple[Program, tuple[Service, ...]]]:
    """A program, and what its work really takes."""
    rng = np.random.default_rng(1)
    mean_of_log = math.log(batching.MEAN_TOKENS) - batching.SIGMA**2 / 2
    tokens = np.maximum(1.0, rng.lognormal(mean_of_log, batching.SIGMA, NUM_SAMPLES).round())
    first = batching.TICK_SECS + batching.SECS_PER_REQUEST
    slowdown = batching.SECS_PER_REQUEST / first
    learned = batching.STEP_SECS + batching.STEP_SECS_PER_TOKEN * tokens[:2000] * 4
    learn = service("learn", learned, sizes=tokens[:2000] * 4)
    free = service("rollout", tokens * first, sizes=tokens)
    shared = service("rollout", tokens * first, Dependence.SHARED, sizes=tokens, slowdown=slowdown)
    workers = np.arange(NUM_SAMPLES) % 4
    factors = np.where(workers == 3, gradients.SLOWER, 1.0)
    compute = service(
        "compute", gradients.COMPUTE_SECS * factors * rng.gamma(6.0, 1 / 6.0, NUM_SAMPLES),
        workers=workers, is_own=True,
    )  # fmt: skip
    served = gradients.SERVICE_SECS * rng.uniform(0.7, 1.3, NUM_SAMPLES)
    opaque = service("push", served, Dependence.QUEUE)
    return {
        "rollouts": (PROGRAMS["batching"], (free, learn)),
        "shared_rollouts": (PROGRAMS["batching"], (shared, learn)),
        "gradients": (PROGRAMS["seen_gradients"], (compute, service("service", served))),
        "opaque_gradients": (PROGRAMS["gradients"], (compute, opaque)),
    }


def results_of(name: str, secs: float, recorded_secs: float, number: int) -> list[Result]:
    """All settings, predicted from the recording of this number."""
    logging.disable(logging.WARNING)
    program, services = truths()[name]
    real = Plan([], services={each.name: each for each in services})
    recorded = [
        real.run(program.main, seed=1000 * place + number, secs=recorded_secs,
                 **program.always, **settings)
        for place, settings in enumerate(program.recorded)
    ]  # fmt: skip
    plan, found = Plan(recorded), []
    for settings in program.planned:
        given = {**program.always, **settings, "secs": secs}
        prediction = plan.predict(program.main, allow_mismatch=True, seed=number, **given)
        seed = FIRST_HELD_OUT_SEED + number
        held_out = real.run(program.main, seed=seed, **given).figures()
        for figure in ("rate", "staleness"):
            truly, estimate = getattr(held_out, figure), getattr(prediction, figure)
            if not math.isnan(truly) and truly > 0:
                error, is_covered = estimate.value / truly - 1.0, estimate.covers(truly)
                found.append(Result(figure, error, is_covered))
    return found


def measure(name: str, num_recordings: int, secs: float, recorded_secs: float) -> None:
    with multiprocessing.get_context("spawn").Pool() as pool:
        plan = partial(results_of, name, secs, recorded_secs)
        results = [each for part in pool.imap(plan, range(num_recordings)) for each in part]
    cells = []
    for figure in ("rate", "staleness"):
        some = [each for each in results if each.name == figure]
        covered = statistics.fmean(each.is_covered for each in some)
        error = statistics.median(abs(each.error) for each in some)
        cells += [f"{100 * covered:.0f} % of {len(some)}", f"{100 * error:.1f} %"]
    header = ["", "rates covered", "off by, median", "staleness covered", "off by, median"]
    print_table(f"{num_recordings} recordings", header, [[name, *cells]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning.truth")
    parser.add_argument("name", nargs="*", help=f"of a program: {', '.join(truths())}")
    parser.add_argument("--recordings", type=int, default=40)
    parser.add_argument("--secs", type=float, default=25.0, help="of each run that is planned")
    parser.add_argument("--recorded-secs", type=float, default=60.0, help="of each recording")
    chosen = parser.parse_args()
    args = chosen.recordings, chosen.secs, chosen.recorded_secs
    parts_of({name: partial(measure, name, *args) for name in truths()}, chosen.name)


if __name__ == "__main__":
    main()
