"""Queues serve in order, and cut links let messages through at the end of the cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.simulation import Constant, PerWorker, Phases, Queue, Simulation
from asynchooks.simulation.cluster._network import LinkCuts


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

        tasks = [simulation.start(customer, number) for number in range(len(arrivals))]
        for task in tasks:
            await task.wait()

    simulation.run(main)
    return ends, queues[0]


def test_requests_are_served_in_order_of_arrival(backend: Any) -> None:
    ends, queue = served(backend, 1, [0.0, 0.0, 0.5, 5.0])
    assert ends == [1.0, 2.0, 3.0, 6.0]
    assert (queue.num_served, queue.secs_busy, queue.secs_queued) == (4, 4.0, 1.0 + 1.5)
    assert served(backend, 2, [0.0, 0.0, 0.5, 0.75])[0] == [1.0, 1.0, 2.0, 2.0]


def test_the_request_of_a_cancelled_task_is_served(simulation: Simulation) -> None:
    async def main() -> float:
        queue = simulation.queue(Constant(2.0))
        first = simulation.start(queue.serve)
        await simulation.sleep(0.5)
        first.cancel()
        await queue.serve()
        return simulation.now

    assert simulation.run(main) == 4.0


def test_a_server_may_have_phases(simulation: Simulation) -> None:
    async def main() -> float:
        queue = simulation.queue(Phases(Constant(1.0), [(1.5, 1.0), (100.0, 2.0)]))
        await queue.serve()
        return await queue.serve()

    assert simulation.run(main) == 0.5 + 1.0


@pytest.mark.parametrize("num_servers", [0, -1, 1.5])
def test_a_queue_without_servers_is_refused(simulation: Simulation, num_servers: Any) -> None:
    async def main() -> None:
        simulation.queue(Constant(1.0), num_servers=num_servers)

    match = f"num_servers is {num_servers}; give an integer >= 1"
    with pytest.raises((TypeError, ValueError), match=match):
        simulation.run(main)


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
    cuts = LinkCuts()
    for begin, end in spans:
        cuts.add(begin, end)
    assert cuts.arrival(sent, arrives) == expected


TIMES = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(TIMES, TIMES.map(lambda secs: secs / 2)), max_size=5), TIMES, TIMES)
def test_no_message_arrives_within_a_cut_nor_too_early(
    spans: list[tuple[float, float]], sent: float, secs: float
) -> None:
    cuts = LinkCuts()
    for begin, length in spans:
        cuts.add(begin, begin + length)
    arrives = cuts.arrival(sent, sent + secs)
    ends = {begin + length for begin, length in spans}
    assert arrives == sent + secs or arrives in ends
    assert arrives >= sent + secs
    assert not any(begin <= arrives < begin + length and sent < begin + length
                   for begin, length in spans)  # fmt: skip
