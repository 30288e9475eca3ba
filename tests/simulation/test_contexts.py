"""Context variables are a task's own, though turbo's tasks share a context until one changes it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest

from asynchooks.simulation import Simulation

variable: ContextVar[Any] = ContextVar("variable", default=None)


def looking(simulation: Simulation, seen: list[Any], num_looks: int) -> Callable[[], Any]:
    """A task that looks at the variable each half second, and changes nothing."""

    async def look() -> None:
        for _ in range(num_looks):
            await simulation.sleep(0.5)
            seen.append(variable.get())

    return look


@pytest.mark.parametrize("moment", ["first step", "a later step", "last step", "clean-up"])
def test_a_task_keeps_what_it_sets_to_itself(simulation: Simulation, moment: str) -> None:
    seen: list[Any] = []
    own: list[Any] = []

    async def change() -> None:
        try:
            if moment == "first step":
                variable.set("own")
            await simulation.sleep(0.75)
            if moment == "a later step":
                variable.set("own")
                await simulation.sleep(0.25)
            if moment == "last step":
                variable.set("own")
            if moment == "clean-up":
                await simulation.sleep(100)
        finally:
            if moment == "clean-up":
                variable.set("own")
            own.append(variable.get())

    async def main() -> None:
        look = looking(simulation, seen, 20)
        await simulation.sleep(1.25)
        simulation.start(look)
        await simulation.sleep(1.0)
        task = simulation.start(change)
        simulation.start(look)
        await simulation.sleep(3.1)
        task.cancel()
        await simulation.sleep(10.0)

    simulation.run(main)
    assert own == ["own"]
    assert set(seen) == {None}


@pytest.mark.parametrize(
    "value",
    [list, lambda: np.zeros(3), lambda: 1.0, lambda: "text"],
    ids=["list", "array", "1", "text"],
)
def test_a_value_that_equals_the_common_one_is_a_tasks_own_all_the_same(
    simulation: Simulation, value: Callable[[], Any]
) -> None:
    seen: list[Any] = []
    own = value()

    async def change() -> None:
        await simulation.sleep(0.75)
        variable.set(own)
        await simulation.sleep(2.0)
        assert variable.get() is own

    async def main() -> None:
        look = looking(simulation, seen, 6)
        for each in (look, change, look):
            simulation.start(each)
        await simulation.sleep(5)

    def run() -> None:
        common = 1 if isinstance(own, float) else value()
        variable.set(common)
        simulation.run(main)
        assert len(seen) == 12
        assert all(each is common for each in seen)

    copy_context().run(run)


def test_an_array_set_over_a_plain_object_is_a_tasks_own(simulation: Simulation) -> None:
    seen: list[Any] = []

    async def change() -> None:
        await simulation.sleep(0.75)
        variable.set(np.zeros(3))
        await simulation.sleep(0.75)
        variable.set(np.ones(3))

    async def main() -> None:
        look = looking(simulation, seen, 6)
        for each in (look, change, look, change):
            simulation.start(each)
        await simulation.sleep(5)

    def run() -> None:
        common = object()
        variable.set(common)
        simulation.run(main)
        assert all(each is common for each in seen)

    copy_context().run(run)


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

    async def main() -> None:
        tasks = [simulation.start(task, number) for number in range(1, 4)]
        for each in tasks:
            await each.wait()

    simulation.run(main)
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

    async def main() -> None:
        await simulation.sleep(1)
        for each in (other, strict, other):
            simulation.start(each)
        await simulation.sleep(5)

    simulation.run(main)
    assert set(seen) == {np.geterr()["divide"]}


def test_a_task_inherits_what_its_starter_had_set_by_then(simulation: Simulation) -> None:
    values: list[Any] = []

    async def child() -> None:
        values.append(variable.get())
        variable.set("the child's")
        await simulation.sleep(1)
        values.append(variable.get())

    async def main() -> None:
        simulation.start(child)
        variable.set("later")
        simulation.start(child)
        await simulation.sleep(2)
        values.append(variable.get())

    simulation.run(main)
    assert values == [None, "later", "the child's", "the child's", "later"]
