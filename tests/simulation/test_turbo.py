"""The turbo kernel: foreign awaits, what it closes, and the contexts that its tasks share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from asynchooks._errors import ForeignAwaitError
from asynchooks.simulation import Simulation

from .engines import run_together


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
    place = rf"test_turbo.py:{at.co_firstlineno + 1} in .*{at.co_name}"
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
