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
from asynchooks.simulation import Simulation, current_simulation

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
TWO_SERVERS = service_of("work", [1.0], dependence=Dependence.QUEUE, num_servers=2)
PROCESSOR = service_of("work", [1.0], dependence=Dependence.SHARED, slowdown=1.0)


def test_free_work_takes_as_long_as_it_is_whatever_else_is_under_way(backend: str) -> None:
    assert ends_of(FREE, [(0.0, 1.0), (0.5, 2.0), (0.5, 0.25)], backend) == [1.0, 2.5, 0.75]


def test_one_server_takes_work_in_the_order_of_its_coming(backend: str) -> None:
    jobs = [(0.0, 1.0), (0.25, 1.0), (0.5, 0.5), (10.0, 1.0)]
    assert ends_of(QUEUE, jobs, backend) == [1.0, 2.0, 2.5, 11.0]


def test_two_servers_take_two_at_a_time(backend: str) -> None:
    jobs = [(0.0, 3.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    assert ends_of(TWO_SERVERS, jobs, backend) == [3.0, 1.0, 2.0, 3.0]


def test_those_under_way_at_one_processor_share_it(backend: str) -> None:
    # alone for 1 s, then half as fast: both have 1 s left at 1.0, and end together at 3.0
    assert ends_of(PROCESSOR, [(0.0, 2.0), (1.0, 1.0)], backend) == [3.0, 3.0]
    assert ends_of(PROCESSOR, [(0.0, 1.0), (0.0, 0.5)], backend) == [1.5, 1.0]


def test_work_that_was_cancelled_frees_its_share_at_once(backend: str) -> None:
    ends: list[float] = []

    async def main() -> None:
        simulation, station = current_simulation(), station_of(PROCESSOR)

        async def one(work: float) -> None:
            await station.serve(work)
            ends.append(simulation.now)

        one_task, other = simulation.start(one, 2.0), simulation.start(one, 8.0)
        await simulation.sleep(2.0)  # each has had 1 s
        other.cancel()
        await one_task.wait()
        await other.wait()
        assert station.num_under_way == 0
        await one(1.0)

    run_in_virtual_time(main, backend)
    assert ends == [3.0, 4.0]


def test_the_queue_has_the_waits_of_the_formula_of_m_m_1() -> None:
    rng = np.random.default_rng(0)
    num, use = 40_000, 0.5
    begins = np.cumsum(rng.exponential(1.0, num))
    work = rng.exponential(use, num)
    ends = np.array(ends_of(QUEUE, list(zip(begins.tolist(), work.tolist(), strict=True))))
    assert (ends - begins).mean() == pytest.approx(use / (1 - use), rel=0.05)


def test_the_shared_processor_has_the_times_of_the_formula_of_m_d_1_sharing() -> None:
    rng = np.random.default_rng(0)
    num, use = 20_000, 0.5
    begins = np.cumsum(rng.exponential(1.0, num))
    ends = np.array(ends_of(PROCESSOR, [(each, use) for each in begins.tolist()]))
    # of processor sharing the mean depends on the mean work alone
    assert (ends - begins).mean() == pytest.approx(use / (1 - use), rel=0.05)


def test_a_call_that_holds_the_loop_delays_all_others_in_their_order(backend: str) -> None:
    log: list[tuple[str, float]] = []

    async def main() -> None:
        simulation, station = current_simulation(), station_of(FREE)

        async def sleeper(name: str, secs: float) -> None:
            await simulation.sleep(secs)
            log.append((name, simulation.now))

        tasks = [simulation.start(sleeper, name, secs) for name, secs in
                 (("late", 1.5), ("early", 1.25), ("after", 3.0))]  # fmt: skip
        await simulation.sleep(1.0)
        station.hold(1.0)
        log.append(("held", simulation.now))
        station.hold(0.5)
        log.append(("again", simulation.now))
        for task in tasks:
            await task.wait()

    run_in_virtual_time(main, backend)
    assert log == [("held", 2.0), ("again", 2.5), ("early", 2.5), ("late", 2.5), ("after", 3.0)]


def test_work_elsewhere_goes_on_while_the_loop_is_held(backend: str) -> None:
    ends: dict[float, float] = {}

    async def main() -> None:
        simulation, station = current_simulation(), station_of(PROCESSOR)

        async def one(work: float) -> None:
            await station.serve(work)
            ends[work] = simulation.now

        tasks = [simulation.start(one, work) for work in (1.0, 2.0, 8.0)]
        await simulation.sleep(1.0)
        station_of(FREE).hold(5.0)  # the first would have ended at 3.0, the second at 5.0
        for task in tasks:
            await task.wait()

    run_in_virtual_time(main, backend)
    assert ends == {1.0: 6.0, 2.0: 6.0, 8.0: 11.0}


def test_each_worker_draws_its_own_and_further_ones_repeat_them_in_order() -> None:
    service = service_of("work", [1.0, 2.0, 1.0, 2.0], workers=np.array([0, 3, 0, 3]))

    async def main() -> list[float]:
        station = station_of(service)
        return [station.draw(worker=worker).secs for worker in (0, 1, 2, 3)]

    assert run_in_virtual_time(main) == [1.0, 2.0, 1.0, 2.0]


def test_sizes_are_drawn_with_the_work_or_given_and_then_make_it() -> None:
    drawn = service_of("work", [1.0, 3.0], sizes=np.array([10.0, 30.0]))
    law = SizeLaw(0.5, 0.25, np.array([1.0]))
    given = service_of("work", [1.0], size_law=law)

    async def main() -> None:
        station = station_of(drawn)
        assert {station.draw() for _ in range(100)} == {(1.0, 10.0), (3.0, 30.0)}
        station = station_of(given)
        assert station.draw(4.0) == (1.5, 4.0)
        assert (station.use.low_size, station.use.high_size) == (4.0, 4.0)

    run_in_virtual_time(main)


def test_work_of_one_recorded_size_is_taken_as_constant() -> None:
    service = service_of("work", [2.0], sizes=np.array([8.0]))

    async def main() -> None:
        assert station_of(service).draw(16.0).secs == 2.0

    run_in_virtual_time(main)


def test_beyond_the_recorded_load_what_comes_out_lies_between_two_lines() -> None:
    service = service_of(
        "work", [1.0], dependence=Dependence.SHARED, slowdown=0.1, slowdown_low=0.05,
        slowdown_high=0.2, load_low=4.0, load_high=16.0,
    )  # fmt: skip

    def throughput(num: float, beyond: Beyond) -> float:
        return num * replace(service, beyond=beyond).speed(num)

    for num in (4.0, 10.0, 16.0):
        assert len({throughput(num, each) for each in Beyond}) == 1
    for num in (1.0, 2.0, 20.0, 64.0):
        worst, law, best = (
            throughput(num, each) for each in (Beyond.WORST, Beyond.LAW, Beyond.BEST)
        )
        assert worst < law < best or (num < 4 and worst < law)
    assert throughput(64.0, Beyond.WORST) == pytest.approx(throughput(16.0, Beyond.LAW))
    assert throughput(2.0, Beyond.WORST) == pytest.approx(throughput(4.0, Beyond.LAW) / 2)


def test_a_free_service_is_full_beyond_the_recorded_load_in_the_worst_case() -> None:
    service = service_of("work", [1.0], load_high=2.0)
    jobs = [(0.0, 1.0)] * 4
    assert ends_of(service, jobs) == [1.0] * 4
    assert ends_of(replace(service, beyond=Beyond.WORST), jobs) == [2.0] * 4


def test_one_seed_draws_the_same() -> None:
    service = service_of("work", np.arange(100.0))

    def draws(seed: int) -> Any:
        async def main() -> list[float]:
            station = station_of(service, seed)
            return [station.draw().secs for _ in range(300)]

        return run_in_virtual_time(main)

    assert draws(1) == draws(1) != draws(2)


def test_a_station_counts_the_load_that_work_begins_at() -> None:
    async def main() -> dict[int, int]:
        simulation, station = current_simulation(), station_of(FREE)
        tasks = [simulation.start(station.serve, 1.0) for _ in range(3)]
        for task in tasks:
            await task.wait()
        await station.serve(1.0)
        return station.use.loads

    assert run_in_virtual_time(main) == {1: 2, 2: 1, 3: 1}


@pytest.mark.parametrize("dependence", list(Dependence))
def test_a_cancelled_wait_leaves_the_station_usable(dependence: Dependence, backend: Any) -> None:
    service = service_of("work", [1.0], dependence=dependence, slowdown=0.5)
    simulation = Simulation(backend=backend)

    async def main() -> float:
        station = station_of(service)
        task = simulation.start(station.serve, 100.0)
        await simulation.sleep(0.0)
        task.cancel()
        await task.wait()
        assert station.num_under_way == 0
        if dependence is not Dependence.QUEUE:  # which it keeps its place in
            await station.serve(1.0)
            assert simulation.now == 1.0
        return simulation.now

    simulation.run(main)
