"""What a worker's program acts through; queues and cut links."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.protocols import KSync
from asynchooks.simulation import Constant, Queue, Simulation, Worker
from asynchooks.simulation.cluster._network import arrival

from .clusters import new_cluster, speeds, spent


def test_pull_compute_push_in_order(backend: Any) -> None:
    cluster = new_cluster(1, backend, parameters=np.ones(2), compute=Constant(1.0),
                          pull=Constant(0.5), push=Constant(0.25), learning_rate=1.0)  # fmt: skip
    log: list[Any] = []

    async def program(worker: Worker) -> None:
        parameters, version = await worker.pull()
        log.append((cluster.simulation.now, version))
        log.append((await worker.compute(), cluster.simulation.now))
        log.append(((await worker.push(parameters)).is_applied, cluster.simulation.now))
        await worker.compute(2.5)  # in place of a draw
        log.append(cluster.simulation.now)

    cluster.run(program)
    assert log == [(0.5, 0), (True, 1.5), (True, 1.75), 4.25]
    assert cluster.server.parameters.tolist() == [0.0, 0.0]


def test_a_snapshot_is_that_of_the_moment_at_which_it_leaves_the_server() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 10.0), pull=speeds(0.0, 5.5))
    report = cluster.run(updates=20)
    first = [each.staleness for each in report.workers][1]
    assert max(first) >= 15  # all that came while it was under way, and computed on


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda worker: worker.compute(-1.0), r"secs is -1\.0; give seconds, >= 0"),
        (
            lambda worker: worker.cluster.simulation.queue(Constant(1.0), num_servers=0),
            "num_servers is 0; give an integer >= 1",
        ),
    ],
)
def test_what_is_no_time_and_no_number_of_servers_is_refused(act: Any, match: str) -> None:
    async def program(worker: Worker) -> None:
        await act(worker)

    with pytest.raises((TypeError, ValueError), match=match):
        new_cluster(1).run(program)


def test_random_numbers_of_a_worker_are_its_own_and_the_seeds() -> None:
    def drawn(seed: int) -> list[float]:
        numbers: list[float] = []

        async def program(worker: Worker) -> None:
            numbers.extend(worker.rng.random(2))

        new_cluster(2, seed=seed).run(program)
        return numbers

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

    report = cluster.run(program, updates=2)
    assert found == [
        (1.0, 0, True, 0, "applied", 1), (1.0, 1, False, None, None, 1),
        (2.0, 0, True, 0, "applied", 2), (2.0, 1, False, None, None, 2),
    ]  # fmt: skip
    assert [spent(each) for each in report.workers] == [{"computed": 2.0}, {"lost": 2.0}]


def served(num_servers: int, arrivals: list[float]) -> tuple[list[float], Queue]:
    """When each leaves, of services of 1 s."""
    simulation = Simulation(backend="turbo")
    ends = [0.0] * len(arrivals)
    queues: list[Queue] = []

    async def main() -> None:
        queues.append(simulation.queue(Constant(1.0), num_servers=num_servers))

        async def customer(number: int) -> None:
            await simulation.sleep(arrivals[number])
            took = await queues[0].serve()
            ends[number] = simulation.now
            assert took == simulation.now - arrivals[number]

        for task in [simulation.start(customer, number) for number in range(len(arrivals))]:
            await task.wait()

    simulation.run(main)
    return ends, queues[0]


def test_requests_are_served_in_order_of_arrival() -> None:
    ends, queue = served(1, [0.0, 0.0, 0.5, 5.0])
    assert ends == [1.0, 2.0, 3.0, 6.0]
    assert (queue.num_served, queue.secs_busy, queue.secs_queued) == (4, 4.0, 1.0 + 1.5)
    assert served(2, [0.0, 0.0, 0.5, 0.75])[0] == [1.0, 1.0, 2.0, 2.0]


TIMES = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(TIMES, TIMES.map(lambda secs: secs / 2)), max_size=5), TIMES, TIMES)
def test_no_message_arrives_within_a_cut_nor_too_early(
    spans: list[tuple[float, float]], sent: float, secs: float
) -> None:
    cuts = tuple((begin, begin + length) for begin, length in spans)
    arrives = arrival(cuts, sent, sent + secs)
    assert arrives == sent + secs or arrives in [end for _, end in cuts]
    assert arrives >= sent + secs
    assert not any(begin <= arrives < end and sent < end for begin, end in cuts)
