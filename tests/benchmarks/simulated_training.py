"""Simulated training beside the same model written in SimPy: CPU time for each gradient.

    python -m tests.benchmarks.simulated_training [workers ...]

Workers repeat: pull, compute for an exponential time, push; ten gradients of any version make an
update, which their workers wait for (K-async with K = 10). Ratios are of medians over interleaved
runs; a ratio above 1 means that asynchooks is the faster one. What making the workers costs is in
them, on both sides. "Without parameters" both sides count only; else both compute the gradients
of a quadratic function of 100 parameters, and keep their mean.
"""

import random
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from asynchooks.protocols import KAsync
from asynchooks.simulation import Exponential, Simulation

from ._report import is_installed, median_ratio, print_table

NUM_ROUNDS, K, RATE = 3, 10, 0.1
PARAMETERS, TARGET = np.linspace(0.0, 1.0, 100), np.ones(100)


def in_cluster(num_workers: int, updates: int, parameters: Any) -> int:
    """Trains so many workers until so many updates have been made."""
    options, training = dict[str, Any](), dict[str, Any]()
    if parameters is not None:
        options = {"parameters": parameters, "learning_rate": RATE}
        training = {"gradient": lambda parameters, worker: parameters - TARGET}
    cluster = Simulation(seed=1, backend="turbo").cluster(
        num_workers, protocol=KAsync(K), compute=Exponential(1.0), **options
    )
    return cluster.run(updates=updates, **training).applied // K


class InSimPy:
    """The training that a user of SimPy would write: counts, and perhaps parameters."""

    def __init__(self, num_workers: int, updates: int, parameters: Any) -> None:
        import simpy

        self.environment = simpy.Environment()
        self.parameters = parameters
        self.version, self.updates = 0, updates
        self.staleness = Counter[int]()
        self.collected: list[tuple[int, Any]] = []
        self.next_update = self.environment.event()
        self.is_over = self.environment.event()
        self.secs_computed = [0.0] * num_workers
        self.secs_waited = [0.0] * num_workers
        for worker in range(num_workers):
            self.environment.process(self.work(worker, random.Random(worker)))
        self.environment.run(self.is_over)

    def work(self, worker: int, rng: random.Random) -> Any:
        environment = self.environment
        while True:
            parameters, version, begun = self.parameters, self.version, environment.now
            yield environment.timeout(rng.expovariate(1.0))
            self.secs_computed[worker] += environment.now - begun
            self.collected.append((version, None if parameters is None else parameters - TARGET))
            if len(self.collected) == K:
                self.update()
            else:
                begun = environment.now
                yield self.next_update
                self.secs_waited[worker] += environment.now - begun

    def update(self) -> None:
        versions, gradients = zip(*self.collected, strict=True)
        for version in versions:
            self.staleness[self.version - version] += 1
        if self.parameters is not None:
            self.parameters = self.parameters - RATE * (sum(gradients) / K)
        self.collected = []
        self.version += 1
        event, self.next_update = self.next_update, self.environment.event()
        event.succeed()
        if self.version == self.updates:
            self.is_over.succeed()


def in_simpy(num_workers: int, updates: int, parameters: Any) -> int:
    return InSimPy(num_workers, updates, parameters).version


def ratio(num_workers: int, parameters: Any) -> str:
    """The peer's CPU seconds over ours."""
    updates = max(5000, num_workers)
    secs: dict[Any, list[float]] = {in_simpy: [], in_cluster: []}
    for _ in range(NUM_ROUNDS):
        for run, times in secs.items():
            begun = time.process_time()
            assert run(num_workers, updates, parameters) == updates
            times.append(time.process_time() - begun)
    return median_ratio(*secs.values())


if __name__ == "__main__":
    if not is_installed("simpy"):
        sys.exit("SimPy is not installed; install the extra bench")
    rows = [
        [f"{num:,}", ratio(num, None), ratio(num, PARAMETERS)]
        for num in [int(each) for each in sys.argv[1:]] or [100, 1_000]
    ]
    header = ["workers", "without parameters", "with gradients"]
    print_table("CPU seconds, SimPy / asynchooks", header, rows)
