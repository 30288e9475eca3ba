"""Stale gradients act like momentum: asynchronous SGD beside SGD that has momentum explicitly.

P workers train asynchronously on a quadratic in virtual time, with exponential times. In the mean
their parameters move as those of one worker with momentum 1 - 1/P and the learning rate / P.
Source: Mitliagkas et al. 2016, "Asynchrony begets Momentum, with an Application to Deep Learning".

It prints two rows for each number of workers: the simulated path, and that with momentum.
"""

from __future__ import annotations

import argparse

import numpy as np

from asynchooks.simulation import Exponential, Simulation

RATE, UPDATES, RUNS = 0.15, 60, 200
SHOWN = (5, 10, 20, 40, 60)


def asynchronous(num_workers: int, seed: int) -> list[float]:
    """The path of x under x^2 / 2 from x = 1, in the mean of many runs."""
    total = np.zeros(UPDATES + 1)
    for number in range(RUNS):
        cluster = Simulation(seed * RUNS + number, "turbo").cluster(
            num_workers, parameters=np.ones(1), compute=Exponential(1.0), learning_rate=RATE
        )
        report = cluster.run(gradient=lambda x, _: x, updates=UPDATES, loss=lambda x: float(x[0]))
        total += [x for _, _, x in report.losses]
    return (total / RUNS).tolist()  # type: ignore[no-any-return]


def with_momentum(num_workers: int) -> list[float]:
    """One worker: x(t+1) = x(t) + momentum (x(t) - x(t-1)) - rate / P x(t).

    It begins with the speed that P gradients of x = 1 give, which all workers send first.
    """
    momentum = 1 - 1 / num_workers
    path = [1.0 + RATE, 1.0]
    while len(path) < UPDATES + 2:
        speed = momentum * (path[-1] - path[-2]) - RATE / num_workers * path[-1]
        path.append(path[-1] + speed)
    return path[1:]


def main(seed: int) -> None:
    print(f"the mean of {RUNS} simulated runs beside one worker with momentum", flush=True)
    print("workers  momentum  x after updates:" + "".join(f"{each:8d}" for each in SHOWN))
    for num_workers in (1, 4, 8):
        momentum = 1 - 1 / num_workers
        paths = {"asynchronous": asynchronous(num_workers, seed)}
        paths["momentum"] = with_momentum(num_workers)
        for name, values in paths.items():
            cells = "".join(f"{values[each]:8.3f}" for each in SHOWN)
            print(f"{num_workers:7d} {momentum:9.3f}  {name:16s}{cells}", flush=True)
    print("The more workers, the more momentum: their mean path is that of one worker with it.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    main(parser.parse_args().seed)
