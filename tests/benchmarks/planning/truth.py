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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from asynchooks.planning import Dependence, Plan, Service

from .._report import print_table
from ._programs import PROGRAMS, Program, Settings
from .programs import batching, gradients

NUM_SAMPLES = 20_000
FIRST_HELD_OUT_SEED = 10_000


class Result(NamedTuple):
    """One figure of one setting, predicted from one recording."""

    setting: int
    name: str
    error: float
    is_covered: bool
    is_extrapolated: bool


@dataclass(frozen=True)
class Truth:
    """A program, and what its work really takes."""

    program: Program
    services: tuple[Service, ...]
    always: Settings = field(default_factory=dict)

    def plan(self) -> Plan:
        return Plan([], services={each.name: each for each in self.services})


def service(
    name: str, samples: Any, dependence: Dependence = Dependence.FREE, **options: Any
) -> Service:
    num = len(samples)
    options.setdefault("sizes", np.full(num, math.nan))
    options.setdefault("workers", np.full(num, -1))
    return Service(name, dependence, samples, load_high=1e9, **options)


def truths() -> Mapping[str, Truth]:
    rng = np.random.default_rng(1)
    tokens = rng.lognormal(
        math.log(batching.MEAN_TOKENS) - batching.SIGMA**2 / 2, batching.SIGMA, NUM_SAMPLES
    ).round()
    tokens = np.maximum(1.0, tokens)
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
        "rollouts": Truth(PROGRAMS["batching"], (free, learn)),
        "shared_rollouts": Truth(PROGRAMS["batching"], (shared, learn)),
        "gradients": Truth(
            PROGRAMS["gradients"], (compute, service("service", served)), {"is_seen": True}
        ),
        "opaque_gradients": Truth(PROGRAMS["gradients"], (compute, opaque)),
    }


def results_of(job: tuple[str, int, float, float]) -> list[Result]:
    """All settings, predicted from the recording of this number."""
    name, number, secs, recorded_secs = job
    logging.disable(logging.WARNING)
    truth = truths()[name]
    program, real = truth.program, truth.plan()
    recorded = [
        real.run(program.main, seed=1000 * place + number, secs=recorded_secs,
                 **truth.always, **settings)
        for place, settings in enumerate(program.recorded)
    ]  # fmt: skip
    plan, found = Plan(recorded), []
    for place, settings in enumerate(program.planned):
        given = {**truth.always, **settings, "secs": secs}
        prediction = plan.predict(program.main, allow_mismatch=True, seed=number, **given)
        seed = FIRST_HELD_OUT_SEED + number
        held_out = real.run(program.main, seed=seed, **given).figures()
        for figure in ("rate", "staleness"):
            truly, estimate = getattr(held_out, figure), getattr(prediction, figure)
            if not math.isnan(truly) and truly > 0:
                found.append(
                    Result(
                        place, figure, estimate.value / truly - 1.0, estimate.covers(truly),
                        prediction.is_extrapolated,
                    )
                )  # fmt: skip
    return found


def row_of(label: str, results: Sequence[Result]) -> list[str]:
    cells = [label]
    for figure in ("rate", "staleness"):
        some = [each for each in results if each.name == figure]
        if not some:
            cells += ["", ""]
            continue
        covered = statistics.fmean(each.is_covered for each in some)
        error = statistics.median(abs(each.error) for each in some)
        cells += [f"{100 * covered:.0f} % of {len(some)}", f"{100 * error:.1f} %"]
    share = statistics.fmean(each.is_extrapolated for each in results)
    return [*cells, f"{100 * share:.0f} %"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning.truth")
    known = [*truths()]
    parser.add_argument("name", nargs="*", help=f"of a program: {', '.join(known)}")
    parser.add_argument("--recordings", type=int, default=40)
    parser.add_argument("--secs", type=float, default=25.0, help="of each run that is planned")
    parser.add_argument("--recorded-secs", type=float, default=60.0, help="of each recording")
    chosen = parser.parse_args()
    if unknown := set(chosen.name) - set(known):
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    header = ["", "rate covered", "median error", "staleness covered", "median error", "flagged"]
    for name in chosen.name or known:
        jobs = [
            (name, number, chosen.secs, chosen.recorded_secs) for number in range(chosen.recordings)
        ]
        with multiprocessing.get_context("spawn").Pool() as pool:
            results = [each for part in pool.imap(results_of, jobs) for each in part]
        planned = truths()[name].program.planned
        rows = [
            row_of(
                ", ".join(f"{key}={value}" for key, value in settings.items()),
                [each for each in results if each.setting == place],
            )
            for place, settings in enumerate(planned)
        ]
        print_table(
            f"{name}: {chosen.recordings} recordings", header, [*rows, row_of("all", results)]
        )


if __name__ == "__main__":
    main()
