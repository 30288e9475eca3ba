"""The turbo kernel: foreign awaits, what it closes, and the contexts that its tasks share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from asynchooks._errors import ForeignAwaitError
from asynchooks.simulation import Simulation

from .engines import run_together, simulated


async def with_task_group() -> None:
    async with anyio.create_task_group():
        pass


async def with_nursery() -> None:
    async with trio.open_nursery():
        pass


FOREIGN: dict[str, Callable[[], Any]] = {
    "asyncio.sleep(0)": lambda: asyncio.sleep(0),
    "asyncio.sleep(1)": lambda: asyncio.sleep(1),
    "asyncio.Event": lambda: asyncio.Event().wait(),
    "asyncio.to_thread": lambda: asyncio.to_thread(int),
    "anyio.sleep": lambda: anyio.sleep(1),
    "anyio.Event": lambda: anyio.Event().wait(),
    "anyio.to_thread": lambda: anyio.to_thread.run_sync(int),
    "anyio's task group": with_task_group,
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


def looking(simulation: Simulation, seen: list[Any], num_looks: int) -> Callable[[], Any]:
    """A task that looks at the variable each half second, and changes nothing."""

    async def look() -> None:
        for _ in range(num_looks):
            await simulation.sleep(0.5)
            seen.append(variable.get())

    return look


@pytest.mark.parametrize(
    ("common", "value"),
    [([], []), (np.zeros(3), np.zeros(3)), (1, 1.0), ("text", "text")],
    ids=["list", "array", "1", "text"],
)
def test_a_value_that_may_equal_the_common_one_is_a_tasks_own_all_the_same(
    simulation: Simulation, common: Any, value: Any
) -> None:
    seen: list[Any] = []

    async def change() -> None:
        await simulation.sleep(0.75)
        variable.set(value)
        await simulation.sleep(0.75)
        assert variable.get() is value

    def run() -> None:
        variable.set(common)
        look = looking(simulation, seen, 6)
        run_together(simulation, look, change, look, change)
        assert len(seen) == 12
        assert all(each is common for each in seen)

    copy_context().run(run)


@simulated
async def test_a_task_inherits_what_its_starter_had_set_by_then(simulation: Simulation) -> None:
    values: list[Any] = []

    async def child() -> None:
        values.append(variable.get())
        variable.set("the child's")
        await simulation.sleep(1)
        values.append(variable.get())

    simulation.start(child)
    variable.set("later")
    simulation.start(child)
    await simulation.sleep(2)
    values.append(variable.get())
    assert values == [None, "later", "the child's", "the child's", "later"]
