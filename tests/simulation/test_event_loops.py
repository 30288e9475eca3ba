"""The kernels on asyncio and on trio: own tasks, timers, threads and I/O in virtual time."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.abc
import pytest
import trio
import trio.testing

from asynchooks._engine.base import Slot
from asynchooks._errors import DeadlockError, LivelockError, OutsideWorkError, SimulationError
from asynchooks.simulation import Simulation

from .engines import on_event_loops, simulated

on_asyncio = pytest.mark.parametrize("backend", ["asyncio"])
on_trio = pytest.mark.parametrize("backend", ["trio"])


async def sleeping(secs: float) -> float:
    await asyncio.sleep(secs)
    return asyncio.get_running_loop().time()


@on_event_loops
@simulated
async def test_what_is_built_on_anyio_ends_at_exactly_its_time(simulation: Simulation) -> None:
    await anyio.sleep(3.2e9)  # noqa: ASYNC116
    assert simulation.now == 3.2e9
    with anyio.move_on_after(0.1):
        await anyio.sleep(100)
    assert simulation.now == 3.2e9 + 0.1
    send, receive = anyio.create_memory_object_stream[int](1)
    async with anyio.create_task_group() as group, send, receive:

        async def produce() -> None:
            await anyio.sleep(2.5)
            await send.send(1)

        group.start_soon(produce)
        await receive.receive()
    assert simulation.now == 3.2e9 + 0.1 + 2.5


@on_asyncio
@simulated
async def test_timeouts_and_task_groups_of_asyncio_end_at_exactly_their_times(
    simulation: Simulation,
) -> None:
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
    assert times == [3.0, 0.1, 3.2e9, 3.2e9 + 0.3, 3.2e9 + 0.3 + 7]


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
    with pytest.raises(trio.TooSlowError), trio.fail_after(0.3):
        await trio.sleep(100)
    times.append(trio.current_time())
    for deadline in (3.2e9 + 10, 2):  # one that is past ends at once, and time stays
        with trio.move_on_at(deadline):
            await trio.sleep_forever()
        times.append(trio.current_time())
    assert times == [3.2e9, 3.2e9 + 0.3, 3.2e9 + 10, 3.2e9 + 10]


@on_asyncio
@simulated
async def test_equal_times_of_asyncios_own_timers_are_served_in_order(
    simulation: Simulation,
) -> None:
    order: list[int] = []

    loop = asyncio.get_running_loop()
    for number in range(12):
        loop.call_later(5, order.append, number)
    await asyncio.sleep(6)
    assert order == list(range(12))


@on_asyncio
@simulated
async def test_a_cancelled_timer_never_fires_and_leaves_the_heap(simulation: Simulation) -> None:
    for _ in range(5000):
        asyncio.get_running_loop().call_later(1e9, pytest.fail).cancel()
    await asyncio.sleep(1)
    assert len(simulation.kernel.heap) < 1100


@on_asyncio
def test_a_timer_at_no_time_is_refused(simulation: Simulation) -> None:
    async def main() -> None:
        # asyncio.sleep refuses it itself since Python 3.13
        asyncio.get_running_loop().call_later(math.nan, pytest.fail)

    with pytest.raises(SimulationError, match="after nan seconds; give a number >= 0"):
        simulation.run(main)


@on_asyncio
@simulated
async def test_a_sleep_for_ever_ends_by_its_timeout(simulation: Simulation) -> None:
    with anyio.move_on_after(2.5):
        await asyncio.sleep(math.inf)
    assert simulation.now == 2.5


@on_asyncio
def test_tasks_that_the_program_leaves_behind_are_cancelled(simulation: Simulation) -> None:
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
    simulation.run(main)
    assert log == ["started", "cleaned"]


@on_asyncio
def test_a_deadlock_names_tasks_of_one_name_in_a_task_group(simulation: Simulation) -> None:
    async def child() -> None:
        await anyio.Event().wait()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            group.start_soon(child)

    with pytest.raises(DeadlockError, match=r"child, .*child: a wait of another library's at .*"):
        simulation.run(main)


@on_event_loops
def test_a_deadlock_in_another_librarys_shield_is_an_error(simulation: Simulation) -> None:
    async def main() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()

    with pytest.raises(DeadlockError, match="main: a wait of another library's at .*in .*main"):
        simulation.run(main)


@on_asyncio
def test_the_cancellation_of_a_future_that_main_awaited_leaves(simulation: Simulation) -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(5))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        simulation.run(main)


@pytest.mark.parametrize(
    ("backend", "spin"),
    [
        ("asyncio", lambda: asyncio.sleep(0)),
        ("trio", lambda: trio.lowlevel.checkpoint()),  # noqa: ASYNC105
    ],
    ids=["asyncio", "trio"],
)
def test_another_librarys_wait_that_spends_no_time_is_refused(
    backend: Any, spin: Callable[[], Any]
) -> None:
    async def main() -> None:
        while True:
            await spin()

    with pytest.raises(LivelockError, match="more than 50 turns each at virtual time 0.0"):
        Simulation(backend=backend, max_turns=50).run(main)


def test_to_ask_for_trios_time_is_no_turn() -> None:
    async def main() -> float:
        for _ in range(1000):
            trio.current_time()
        await trio.sleep(1)
        return trio.current_time()

    assert Simulation(backend="trio", max_turns=10).run(main) == 1.0


@pytest.mark.parametrize(
    "wait", [trio.testing.wait_all_tasks_blocked, anyio.wait_all_tasks_blocked]
)
@on_trio
@simulated
async def test_all_tasks_of_trio_are_blocked_before_time_passes(
    simulation: Simulation, wait: Any
) -> None:
    log: list[str] = []

    async def child() -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        log.append("blocked")
        await trio.sleep(50)

    simulation.start(simulation.sleep, 100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)
        await wait()
        log.append("unblocked")
        assert simulation.now == 0.0
    await wait()
    assert simulation.now == 50.0
    assert log == ["blocked", "unblocked"]


def sleep_really(secs: float = 0.03) -> None:
    """Block this thread, where `time.sleep` is the program's error."""
    threading.Event().wait(secs)


