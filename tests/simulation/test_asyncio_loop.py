"""asyncio's own tasks, timers and threads in virtual time."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest

from asynchooks._errors import DeadlockError, LivelockError, SimulationError
from asynchooks.simulation import Simulation


def simulate(main: Any, **options: Any) -> Any:
    return Simulation(backend="asyncio", **options).run(main)


async def sleeping(secs: float) -> float:
    await asyncio.sleep(secs)
    return asyncio.get_running_loop().time()


def test_timeouts_and_task_groups_end_at_exactly_their_times() -> None:
    async def main() -> list[float]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sleeping(secs)) for secs in (3.0, 0.1, 3.2e9)]
        times = [task.result() for task in tasks]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleeping(100), 0.3)
        times.append(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await sleeping(1000)
        times.append(asyncio.get_running_loop().time())
        return times

    assert simulate(main) == [3.0, 0.1, 3.2e9, 3.2e9 + 0.3, 3.2e9 + 0.3 + 7]


def test_equal_times_of_asyncios_own_timers_are_served_in_order() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(12):
            loop.call_later(5, order.append, number)
        await asyncio.sleep(6)

    simulate(main)
    assert order == list(range(12))


def test_a_cancelled_timer_never_fires_and_leaves_the_heap() -> None:
    simulation = Simulation(backend="asyncio")

    async def main() -> int:
        for _ in range(5000):
            asyncio.get_running_loop().call_later(1e9, pytest.fail).cancel()
        await asyncio.sleep(1)
        return len(simulation.kernel._heap)

    assert simulation.run(main) < 1100


def test_a_timer_at_no_time_is_refused() -> None:
    async def main() -> None:
        # asyncio.sleep refuses it itself since Python 3.13
        asyncio.get_running_loop().call_later(math.nan, pytest.fail)

    with pytest.raises(SimulationError, match="after nan seconds; give a number >= 0"):
        simulate(main)


def test_a_sleep_for_ever_ends_by_its_timeout() -> None:
    async def main() -> float:
        with anyio.move_on_after(2.5):
            await asyncio.sleep(math.inf)
        return asyncio.get_running_loop().time()

    assert simulate(main) == 2.5


def test_tasks_that_the_program_leaves_behind_are_cancelled() -> None:
    log: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            await asyncio.sleep(1)
            log.append("cleaned")

    async def main() -> None:
        log.append("started")
        asyncio.get_running_loop().set_task_factory(None)
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(1)

    tasks: list[Any] = []
    simulate(main)
    assert log == ["started", "cleaned"]


def test_a_deadlock_names_tasks_of_one_name_in_a_task_group() -> None:
    async def child() -> None:
        await anyio.Event().wait()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            group.start_soon(child)

    with pytest.raises(DeadlockError, match=r"child, .*child: a wait of another library's at .*"):
        simulate(main)


def test_the_cancellation_of_a_future_that_main_awaited_leaves() -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(5))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        simulate(main)


def test_another_librarys_wait_that_spends_no_time_is_refused() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - on purpose
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match="more than 50 turns each at virtual time 0.0"):
        simulate(main, max_turns=50)


@pytest.mark.parametrize("is_own_pool", [False, True])
def test_time_stands_still_while_a_thread_works(is_own_pool: bool) -> None:
    simulation = Simulation(backend="asyncio")
    times: list[float] = []

    async def main() -> None:
        simulation.start(simulation.sleep, 100)
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(pool if is_own_pool else None, threading.Event().wait, 0.03)
        times.append(simulation.now)
        await simulation.sleep(1)
        times.append(simulation.now)

    simulation.run(main)
    assert times == [0.0, 1.0]


def test_time_stands_still_until_an_abandoned_thread_has_worked() -> None:
    simulation = Simulation(backend="asyncio")
    times: list[float] = []

    def work() -> None:
        threading.Event().wait(0.05)
        times.append(simulation.now)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.to_thread(work)
        await simulation.sleep(100)
        times.append(simulation.now)

    simulation.run(main)
    assert times == [0.0, 100.0]


def test_a_call_that_its_executor_never_began_holds_no_time() -> None:
    simulation = Simulation(backend="asyncio")

    async def main() -> float:
        loop, begun, may_end = asyncio.get_running_loop(), threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as pool:

            def work() -> None:
                begun.set()
                may_end.wait()

            working = loop.run_in_executor(pool, work)
            queued = loop.run_in_executor(pool, pytest.fail)
            begun.wait()
            queued.cancel()
            await asyncio.sleep(0)
            may_end.set()
            await working
        await simulation.sleep(1)
        return simulation.now

    assert simulation.run(main) == 1.0
