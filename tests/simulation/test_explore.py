"""explore: every order of a program's tasks, the shortest failing one told and replayed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import permutations
from typing import Any

import anyio
import pytest

from asynchooks import PreemptionError
from asynchooks.simulation import (
    DeadlockError,
    ForeignAwaitError,
    ScheduleError,
    Simulation,
    SimulationError,
    explore,
)

from .engines import BACKENDS

Program = Callable[[Simulation], Awaitable[Any]]


def named(seen: list[str]) -> Program:
    """Three tasks that are ready together, and one choice each."""

    async def main(simulation: Simulation) -> None:
        order = ""

        async def run(name: str) -> None:
            nonlocal order
            await simulation.sleep(1.0)
            order += name

        tasks = [simulation.start(run, name, name=name) for name in "abc"]
        for each in tasks:
            await each.wait()
        seen.append(order)

    return main


async def lost_update(simulation: Simulation) -> None:
    """The second task reads before the first writes, but only if it overtakes it."""
    balance = 0
    is_locked = False

    async def deposit() -> None:
        nonlocal balance, is_locked
        if is_locked:
            return
        await simulation.sleep(0.0)
        is_locked = True
        balance += 1

    async def check() -> None:
        await simulation.sleep(0.0)
        await simulation.sleep(0.0)
        before = balance
        assert before == 1, "the deposit came late"

    tasks = [simulation.start(deposit, name="deposit"), simulation.start(check, name="check")]
    for each in tasks:
        await each.wait()


async def anyio_race(simulation: Simulation) -> None:
    """A waiter that an event of anyio wakes and a timer of the same time."""
    event, log = anyio.Event(), ""

    async def wait() -> None:
        nonlocal log
        await event.wait()
        log += "event "

    async def sleep() -> None:
        nonlocal log
        await simulation.sleep(1.0)
        log += "timer "

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.sleep(0.5)
        simulation.start(sleep, name="sleeper")
        await simulation.sleep(1.0)
        event.set()
        await simulation.sleep(1.0)
    assert log.startswith("event"), log


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_order_is_tried_once(backend: Any) -> None:
    seen: list[str] = []
    found = explore(named(seen), backend=backend, max_delays=5)
    assert {*seen} == {"".join(each) for each in permutations("abc")}
    assert found.is_complete
    assert found.num_schedules == len(seen)
