"""Stations do work at exact times: alone, shared, by servers with a queue, by worker."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asynchooks.planning import Dependence, Service, SizeLaw
from asynchooks.planning._service import Beyond
from asynchooks.planning._station import Station, Use
from asynchooks.simulation import current_simulation

from .planned import run_in_virtual_time, service_of


def station_of(service: Service, seed: int = 0) -> Station:
    kernel = current_simulation().kernel
    return Station(kernel, service, np.random.default_rng(seed), Use(service))


def ends_of(
    service: Service, jobs: list[tuple[float, float]], backend: str = "turbo"
) -> list[float]:
    """When jobs (begin, work) end."""
    ends = [math.nan] * len(jobs)

    async def main() -> None:
        simulation, station = current_simulation(), station_of(service)

        async def one(number: int, begins: float, work: float) -> None:
            await simulation.sleep(begins)
            await station.serve(work)
            ends[number] = simulation.now

        tasks = [simulation.start(one, number, *job) for number, job in enumerate(jobs)]
        for task in tasks:
            await task.wait()

    run_in_virtual_time(main, backend)
    return ends


FREE = service_of("work", [1.0])
QUEUE = service_of("work", [1.0], dependence=Dependence.QUEUE)
PROCESSOR = service_of("work", [1.0], dependence=Dependence.SHARED, slowdown=1.0)


SMALL = replace(FREE, load_high=2.0)


@pytest.mark.parametrize(
    ("service", "jobs", "ends"),
    [
        (FREE, [(0.0, 1.0), (0.5, 2.0), (0.5, 0.25)], [1.0, 2.5, 0.75]),
        # in the order of their coming
        (QUEUE, [(0.0, 1.0), (0.25, 1.0), (0.5, 0.5), (10.0, 1.0)], [1.0, 2.0, 2.5, 11.0]),
        (replace(QUEUE, num_servers=2), [(0.0, 3.0), *[(0.0, 1.0)] * 3], [3.0, 1.0, 2.0, 3.0]),
        # alone for 1 s, then half as fast: both have 1 s left at 1.0, and end together at 3.0
        (PROCESSOR, [(0.0, 2.0), (1.0, 1.0)], [3.0, 3.0]),
        (PROCESSOR, [(0.0, 1.0), (0.0, 0.5)], [1.5, 1.0]),
        (SMALL, [(0.0, 1.0)] * 4, [1.0] * 4),
        (replace(SMALL, beyond=Beyond.WORST), [(0.0, 1.0)] * 4, [2.0] * 4),  # it is full
    ],
    ids=["free", "queue", "two servers", "processor", "together", "beyond", "worst"],
)
def test_work_ends_at_exactly_its_time(
    service: Service, jobs: list[tuple[float, float]], ends: list[float], backend: str
) -> None:
    assert ends_of(service, jobs, backend) == ends


@pytest.mark.parametrize(
    ("service", "expected"), [(PROCESSOR, [3.0, 4.0]), (FREE, [2.0, 3.0]), (QUEUE, [2.0, 11.0])]
)
def test_work_that_was_cancelled_frees_its_share_at_once_but_for_its_place_in_a_queue(
    service: Service, expected: list[float], backend: str
) -> None:
    ends: list[float] = []

    async def main() -> None:
        simulation, station = current_simulation(), station_of(service)

        async def one(work: float) -> None:
            await station.serve(work)
            ends.append(simulation.now)

        one_task, other = simulation.start(one, 2.0), simulation.start(one, 8.0)
        await simulation.sleep(2.0)  # of one processor, each has had 1 s
        other.cancel()
        await one_task.wait()
        await other.wait()
        assert station.num_under_way == 0
        await one(1.0)
        assert station.use.loads == {1: 2, 2: 1}  # what work began at

    run_in_virtual_time(main, backend)
    assert ends == expected


def test_a_call_that_holds_the_loop_delays_all_others_in_their_order(backend: str) -> None:
    log: list[tuple[str, float]] = []

    async def main() -> None:
        simulation, station, far = current_simulation(), station_of(FREE), station_of(PROCESSOR)

        async def one(name: str, wait: Any, secs: float) -> None:
            await wait(secs)
            log.append((name, simulation.now))

        tasks = [
            simulation.start(one, *each)
            for each in [
                ("late", simulation.sleep, 1.5), ("early", simulation.sleep, 1.25),
                ("elsewhere", far.serve, 1.0), ("after", far.serve, 4.0),
            ]
        ]  # fmt: skip
        await simulation.sleep(1.0)
        for secs in (1.0, 0.5):
            station.hold(secs)
            log.append(("held", simulation.now))
        for task in tasks:
            await task.wait()

    run_in_virtual_time(main, backend)
    assert log[:2] == [("held", 2.0), ("held", 2.5)]
    assert [each for each in log if each[0] != "elsewhere"][2:] == [
        ("early", 2.5), ("late", 2.5), ("after", 5.0),
    ]  # fmt: skip
    assert ("elsewhere", 2.5) in log


def test_each_worker_draws_its_own_and_further_ones_repeat_them_in_order() -> None:
    service = service_of("work", [1.0, 2.0, 1.0, 2.0], workers=np.array([0, 3, 0, 3]))

    async def main() -> None:
        station = station_of(service)
        assert [station.draw(worker=each).secs for each in (0, 1, 2, 3)] == [1.0, 2.0, 1.0, 2.0]

    run_in_virtual_time(main)


def test_sizes_are_drawn_with_the_work_or_given_and_then_make_it() -> None:
    drawn = service_of("work", [1.0, 3.0], sizes=np.array([10.0, 30.0]))
    given = service_of("work", [1.0], size_law=SizeLaw(0.5, 0.25, np.array([1.0])))

    async def main() -> None:
        found, again, other = (
            [each.draw() for _ in range(100)] for each in (station_of(drawn, s) for s in (0, 0, 1))
        )
        assert set(found) == {(1.0, 10.0), (3.0, 30.0)}
        assert found == again != other
        station = station_of(given)
        assert station.draw(4.0) == (1.5, 4.0)
        assert (station.use.low_size, station.use.high_size) == (4.0, 4.0)

    run_in_virtual_time(main)
