"""What a worker's program acts through; queues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import KSync
from asynchooks.simulation import Constant, Exponential, Queue, Simulation, Worker

from .clusters import new_cluster, speeds
from .engines import simulated


def test_pull_compute_push_in_order(backend: Any) -> None:
    cluster = new_cluster(1, backend, parameters=np.ones(2), compute=Constant(1.0),
                          pull=Constant(0.5), push=Constant(0.25), learning_rate=1.0)  # fmt: skip
    log: list[Any] = []

    async def program(worker: Worker) -> None:
        parameters, version = await worker.pull()
        log.append((cluster.simulation.now, version))
        log.append((cluster.simulation.now, await worker.compute()))
        log.append((cluster.simulation.now, (await worker.push(parameters)).is_applied))
        await worker.compute(2.5)  # in place of a draw

    assert cluster.run(program).secs == 4.25
    assert log == [(0.5, 0), (0.5, True), (1.5, True)]
    assert cluster.server.parameters.tolist() == [0.0, 0.0]


def test_a_snapshot_is_that_of_the_moment_at_which_it_leaves_the_server() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 10.0), pull=speeds(0.0, 5.5))
    report = cluster.run(updates=20)
    first = [each.staleness for each in report.workers][1]
    assert max(first) >= 15  # all that came while it was under way, and computed on


def test_random_numbers_of_a_worker_are_its_own_and_the_seeds() -> None:
    def drawn(seed: int) -> list[float]:
        cluster = new_cluster(2, seed=seed)
        cluster.run(updates=1)
        return [number for each in cluster.workers for number in each.rng.random(2)]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 8


def test_a_session_gives_the_outcome_of_its_step_which_an_update_may_make_useless(
    backend: Any,
) -> None:
    cluster = new_cluster(2, backend, protocol=KSync(1), compute=speeds(1.0, 5.0))
    found: list[Any] = []

    async def program(worker: Worker) -> None:
        async with worker.session() as session:
            while not session.should_stop():
                outputs = await session.run(["computed", "staleness", "outcome", "global_step"])
                found.append((cluster.simulation.now, worker.index, *outputs))

    cluster.run(program, updates=2)
    assert found == [
        (1.0, 0, True, 0, "applied", 1), (1.0, 1, False, None, None, 1),
        (2.0, 0, True, 0, "applied", 2), (2.0, 1, False, None, None, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_servers", "arrivals", "ends", "queued"),
    [(1, [0.0, 0.0, 0.5, 5.0], [1.0, 2.0, 3.0, 6.0], 1.0 + 1.5),
     (2, [0.0, 0.0, 0.5, 0.75], [1.0, 1.0, 2.0, 2.0], 0.5 + 0.25)],
)  # fmt: skip
def test_requests_are_served_in_order_of_arrival(
    simulation: Simulation, num_servers: int, arrivals: list[float], ends: list[float],
    queued: float, log: list[float],
) -> None:  # fmt: skip
    queues: list[Queue] = []

    async def customer(arrives: float) -> None:
        await simulation.sleep(arrives)
        took = await queues[0].serve()
        assert took == simulation.now - arrives
        log.append(simulation.now)

    async def main() -> None:
        queues.append(simulation.queue(Constant(1.0), num_servers=num_servers))
        for task in [simulation.start(customer, each) for each in arrivals]:
            await task.wait()

    simulation.run(main)
    assert log == ends
    assert (queues[0].num_served, queues[0].secs_busy, queues[0].secs_queued) == (4, 4.0, queued)


@simulated
async def test_each_queue_draws_its_own_service_times(simulation: Simulation) -> None:
    first, other = (simulation.queue(Exponential(1.0)) for _ in range(2))
    assert await first.serve() != await other.serve()
