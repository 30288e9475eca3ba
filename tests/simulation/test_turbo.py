"""The turbo kernel: which awaits it refuses, and what it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio

from asynchooks._errors import ForeignAwaitError
from asynchooks.simulation import Simulation


async def with_task_group() -> None:
    async with anyio.create_task_group():
        pass


async def with_nursery() -> None:
    async with trio.open_nursery():
        pass


async def with_timeout() -> None:
    async with asyncio.timeout(1):  # noqa: ASYNC100 - refused before it waits
        pass


async def with_move_on() -> None:
    with anyio.move_on_after(1):
        await anyio.sleep(1)


async def with_stream() -> None:
    send, receive = anyio.create_memory_object_stream[int](0)
    with send, receive:
        await receive.receive()


async def with_queue() -> None:
    await asyncio.Queue[int]().get()


FOREIGN: dict[str, Callable[[], Any]] = {
    "asyncio.sleep(0)": lambda: asyncio.sleep(0),
    "asyncio.sleep(1)": lambda: asyncio.sleep(1),
    "asyncio.Event": lambda: asyncio.Event().wait(),
    "asyncio.Queue": with_queue,
    "asyncio.timeout": with_timeout,
    "asyncio.to_thread": lambda: asyncio.to_thread(int),
    "anyio.sleep": lambda: anyio.sleep(1),
    "anyio.Event": lambda: anyio.Event().wait(),
    "anyio.to_thread": lambda: anyio.to_thread.run_sync(int),
    "anyio's task group": with_task_group,
    "anyio's stream": with_stream,
    "anyio.move_on_after": with_move_on,
    "trio.sleep": lambda: trio.sleep(1),  # noqa: ASYNC105
    "trio.Event": lambda: trio.Event().wait(),
    "trio's nursery": with_nursery,
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_await_is_refused(foreign: Callable[[], Any]) -> None:
    with pytest.raises(ForeignAwaitError, match='turbo.*could not take.*use backend="asyncio"'):
        Simulation(backend="turbo").run(foreign)


def test_a_foreign_await_is_named_with_its_place() -> None:
    async def main() -> None:
        await asyncio.sleep(0)

    place = rf"NoneType at .*test_turbo.py:{main.__code__.co_firstlineno + 1} in .*main"
    with pytest.raises(ForeignAwaitError, match=place):
        Simulation(backend="turbo").run(main)


def test_an_error_of_the_program_passes_for_no_foreign_await() -> None:
    async def main() -> None:
        raise AttributeError("'NoneType' object has no attribute 'loss'")

    with pytest.raises(AttributeError, match="loss"):
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
