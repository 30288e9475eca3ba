"""The kernels on asyncio, on trio and on none: tasks, timers, threads, I/O, foreign waits."""

import asyncio
import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio
import trio.testing

from asynchooks import GlobalStep
from asynchooks.simulation import (
    DeadlockError,
    ForeignAwaitError,
    LivelockError,
    OutsideWorkError,
    Simulation,
)

from .engines import on_event_loops, run_together, simulated

on_asyncio = pytest.mark.parametrize("backend", ["asyncio"])
on_trio = pytest.mark.parametrize("backend", ["trio"])


async def sleeping(secs: float) -> float:
    await asyncio.sleep(secs)
    return asyncio.get_running_loop().time()


@on_asyncio
@simulated
async def test_timers_timeouts_and_task_groups_of_asyncio_end_at_exactly_their_times(
    simulation: Simulation,
) -> None:
    loop, order = asyncio.get_running_loop(), list[int]()
    for number in range(12):
        loop.call_later(2.5, order.append, number)
    loop.call_later(1, pytest.fail).cancel()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sleeping(secs)) for secs in (3.0, 0.1, 3.2e8)]
    times = [task.result() for task in tasks]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(7):
            await sleeping(math.inf)
    assert [*times, loop.time()] == [3.0, 0.1, 3.2e8, 3.2e8 + 7]
    assert order == list(range(12))


@on_trio
@simulated
async def test_deadlines_and_nurseries_of_trio_end_at_exactly_their_times(
    simulation: Simulation,
) -> None:
    times = []
    simulation.start(simulation.sleep, 1e10)
    async with trio.open_nursery() as nursery:
        for secs in (3.0, 0.1, 3.2e9):
            nursery.start_soon(trio.sleep, secs)
    times.append(trio.current_time())
    for deadline in (3.2e9 + 0.3, 2):  # one that is past ends at once, and time stays
        with trio.move_on_at(deadline):
            await trio.sleep_forever()
        times.append(trio.current_time())
    await trio.testing.wait_all_tasks_blocked()
    assert times == [3.2e9, 3.2e9 + 0.3, trio.current_time()]


@on_asyncio
def test_tasks_that_the_program_leaves_behind_are_cancelled(
    simulation: Simulation, log: list[str]
) -> None:
    async def left() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            await asyncio.sleep(1)
            log.append("cleaned")

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(None)
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(1)

    tasks: list[Any] = []
    simulation.run(main)
    assert log == ["cleaned"]


@on_event_loops
def test_a_deadlock_in_another_librarys_waits_names_all_tasks(simulation: Simulation) -> None:
    async def child() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            group.start_soon(child)

    with pytest.raises(DeadlockError, match=r"child, .*child: a wait of another library's at .*"):
        simulation.run(main)


@on_event_loops
def test_another_librarys_wait_that_spends_no_time_is_refused(backend: Any) -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(LivelockError, match="more than 50 turns each at virtual time 0.0"):
        Simulation(backend=backend, max_turns=50).run(main)


def sleep_really(secs: float = 0.03) -> None:
    """Block this thread, where `time.sleep` is the program's error."""
    threading.Event().wait(secs)


@on_asyncio
@simulated
async def test_time_stands_still_while_a_pool_of_the_program_works(simulation: Simulation) -> None:
    simulation.start(simulation.sleep, 100)
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, sleep_really)
    assert simulation.now == 0.0


@on_event_loops
@simulated
async def test_time_stands_still_while_a_thread_works_or_was_abandoned(
    simulation: Simulation, log: list[float]
) -> None:
    begun = threading.Event()

    def work() -> None:
        begun.set()
        sleep_really()
        log.append(simulation.now)

    async def cancel(scope: anyio.CancelScope) -> None:
        assert begun.wait(20)
        scope.cancel()

    simulation.start(simulation.sleep, 100)
    await anyio.to_thread.run_sync(work)
    begun.clear()
    with anyio.CancelScope() as scope:
        simulation.start(cancel, scope)
        await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    assert log == [0.0]
    await simulation.sleep(1)  # not before the thread has ended
    assert log == [0.0, 0.0]


@simulated
async def test_a_bare_thread_ends_a_wait_while_time_stands_still(simulation: Simulation) -> None:
    simulation.start(simulation.sleep, 100)
    await simulation.sleep(2)
    step = GlobalStep()

    def work() -> None:
        sleep_really(0.02)
        step.publish(7)

    thread = threading.Thread(target=work)
    with simulation.outside_work():
        thread.start()
        assert await step.wait_for(7) == 7
    thread.join()
    assert simulation.now == 2.0


@on_event_loops
def test_real_io_is_refused_unless_declared(simulation: Simulation) -> None:
    ours, theirs = socket.socketpair()
    match = "waits for real I/O, which takes no virtual"
    with ours, theirs, pytest.raises(OutsideWorkError, match=match):
        simulation.run(anyio.wait_readable, ours)


@on_event_loops
@simulated
async def test_time_stands_still_during_declared_io(simulation: Simulation) -> None:
    simulation.start(simulation.sleep, 100)
    await simulation.sleep(1)
    ours, theirs = socket.socketpair()
    with ours, theirs, simulation.outside_work():
        threading.Timer(0.02, ours.send, [b"hello"]).start()
        await anyio.wait_readable(theirs)
    assert simulation.now == 1.0
    await simulation.sleep(5)
    assert simulation.now == 6.0


# Without an event loop


async def with_nursery() -> None:
    async with trio.open_nursery():
        pass


FOREIGN: dict[str, Callable[[], Any]] = {
    "asyncio.sleep(0)": lambda: asyncio.sleep(0),
    "anyio.Event": lambda: anyio.Event().wait(),
    "anyio.to_thread": lambda: anyio.to_thread.run_sync(int),
    "trio.Event": lambda: trio.Event().wait(),
    "trio's nursery": with_nursery,
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_await_is_refused_and_named_with_its_place(foreign: Callable[[], Any]) -> None:
    async def main() -> None:
        await foreign()

    at = (with_nursery if foreign is with_nursery else main).__code__
    place = rf"test_event_loops.py:{at.co_firstlineno + 1} in .*{at.co_name}"
    with pytest.raises(ForeignAwaitError, match=f'(?s)could not.* at .*{place}.*use backend="asy'):
        Simulation(backend="turbo").run(main)


@pytest.mark.parametrize("backend", ["asyncio", "turbo"])
def test_an_async_generator_left_early_is_closed_in_virtual_time(simulation: Simulation) -> None:
    closed_at: list[float] = []

    async def numbers() -> Any:
        try:
            while True:
                yield 1
                await simulation.sleep(1)
        finally:
            await simulation.sleep(2)
            closed_at.append(simulation.now)

    async def main() -> None:
        async for _ in numbers():
            break
        await simulation.sleep(10)

    simulation.run(main)
    assert closed_at == [2.0]


variable: ContextVar[Any] = ContextVar("variable", default=None)


@pytest.mark.parametrize(("common", "value"), [(np.zeros(3), np.zeros(3)), (1, 1.0)])
def test_a_value_that_may_equal_the_common_one_is_a_tasks_own_all_the_same(
    simulation: Simulation, common: Any, value: Any
) -> None:
    seen: list[Any] = []

    async def look() -> None:
        for _ in range(6):
            await simulation.sleep(0.5)
            seen.append(variable.get())

    async def change() -> None:
        await simulation.sleep(0.75)
        variable.set(value)
        await simulation.sleep(0.75)
        assert variable.get() is value

    variable.set(common)
    run_together(simulation, look, change, look, change)
    assert len(seen) == 12
    assert all(each is common for each in seen)
