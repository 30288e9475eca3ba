"""Published results come out of simulated clusters, within four standard errors at fixed seeds.

The standard error is that of the means of consecutive batches, which outlasts correlations.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest

from asynchooks import GlobalStepWaiterHook
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import Constant, Crashes, Exponential, PerWorker, Simulation

from .clusters import BACKENDS, NUM_BATCHES, P, check_mean, secs_per_update, trained
from .order_statistics import harmonic


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (Synchronous(), harmonic(P)),
        (KSync(6), harmonic(P) - harmonic(P - 6)),
        (KBatchSync(6), 6 / P),
        (KAsync(6), harmonic(P) - harmonic(P - 6)),
        (KBatchAsync(6), 6 / P),
        (Asynchronous(), 1 / P),
        (StaleSynchronous(0), harmonic(P) / P),
    ],
    ids=str,
)
def test_seconds_of_an_update(backend: Any, protocol: Protocol, expected: float) -> None:
    """Dutta et al. 2018; for stale synchronous parallel Ho et al. 2013."""
    check_mean(secs_per_update(trained(backend, protocol, 3000)), expected)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rate_of_two_workers_with_bounded_staleness(backend: Any, staleness: int) -> None:
    cluster = trained(backend, StaleSynchronous(staleness), 6000, num_workers=2)
    rate_of_one = (2 * staleness + 2) / (2 * staleness + 3)
    check_mean(secs_per_update(cluster), 1 / (2 * rate_of_one))


def test_staleness_of_asynchronous_updates_is_geometric(backend: Any) -> None:
    """Mitliagkas et al. 2016: mean P - 1, variance P (P - 1), and 1 / P of them are fresh."""
    cluster = trained(backend, Asynchronous(), 12_000)
    found = [float(each.staleness) for each in cluster.timeline.pushes][200:]
    check_mean(found, P - 1)
    check_mean([(each - (P - 1)) ** 2 for each in found], P * (P - 1))
    check_mean([float(each == 0) for each in found], 1 / P)


@pytest.mark.parametrize("loses_work", [True, False])
def test_crashes_cost_their_share_of_the_updates(backend: Any, loses_work: bool) -> None:
    crashes = Crashes(Exponential(10.0), Exponential(2.0), loses_work=loses_work)
    cluster = trained(backend, Asynchronous(), 12_000, failures=[crashes])
    check_mean(secs_per_update(cluster), (1 / 10 + 1 / 2) / (P * 1 / 2))


@pytest.mark.parametrize(("gradients", "secs"), [(1, 1.0), (5, 3.0), (10, 6.0), (20, 10.0)])
def test_fixed_speeds_bring_gradients_at_exactly_their_times(
    backend: Any, gradients: int, secs: float
) -> None:
    speeds = PerWorker([Constant(each) for each in (1.0, 2.0, 3.0, 4.0)])
    cluster = trained(backend, Asynchronous(), gradients, num_workers=4, compute=speeds)
    assert cluster.report().secs == secs


@pytest.mark.parametrize(
    ("delay", "largest"), [(1, 1.0), (3, 0.445042), (7, 0.209057)], ids=["1", "3", "7"]
)
def test_largest_learning_rate_that_is_stable_with_a_constant_delay(
    backend: Any, delay: int, largest: float
) -> None:
    """2 sin(pi / (2 (2 d + 1))), for a quadratic of curvature 1."""

    def distance(rate: float) -> float:
        cluster = Simulation(backend=backend).cluster(
            delay + 1, parameters=np.ones(1), compute=Constant(1.0), learning_rate=rate
        )
        cluster.run(gradient=lambda parameters, _: parameters, updates=2000)
        return abs(float(cluster.server.parameters[0]))

    assert distance(0.97 * largest) < 1e-2
    assert distance(1.03 * largest) > 1e2


def test_waiting_for_one_server_is_that_of_m_m_1(backend: Any) -> None:
    """Load 0.8: 1 / (1 - 0.8) seconds in the system, where a service takes 1 s."""
    simulation = Simulation(seed=3, backend=backend)
    times: list[float] = []

    async def main() -> None:
        queue = simulation.queue(Exponential(1.0))
        arrivals = simulation.streams.delays(0, "arrivals", Exponential(1.25))

        async def customer() -> None:
            times.append(await queue.serve())

        for _ in range(20_000):
            await simulation.sleep(arrivals.next())
            simulation.start(customer)
        await simulation.quiescence()

    simulation.run(main)
    check_mean(times[100:], 5.0)


def test_gradual_start_by_the_logarithm_of_the_worker(backend: Any) -> None:
    """Worker i waits for int(100 log(i + 1)): it starts after sum (thr_j - thr_j-1) / j."""
    thresholds = [int(100 * log(index + 1)) for index in range(P)]
    assert thresholds == [0, 69, 109, 138, 160, 179, 194, 207]
    expected = sum((thresholds[j] - thresholds[j - 1]) / j for j in range(1, P))
    starts = []
    for seed in range(NUM_BATCHES * 2):
        cluster = Simulation(seed, backend).cluster(P)

        async def program(worker: Any) -> None:
            waiter = GlobalStepWaiterHook(wait_until_step=thresholds[worker.index])
            async with worker.session([waiter]) as session:
                while not session.should_stop():
                    await session.run("computed")

        simulation = cluster.simulation
        cluster.run(program, until=lambda: cluster.server.version >= thresholds[-1])  # noqa: B023
        starts.append(simulation.now)
    check_mean(starts, expected)