@pytest.mark.parametrize("is_own_pool", [False, True])
@on_asyncio
@simulated
async def test_time_stands_still_while_an_executor_works(
    simulation: Simulation, is_own_pool: bool
) -> None:
    simulation.start(simulation.sleep, 100)
    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool if is_own_pool else None, sleep_really)
    assert simulation.now == 0.0
    await simulation.sleep(1)
    assert simulation.now == 1.0


@on_asyncio
@simulated
async def test_time_stands_still_until_an_abandoned_thread_has_worked(
    simulation: Simulation,
) -> None:
    times: list[float] = []

    def work() -> None:
        sleep_really(0.05)
        times.append(simulation.now)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.to_thread(work)
    await simulation.sleep(100)
    assert simulation.now == 100.0
    assert times == [0.0]


@on_asyncio
@simulated
async def test_a_call_that_its_executor_never_began_holds_no_time(simulation: Simulation) -> None:
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
    assert simulation.now == 1.0


@on_event_loops
@simulated
async def test_time_stands_still_while_a_thread_works_or_was_abandoned(
    simulation: Simulation,
) -> None:
    times: list[float] = []

    def work() -> None:
        sleep_really()
        times.append(simulation.now)

    limiter = anyio.CapacityLimiter(1)
    simulation.start(simulation.sleep, 100)
    with anyio.move_on_after(0.5):
        await anyio.to_thread.run_sync(work, limiter=limiter)
    begun = threading.Event()

    def be_abandoned() -> None:
        begun.set()
        work()

    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            assert begun.wait(20)
            scope.cancel()

        simulation.start(cancel)
        await anyio.to_thread.run_sync(be_abandoned, abandon_on_cancel=True)
    times.append(simulation.now)
    await simulation.sleep(1)
    times.append(simulation.now)
    # of the thread, main, the abandoned thread that main did not wait for, main
    assert times == [0.0, 0.0, 0.0, 1.0]


@on_event_loops
def test_until_does_not_pass_a_thread_that_works(simulation: Simulation) -> None:
    times: list[float] = []

    async def main() -> None:
        simulation.start(simulation.sleep, 100)
        await anyio.to_thread.run_sync(sleep_really)
        times.append(simulation.now)
        await simulation.sleep(100)

    simulation.run(main, until=10)
    assert times == [0.0]
    assert simulation.now == 10.0


@simulated
async def test_a_bare_thread_wakes_a_slot_while_time_stands_still(simulation: Simulation) -> None:
    simulation.start(simulation.sleep, 100)
    await simulation.sleep(2)
    slot = Slot(simulation.kernel, "a thread's outcome")

    def work() -> None:
        sleep_really(0.02)
        slot.wake(7)

    thread = threading.Thread(target=work)
    with simulation.outside_work():
        thread.start()
        assert await simulation.kernel.park(slot) == 7
    thread.join()
    assert simulation.now == 2.0


def test_a_thread_that_wakes_a_slot_after_the_run_does_no_harm(simulation: Simulation) -> None:
    slots: list[Slot] = []

    async def main() -> None:
        slots.append(Slot(simulation.kernel, "a late outcome"))

    simulation.run(main)
    thread = threading.Thread(target=slots[0].wake)  # pytest raises what a thread raises
    thread.start()
    thread.join()


@on_event_loops
def test_real_io_is_refused_unless_declared(simulation: Simulation) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        async def main() -> None:
            await anyio.wait_readable(ours)

        with pytest.raises(OutsideWorkError, match="waits for real I/O, which takes no virtual"):
            simulation.run(main)


@on_event_loops
@simulated
async def test_time_stands_still_during_declared_io(simulation: Simulation) -> None:
    async def echo(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(await stream.receive())

    simulation.start(simulation.sleep, 100)
    await simulation.sleep(1)
    with simulation.outside_work():
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, echo)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
            group.cancel_scope.cancel()
    assert simulation.now == 1.0
    await simulation.sleep(5)
    assert simulation.now == 6.0
