"""Gradual start in virtual time: worker i begins when step int(K log(i + 1)) is reached.

Workers that all begin at once push as many gradients of one and the same start, and the parameters
overshoot. Here each waits by GlobalStepWaiterHook, as in real training; only time is simulated. A
quadratic with noise is trained.

It prints a row for each K: when all workers train, the highest and the last loss, and the time.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

import asynchooks as ah
from asynchooks.simulation import Exponential, Report, Simulation, Worker

NUM_WORKERS, UPDATES, RATE = 64, 2000, 0.1
CURVATURES = np.linspace(0.5, 1.0, 20)


def gradient(parameters: Any, worker: Worker) -> Any:
    return CURVATURES * parameters + 0.1 * worker.rng.normal(size=parameters.shape)


def loss(parameters: Any) -> float:
    return float(0.5 * np.sum(CURVATURES * parameters**2))


def train(k: float, seed: int, backend: Any) -> tuple[Report, list[float]]:
    """The report, and when each worker had finished its first gradient."""
    simulation = Simulation(seed, backend)
    cluster = simulation.cluster(
        NUM_WORKERS,
        parameters=np.ones(CURVATURES.shape),
        compute=Exponential(1.0),
        learning_rate=RATE,
    )
    begun = [math.nan] * NUM_WORKERS

    async def program(worker: Worker) -> None:
        waiter = ah.GlobalStepWaiterHook(wait_until_step=int(k * math.log(worker.index + 1)))
        async with worker.session([waiter], gradient=gradient) as session:
            while not session.should_stop():
                await session.run("computed")
                if math.isnan(begun[worker.index]):
                    begun[worker.index] = simulation.now

    return cluster.run(program, updates=UPDATES, loss=loss), begun


def main(seed: int, backend: str) -> None:
    print(f"{NUM_WORKERS} workers make {UPDATES} updates in virtual time, for each K", flush=True)
    print("  K   all workers train after   highest loss   last loss   virtual seconds")
    for k in (0.0, 20.0, 80.0, 160.0):
        report, begun = train(k, seed, backend)
        losses = [value for _, _, value in report.losses]
        print(
            f"{k:3.0f} {max(begun):21.1f} s {max(losses):16.2f} {np.mean(losses[-100:]):11.3f} "
            f"{report.secs:17.1f}",
            flush=True,
        )
    print("A gradual start takes its time, and keeps the first steps from overshooting.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--backend", choices=["asyncio", "trio", "turbo"], default="turbo")
    arguments = parser.parse_args()
    main(arguments.seed, arguments.backend)
