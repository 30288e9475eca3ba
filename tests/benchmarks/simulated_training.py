"""Simulated training beside the same model written in SimPy: CPU time for each gradient.

    python -m tests.benchmarks.simulated_training [workers ...]

Workers repeat: pull, compute for an exponential time, push; ten gradients of any version make an
update, which their workers wait for (K-async with K = 10). Ratios are of medians over interleaved
runs; a ratio above 1 means that asynchooks is the faster one. What making the workers costs is in
them, on both sides. "Without parameters" both sides count only; else both compute the gradients
of a quadratic function of 100 parameters, and keep their mean.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from asynchooks.protocols import KAsync
from asynchooks.simulation import Exponential, Simulation

from ._report import is_installed, print_table

NUM_ROUNDS = 3
K = 10
PARAMETERS = np.linspace(0.0, 1.0, 100)
TARGET = np.ones(100)
RATE = 0.1

Contender = Callable[[int, int], Any]
"""Trains so many workers until so many updates have been made."""


def in_cluster(num_workers: int, updates: int) -> None:
    simulation = Simulation(seed=1, backend="turbo")
    cluster = simulation.cluster(num_workers, protocol=KAsync(K), compute=Exponential(1.0))
    report = cluster.run(updates=updates)
    assert report.applied == K * updates


def in_cluster_with_gradients(num_workers: int, updates: int) -> None:
    simulation = Simulation(seed=1, backend="turbo")
    cluster = simulation.cluster(
        num_workers,
        parameters=PARAMETERS,
        protocol=KAsync(K),
        compute=Exponential(1.0),
        learning_rate=RATE,
    )
    report = cluster.run(gradient=lambda parameters, worker: parameters - TARGET, updates=updates)
    assert report.applied == K * updates


class Model:
    """The training that a user of SimPy would write: counts, and perhaps parameters."""

    def __init__(self, num_workers: int, updates: int, parameters: Any) -> None:
        import simpy

        self.environment = simpy.Environment()
        self.parameters = parameters
        self.version = 0
        self.updates = updates
        self.staleness: dict[int, int] = {}
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
        for version, _ in self.collected:
            staleness = self.version - version
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        if self.parameters is not None:
            total = self.collected[0][1]
            for _, gradient in self.collected[1:]:
                total = total + gradient
            self.parameters = self.parameters - RATE * (total / K)
        self.collected = []
        self.version += 1
        event, self.next_update = self.next_update, self.environment.event()
        event.succeed()
        if self.version == self.updates:
            self.is_over.succeed()


def in_simpy(num_workers: int, updates: int) -> None:
    assert Model(num_workers, updates, None).version == updates


def in_simpy_with_gradients(num_workers: int, updates: int) -> None:
    assert Model(num_workers, updates, PARAMETERS).version == updates


def cpu_secs(run: Contender, num_workers: int, updates: int) -> float:
    begun = time.process_time()
    run(num_workers, updates)
    return time.process_time() - begun


def ratio(ours: Contender, peer: Contender, num_workers: int, updates: int) -> float:
    """The peer's CPU seconds over ours."""
    secs: list[tuple[float, float]] = []
    for _ in range(NUM_ROUNDS):
        secs.append((cpu_secs(ours, num_workers, updates), cpu_secs(peer, num_workers, updates)))
    mine = statistics.median(each for each, _ in secs)
    return statistics.median(each for _, each in secs) / mine


def main() -> None:
    if not is_installed("simpy"):
        sys.exit("SimPy is not installed; install the extra bench")
    rows = []
    for num_workers in [int(each) for each in sys.argv[1:]] or [100, 10_000]:
        updates = max(5000, num_workers)
        plain = ratio(in_cluster, in_simpy, num_workers, updates)
        real = ratio(in_cluster_with_gradients, in_simpy_with_gradients, num_workers, updates)
        rows.append([f"{num_workers:,}", f"{plain:.2f}", f"{real:.2f}"])
    print_table(
        "CPU seconds, SimPy / asynchooks", ["workers", "without parameters", "with gradients"], rows
    )


if __name__ == "__main__":
    main()
