"""How often intervals hold, and how far predictions are off, where the truth is known.

    python -m tests.benchmarks.planning.truth [rollouts shared_rollouts gradients opaque_gradients]

A run in virtual time, whose services are given, stands for a recording. What is planned from it is
compared with further runs of the same services. Nothing is measured: figures are of virtual time,
and the same on every machine.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from asynchooks.planning import Dependence, Plan, Service

from .._report import parts_of
from ._programs import PROGRAMS, Judged, Program, judged, print_judged
from .programs import batching, gradients

NUM_SAMPLES, NUM_RECORDINGS, SECS, RECORDED_SECS = 20_000, 40, 25.0, 60.0
FIRST_HELD_OUT_SEED = 10_000


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


def found_by(name: str, number: int) -> list[Judged]:
    """All settings, predicted from the recording of this number."""
    logging.disable(logging.WARNING)
    program, services = truths()[name]
    real = Plan([], services={each.name: each for each in services})
    recorded = [
        real.run(
            program.main, seed=1000 * place + number,
            **{**program.always, **settings, "secs": RECORDED_SECS},
        )
        for place, settings in enumerate(program.recorded)
    ]  # fmt: skip
    plan, found = Plan(recorded), list[Judged]()
    for settings in program.planned:
        given = {**program.always, **settings, "secs": SECS}
        prediction = plan.predict(program.main, allow_mismatch=True, seed=number, **given)
        held_out = real.run(program.main, seed=FIRST_HELD_OUT_SEED + number, **given)
        found += judged(prediction, [held_out.figures()])
    return found


def measure(name: str) -> None:
    with multiprocessing.get_context("spawn").Pool() as pool:
        parts = pool.imap(partial(found_by, name), range(NUM_RECORDINGS))
        found = [each for part in parts for each in part]
    print_judged(f"{NUM_RECORDINGS} recordings", {name: found})


if __name__ == "__main__":
    parts_of({name: partial(measure, name) for name in truths()}, sys.argv[1:])
