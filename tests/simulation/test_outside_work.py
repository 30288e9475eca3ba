"""Virtual time stands still while something outside of the simulation works."""

from __future__ import annotations

import socket
import threading
from typing import Any

import anyio
import anyio.abc
import pytest

from asynchooks._engine.base import Slot
from asynchooks._errors import DeadlockError, OutsideWorkError
from asynchooks.simulation import Simulation

from .engines import on_event_loops


@on_event_loops
def test_real_io_is_refused_unless_declared(backend: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        async def main() -> None:
            await anyio.wait_readable(ours)

        with pytest.raises(OutsideWorkError, match="waits for real I/O, which takes no virtual"):
            Simulation(backend=backend).run(main)


@on_event_loops
def test_time_stands_still_during_declared_io(simulation: Simulation) -> None:
    async def echo(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(await stream.receive())

    async def main() -> tuple[bytes, float, float]:
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
                    answer = await stream.receive()
                group.cancel_scope.cancel()
        ended = simulation.now
        await simulation.sleep(5)
        return answer, ended, simulation.now

    assert simulation.run(main) == (b"hello", 1.0, 6.0)


def test_a_bare_thread_wakes_a_slot_while_time_stands_still(simulation: Simulation) -> None:
    async def main() -> tuple[Any, float]:
        simulation.start(simulation.sleep, 100)
        await simulation.sleep(2)
        slot = Slot(simulation.kernel, "a thread's outcome")

        def work() -> None:
            threading.Event().wait(0.02)
            slot.wake(7)

        thread = threading.Thread(target=work)
        with simulation.outside_work():
            thread.start()
            value = await simulation.kernel.park(slot)
        thread.join()
        return value, simulation.now

    assert simulation.run(main) == (7, 2.0)


def test_a_thread_that_wakes_a_slot_after_the_run_does_no_harm(simulation: Simulation) -> None:
    slots: list[Slot] = []

    async def main() -> None:
        slots.append(Slot(simulation.kernel, "a late outcome"))

    simulation.run(main)
    thread = threading.Thread(target=slots[0].wake)  # pytest raises what a thread raises
    thread.start()
    thread.join()


@on_event_loops
def test_time_stands_still_while_a_thread_works_or_was_abandoned(simulation: Simulation) -> None:
    times: list[float] = []

    def work() -> None:
        threading.Event().wait(0.03)
        times.append(simulation.now)

    async def main() -> None:
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

    simulation.run(main)
    # of the thread, main, the abandoned thread that main did not wait for, main
    assert times == [0.0, 0.0, 0.0, 1.0]


@on_event_loops
def test_until_does_not_pass_a_thread_that_works(simulation: Simulation) -> None:
    times: list[float] = []

    async def main() -> None:
        simulation.start(simulation.sleep, 100)
        await anyio.to_thread.run_sync(threading.Event().wait, 0.03)
        times.append(simulation.now)
        await simulation.sleep(100)

    simulation.run(main, until=10)
    assert times == [0.0]
    assert simulation.now == 10.0


@on_event_loops
def test_a_deadlock_in_another_librarys_shield_is_an_error(backend: Any) -> None:
    async def main() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()

    with pytest.raises(DeadlockError, match="main: a wait of another library's at .*in .*main"):
        Simulation(backend=backend).run(main)
