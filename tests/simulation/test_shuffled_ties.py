"""Shuffled ties: every order of the tasks that are ready is tried, and the seed decides which."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import permutations
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import GlobalStep
from asynchooks.simulation import Simulation

from .engines import BACKENDS

EVENT_LOOPS = ["asyncio", "trio"]
ALL_ORDERS = {"".join(each) for each in permutations("abcd")}

Program = Callable[[Simulation], Awaitable[Any]]


def run(program: Program, backend: Any, seed: int, shuffle_ties: bool = True) -> Any:
    simulation = Simulation(seed, backend, shuffle_ties=shuffle_ties, keep_trace=True)
    return simulation.run(program, simulation), simulation.trace.to_bytes()


def orders(program: Program, backend: Any, num_seeds: int = 150) -> set[str]:
    return {run(program, backend, seed)[0] for seed in range(num_seeds)}


async def tasks_at_an_event(simulation: Simulation) -> str:
    event, order = anyio.Event(), ""

    async def wait(name: str) -> None:
        nonlocal order
        await event.wait()
        order += name

    async with anyio.create_task_group() as group:
        for name in "abcd":
            group.start_soon(wait, name)
        await anyio.sleep(1)
        event.set()
    return order


async def tasks_at_a_step(simulation: Simulation) -> str:
    step, order = GlobalStep(), ""

    async def wait(name: str) -> None:
        nonlocal order
        await step.wait_for(1)
        order += name

    tasks = [simulation.start(wait, name) for name in "abcd"]
    await simulation.sleep(1)
    step.publish(1)
    for each in tasks:
        await each.wait()
    return order


@pytest.mark.parametrize("backend", EVENT_LOOPS)
def test_tasks_that_an_event_loop_wakes_together_run_in_every_order(backend: Any) -> None:
    assert orders(tasks_at_an_event, backend) == ALL_ORDERS


def test_tasks_that_wait_for_one_step_run_in_every_order_the_same_on_every_backend() -> None:
    assert orders(tasks_at_a_step, "turbo") == ALL_ORDERS
    for seed in range(10):
        runs = [run(tasks_at_a_step, backend, seed) for backend in BACKENDS]
        assert all(each == runs[0] for each in runs)


def test_without_it_tasks_run_in_the_order_in_which_they_were_woken() -> None:
    assert {run(tasks_at_an_event, "asyncio", seed, False)[0] for seed in range(20)} == {"abcd"}
    for backend in BACKENDS:
        assert {run(tasks_at_a_step, backend, seed, False)[0] for seed in range(20)} == {"abcd"}


async def what_waits_in_all_ways(simulation: Simulation) -> list[str]:
    """Locks, streams, timeouts, cancellations, shields, and sleeps of both kinds."""
    lock, noted = anyio.Lock(), list[str]()
    sender, receiver = anyio.create_memory_object_stream[str](2)

    async def worker(name: str) -> None:
        try:
            for i in range(4):
                async with lock:
                    noted.append(f"{name} has the lock")
                    await anyio.lowlevel.checkpoint()
                await sender.send(f"{name}{i}")
                with anyio.move_on_after(0.5):
                    await (simulation.sleep(i) if name < "c" else anyio.sleep(i))
                noted.append(f"{name} at {simulation.now}")
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.25)
            noted.append(f"{name} is over at {simulation.now}")

    async def receive() -> None:
        async for each in receiver:
            noted.append(each)

    async with anyio.create_task_group() as group, sender, receiver:
        for name in "abcd":
            group.start_soon(worker, name)
        group.start_soon(receive)
        await anyio.sleep(5)
        group.cancel_scope.cancel()
    return noted


@pytest.mark.parametrize("backend", EVENT_LOOPS)
def test_the_seed_alone_decides_whatever_tasks_wait_for(backend: Any) -> None:
    found = []
    for seed in range(10):
        first, other = [run(what_waits_in_all_ways, backend, seed) for _ in range(2)]
        assert first == other
        found.append(first[0])
        assert len([each for each in first[0] if "is over at 5.25" in each]) == 4
    assert len({tuple(each) for each in found}) == 10
