"""The turbo kernel: foreign awaits, what it closes, and the contexts that its tasks share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from asynchooks._engine.base import Slot
from asynchooks._errors import ForeignAwaitError
from asynchooks.simulation import Simulation

from .engines import run_together, simulated


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


variable: ContextVar[Any] = ContextVar("variable", default=None)


def looking(simulation: Simulation, seen: list[Any], num_looks: int) -> Callable[[], Any]:
    """A task that looks at the variable each half second, and changes nothing."""

    async def look() -> None:
        for _ in range(num_looks):
            await simulation.sleep(0.5)
            seen.append(variable.get())

    return look


@pytest.mark.parametrize("moment", ["first step", "a later step", "last step", "clean-up"])
@simulated
async def test_a_task_keeps_what_it_sets_to_itself(simulation: Simulation, moment: str) -> None:
    seen: list[Any] = []
    own: list[Any] = []

    def set_at(now: str) -> None:
        if now == moment:
            variable.set("own")

    async def change() -> None:
        try:
            set_at("first step")
            await simulation.sleep(0.75)
            set_at("a later step")
            await simulation.sleep(0.25)
            set_at("last step")
            if moment == "clean-up":
                await simulation.sleep(100)
        finally:
            set_at("clean-up")
            own.append(variable.get())

    look = looking(simulation, seen, 20)
    await simulation.sleep(1.25)
    simulation.start(look)
    await simulation.sleep(1.0)
    task = simulation.start(change)
    simulation.start(look)
    await simulation.sleep(3.1)
    task.cancel()
    await simulation.sleep(10.0)
    assert own == ["own"]
    assert set(seen) == {None}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ([], [[]]),
        lambda: (np.zeros(3), [np.zeros(3)]),
        lambda: (1, [1.0]),
        lambda: ("text", ["text"]),
        lambda: (object(), [np.zeros(3), np.ones(3)]),
    ],
    ids=["list", "array", "1", "text", "arrays over an object"],
)
def test_a_value_that_may_equal_the_common_one_is_a_tasks_own_all_the_same(
    simulation: Simulation, make: Callable[[], tuple[Any, list[Any]]]
) -> None:
    seen: list[Any] = []
    common, values = make()

    async def change() -> None:
        for value in values:
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


@pytest.mark.parametrize("keep_trace", [False, True])
def test_what_a_task_sets_as_its_wait_is_cancelled_is_its_own_also_with_shuffled_ties(
    backend: Any, keep_trace: bool
) -> None:
    seen: list[Any] = []

    def run(seed: int) -> None:
        simulation = Simulation(seed, backend, shuffle_ties=True, keep_trace=keep_trace)
        slots: list[Slot] = []

        async def look() -> None:
            await simulation.sleep(0.5)
            slots.append(Slot(simulation.kernel, "the end"))
            await simulation.kernel.park(slots[0])
            seen.append(variable.get())

        async def end() -> None:
            try:
                with simulation.kernel.shielded(100.0):
                    for _ in range(4):
                        await simulation.sleep(0.25)  # cancelled meanwhile
                await simulation.sleep(1.0)
            finally:
                variable.set("end")
                slots[0].wake()

        async def main() -> None:
            task = simulation.start(end)
            simulation.start(look)
            await simulation.sleep(0.75)
            task.cancel()
            await simulation.sleep(5.0)

        simulation.run(main)

    for seed in range(20):
        run(seed)
    assert seen == [None] * 20


def test_a_variable_is_reset_by_its_token_over_waits(simulation: Simulation) -> None:
    values: list[Any] = []

    async def task(number: int) -> None:
        token = variable.set(number)
        await simulation.sleep(0.5)
        inner = variable.set(-number)
        await simulation.sleep(0.5)
        variable.reset(inner)
        values.append(variable.get())
        variable.reset(token)
        await simulation.sleep(0.5)
        values.append(variable.get())

    run_together(simulation, *(partial(task, number) for number in range(1, 4)))
    assert values == [1, 2, 3, None, None, None]


def test_numpys_errstate_is_held_over_a_wait_by_its_task_alone(simulation: Simulation) -> None:
    seen: list[str] = []

    async def strict() -> None:
        with np.errstate(divide="raise"):
            await simulation.sleep(1)
            await simulation.sleep(1)
            with pytest.raises(FloatingPointError, match="divide"):
                np.float64(1) / np.float64(0)

    async def other() -> None:
        for _ in range(6):
            await simulation.sleep(0.5)
            seen.append(np.geterr()["divide"])

    run_together(simulation, other, strict, other)
    assert set(seen) == {np.geterr()["divide"]}


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
