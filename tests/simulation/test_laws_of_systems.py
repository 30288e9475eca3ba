"""Laws of queues, crashes, checkpoints and noisy gradients, each with its closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import (
    Asynchronous,
    Protocol,
    Synchronous,
)
from asynchooks.simulation import (
    Constant,
    Crashes,
    Delay,
    Exponential,
    Simulation,
    Worker,
)

from .clusters import BACKENDS, P, check_mean, new_cluster, secs_per_update, trained


def times_in_queue(
    service: Delay, num_servers: int, arrivals: float, customers: int
) -> list[float]:
    simulation = Simulation(3, "turbo")
    times: list[float] = []

    async def main() -> None:
        queue = simulation.queue(service, num_servers=num_servers)
        gaps = simulation.streams.delays(0, "arrivals", Exponential(1 / arrivals))

        async def customer() -> None:
            times.append(await queue.serve())

        for _ in range(customers):
            await simulation.sleep(gaps.next())
            simulation.start(customer)
        await simulation.quiescence()

    simulation.run(main)
    return times


def erlang_wait(servers: int, load: float) -> float:
    """Mean seconds of waiting with services of 1 s, by Erlang's second formula."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    first = sum(load**n / math.factorial(n) for n in range(servers))
    return last / (first + last) / (servers - load)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_waiting_for_several_servers_is_that_of_m_m_c(servers: int) -> None:
    times = times_in_queue(Exponential(1.0), servers, 0.7 * servers, 8000)
    check_mean(times[200:], 1.0 + erlang_wait(servers, 0.7 * servers))


def test_waiting_with_constant_service_is_that_of_m_d_1() -> None:
    """Pollaczek and Khinchine: half the wait of exponential services."""
    times = times_in_queue(Constant(1.0), 1, 0.8, 10_000)
    check_mean(times[200:], 1.0 + 0.8 / (2 * (1 - 0.8)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("service", [0.05, 0.5])
def test_workers_on_one_server_are_a_closed_queue(backend: Any, service: float) -> None:
    """The machine repair model: weights P! / (P - n)! (service / compute)^n of n in the queue."""
    cluster = trained(backend, Asynchronous(), 2000, service=Exponential(service))
    weights = [math.perm(P, n) * service**n for n in range(P + 1)]
    busy = 1 - weights[0] / sum(weights)
    check_mean(secs_per_update(cluster)[80:], service / busy)


def test_crashes_make_a_task_as_long_as_its_work_has_to_be_repeated() -> None:
    task, mtbf, repair = 1.5, 2.0, 0.5
    cluster = trained("turbo", Asynchronous(), 6000, compute=Constant(task),
                      failures=[Crashes(Exponential(mtbf), Exponential(repair))])  # fmt: skip
    num_failures = math.expm1(task / mtbf)
    check_mean(secs_per_update(cluster), (mtbf + repair) * num_failures / P)


def secs_of_segments(
    work: float, save: float, restart: float, mtbf: float, num: int
) -> list[float]:
    """How long each took, of a program that saves after each, and resumes from what it saved."""
    failures = [Crashes(Exponential(mtbf), Constant(0.0))]
    cluster = new_cluster(1, seed=5, failures=failures)
    ends = [0.0]
    num_starts = 0

    async def program(worker: Worker) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 1:
            await worker.compute(restart)
        while len(ends) <= num:
            await worker.compute(work + save)
            ends.append(worker.cluster.simulation.now)

    cluster.run(program)
    return np.diff(ends).tolist()


def daly(work: float, save: float, restart: float, mtbf: float) -> float:
    """Daly 2006: expected seconds of a segment, also where failures hit the restart."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf)


@pytest.mark.parametrize("work", [0.5, 2.0])
def test_checkpointing_takes_the_time_that_daly_says(work: float) -> None:
    check_mean(secs_of_segments(work, 0.25, 0.5, 3.0, 4000), daly(work, 0.25, 0.5, 3.0))


@pytest.mark.parametrize(
    ("mtbf", "best"), [(24 * 60.0, 116.690), (6 * 60.0, 56.713), (15.0, 9.141)], ids=str
)
def test_the_best_checkpoint_interval_is_the_published_one(mtbf: float, best: float) -> None:
    """Minutes, 5 of them for a save. The same failures hit all intervals.

    Steps of the logarithm of the interval; a parabola through the costs has its vertex at the best.
    """
    num_failures = 1500
    steps = np.log([0.6, 0.8, 1.0, 1.25, 1.6])
    costs = []
    for step in steps:
        work = best * math.exp(step)
        num = int(num_failures * mtbf / daly(work, 5.0, 0.0, mtbf))
        costs.append(float(np.mean(secs_of_segments(work, 5.0, 0.0, mtbf, num))) / work)
    square, slope, _ = np.polyfit(steps, costs, 2)
    assert square > 0
    assert abs(slope / (2 * square)) < 0.15  # the vertex, in steps of the logarithm


def squares_of(protocol: Protocol, num_workers: int, rate: float) -> list[float]:
    """The mean square of many coordinates after each update, of noisy gradients of x^2 / 2."""
    num_coordinates = 500
    cluster = new_cluster(
        num_workers, seed=8, protocol=protocol, parameters=np.zeros(num_coordinates),
        learning_rate=rate,
    )  # fmt: skip
    cluster.run(
        gradient=lambda x, worker: x + worker.rng.normal(size=num_coordinates),
        loss=lambda x: float(np.mean(x**2)),
        updates=2000,
    )
    return [loss for _, _, loss in cluster.losses][600:]


@pytest.mark.parametrize("num_workers", [1, 4])
def test_synchronous_gradients_divide_the_noise_by_the_workers(num_workers: int) -> None:
    rate = 0.2
    check_mean(squares_of(Synchronous(), num_workers, rate), rate / (2 - rate) / num_workers)


@pytest.mark.parametrize(("num_workers", "rate"), [(1, 0.2), (4, 0.1), (8, 0.05)])
def test_noise_of_asynchronous_gradients_grows_with_their_staleness(
    num_workers: int, rate: float
) -> None:
    """Each update is by any worker alike, with the gradient of where that had pulled.

    In the steady state the pulled x have the variance A of x, and the covariance B with it, where
    B (P rate + 1) = A (1 + rate); and A (2 (1 + rate) / (1 + P rate) - rate) = rate.
    """
    expected = rate / (2 * (1 + rate) / (1 + num_workers * rate) - rate)
    check_mean(squares_of(Asynchronous(), num_workers, rate), expected)
