"""What a worker's program acts through; queues and cut links."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import StopTraining
from asynchooks.protocols import KSync, Snapshot
from asynchooks.simulation import Constant, PerWorker, Queue, Simulation, Worker
from asynchooks.simulation.cluster._network import arrival

from .clusters import bare, new_cluster, speeds, spent
from .engines import simulated


def test_pull_compute_push_in_order(backend: Any) -> None:
    cluster = new_cluster(1, backend, parameters=np.ones(2), compute=Constant(1.0),
                          pull=Constant(0.5), push=Constant(0.25), learning_rate=1.0)  # fmt: skip
    log: list[tuple[float, Any]] = []

    async def program(worker: Worker) -> None:
        snapshot = await worker.pull()
        assert isinstance(snapshot, Snapshot)
        log.append((cluster.simulation.now, snapshot.version))
        log.append((await worker.compute(), cluster.simulation.now))
        pushed = await worker.push(snapshot.parameters)
        log.append((cluster.simulation.now, pushed.is_applied))

    cluster.run(program)
    assert log == [(0.5, 0), (True, 1.5), (1.75, True)]
    assert cluster.server.parameters.tolist() == [0.0, 0.0]


def test_a_snapshot_is_that_of_the_moment_at_which_it_leaves_the_server() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 10.0), pull=speeds(0.0, 5.5))
    report = cluster.run(updates=20)
    first = [each.staleness for each in report.workers][1]
    assert max(first) >= 15  # all that came while it was under way, and computed on


def test_compute_takes_what_is_asked_for_in_place_of_a_draw() -> None:
    async def program(worker: Worker) -> None:
        await worker.compute(2.5)
        await worker.compute()

    assert new_cluster(1, compute=Constant(1.0)).run(program).secs == 2.5 + 1.0


@pytest.mark.parametrize(
    ("secs", "error", "match"),
    [
        (-1.0, ValueError, r"secs is -1\.0; give seconds, >= 0"),
        (float("nan"), ValueError, "secs is nan; give seconds"),
        ("long", TypeError, "secs is 'long'; give seconds"),
    ],
)
def test_compute_refuses_what_is_no_time(secs: Any, error: type[Exception], match: str) -> None:
    async def program(worker: Worker) -> None:
        await worker.compute(secs)

    with pytest.raises(error, match=match):
        new_cluster(1).run(program)


def test_what_an_update_makes_useless_is_given_up_at_once(backend: Any) -> None:
    cluster = new_cluster(3, backend, protocol=KSync(1), compute=speeds(1.0, 5.0, 9.0))
    found: list[tuple[int, bool, float]] = []

    async def program(worker: Worker) -> None:
        await worker.pull()
        is_done = await worker.compute()
        found.append((worker.index, is_done, cluster.simulation.now))
        if is_done:
            await worker.push(np.zeros(1))

    report = cluster.run(program, updates=1)
    assert found == [(0, True, 1.0), (1, False, 1.0), (2, False, 1.0)]
    assert [spent(each) for each in report.workers] == [{"computed": 1.0}] + [{"lost": 1.0}] * 2


def test_random_numbers_of_a_worker_are_its_own_and_the_seeds() -> None:
    def drawn(seed: int) -> list[float]:
        numbers = []

        async def program(worker: Worker) -> None:
            numbers.append(worker.rng.random())
            numbers.append(worker.rng.random())

        new_cluster(2, seed=seed).run(program)
        return numbers

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 8


def test_a_session_gives_the_outcome_of_its_step(backend: Any) -> None:
    cluster = new_cluster(2, backend, protocol=KSync(1), compute=speeds(1.0, 5.0))
    found: list[Any] = []

    async def program(worker: Worker) -> None:
        async with worker.session() as session:
            while not session.should_stop():
                outputs = ["computed", "staleness", "outcome", "global_step"]
                found.append((worker.index, *await session.run(outputs)))

    cluster.run(program, updates=2)
    assert found == [
        (0, True, 0, "applied", 1), (1, False, None, None, 1),
        (0, True, 0, "applied", 2), (1, False, None, None, 2),
    ]  # fmt: skip


def test_a_session_may_have_a_step_of_its_own() -> None:
    cluster = new_cluster(1, parameters=np.ones(1), compute=Constant(1.0), learning_rate=0.5)

    async def program(worker: Worker) -> None:
        async def step() -> dict[str, Any]:
            parameters, _ = await worker.pull()
            await worker.compute(3.0)
            await worker.push(parameters)
            return {"loss": float(parameters[0])}

        async with worker.session(step=step) as session:
            losses = [await session.run("loss") for _ in range(2)]
        assert losses == [1.0, 0.5]

    assert cluster.run(program).secs == 6.0


def test_training_that_is_over_ends_a_program_by_stop_training() -> None:
    ends: list[type[BaseException]] = []

    async def program(worker: Worker) -> None:
        try:
            await bare(worker)
        except BaseException as error:
            ends.append(type(error))
            raise

    assert new_cluster(2, compute=Constant(1.0)).run(program, updates=2).updates == 2
    assert ends == [StopTraining] * 2


def served(backend: Any, num_servers: int, arrivals: list[float]) -> tuple[list[float], Queue]:
    """When each leaves, of services of 1 s."""
    simulation = Simulation(backend=backend)
    ends = [0.0] * len(arrivals)
    queues: list[Queue] = []

    async def main() -> None:
        queue = simulation.queue(Constant(1.0), num_servers=num_servers)
        queues.append(queue)

        async def customer(number: int) -> None:
            await simulation.sleep(arrivals[number])
            took = await queue.serve()
            ends[number] = simulation.now
            assert took == simulation.now - arrivals[number]

        for task in [simulation.start(customer, number) for number in range(len(arrivals))]:
            await task.wait()

    simulation.run(main)
    return ends, queues[0]


def test_requests_are_served_in_order_of_arrival(backend: Any) -> None:
    ends, queue = served(backend, 1, [0.0, 0.0, 0.5, 5.0])
    assert ends == [1.0, 2.0, 3.0, 6.0]
    assert (queue.num_served, queue.secs_busy, queue.secs_queued) == (4, 4.0, 1.0 + 1.5)
    assert served(backend, 2, [0.0, 0.0, 0.5, 0.75])[0] == [1.0, 1.0, 2.0, 2.0]


@simulated
async def test_the_request_of_a_cancelled_task_is_served(simulation: Simulation) -> None:
    queue = simulation.queue(Constant(2.0))
    first = simulation.start(queue.serve)
    await simulation.sleep(0.5)
    first.cancel()
    await queue.serve()
    assert simulation.now == 4.0


@pytest.mark.parametrize("num_servers", [0, -1, 1.5])
@simulated
async def test_a_queue_without_servers_is_refused(simulation: Simulation, num_servers: Any) -> None:
    match = f"num_servers is {num_servers}; give an integer >= 1"
    with pytest.raises((TypeError, ValueError), match=match):
        simulation.queue(Constant(1.0), num_servers=num_servers)


def test_a_service_of_each_worker_is_that_of_the_first() -> None:
    service = PerWorker([Constant(2.0), Constant(99.0)])
    simulation = Simulation(backend="turbo")
    report = simulation.cluster(1, compute=Constant(1.0), service=service).run(updates=2)
    assert report.secs == 6.0


@pytest.mark.parametrize(
    ("spans", "sent", "arrives", "expected"),
    [
        ([(2.0, 5.0)], 0.0, 1.0, 1.0),
        ([(2.0, 5.0)], 0.0, 3.0, 5.0),  # under way as the cut begins
        ([(2.0, 5.0)], 3.0, 4.0, 5.0),
        ([(2.0, 5.0)], 3.0, 9.0, 9.0),
        ([(2.0, 5.0)], 5.0, 6.0, 6.0),
        ([(2.0, 5.0)], 0.0, 2.0, 5.0),  # it arrives as the cut begins
        ([(4.0, 7.0), (2.0, 5.0)], 3.0, 3.5, 7.0),  # held up by one cut until the next
        ([(0.0, 100.0), (1.0, 2.0)], 1.5, 1.5, 100.0),
    ],
)
def test_a_message_that_meets_a_cut_arrives_at_its_end(
    spans: list[tuple[float, float]], sent: float, arrives: float, expected: float
) -> None:
    assert arrival(tuple(spans), sent, arrives) == expected


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
