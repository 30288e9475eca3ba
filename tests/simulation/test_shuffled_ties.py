"""Shuffled ties: every order of the tasks that are ready is tried, and the seed decides which."""

from collections.abc import Awaitable, Callable
from itertools import permutations
from typing import Any

import anyio
import anyio.lowlevel

from asynchooks import GlobalStep
from asynchooks.simulation import Simulation

from .engines import BACKENDS, on_event_loops

ALL_ORDERS = {"".join(each) for each in permutations("abcd")}

Program = Callable[[Simulation], Awaitable[Any]]


def run(program: Program, backend: Any, seed: int, shuffle_ties: bool = True) -> Any:
    simulation = Simulation(seed, backend, shuffle_ties=shuffle_ties, keep_trace=True)
    return simulation.run(program, simulation), simulation.trace.to_bytes()


def orders(program: Program, backend: Any, num_seeds: int = 150) -> set[str]:
    return {run(program, backend, seed)[0] for seed in range(num_seeds)}


async def tasks_at_an_event(simulation: Simulation) -> str:
    event, lock, order = anyio.Event(), anyio.Lock(), ""

    async def wait(name: str) -> None:
        nonlocal order
        with anyio.move_on_after(1.5):
            await event.wait()
            async with lock:
                order += name
                await anyio.lowlevel.checkpoint()
            await (simulation.sleep(9) if name < "c" else anyio.sleep(9))
        simulation.note(f"{name} at {simulation.now}")

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


@on_event_loops
def test_tasks_that_an_event_loop_wakes_together_run_in_every_order_of_which_the_seed_decides(
    backend: Any,
) -> None:
    assert orders(tasks_at_an_event, backend) == ALL_ORDERS
    for seed in range(10):
        first, other = (run(tasks_at_an_event, backend, seed) for _ in range(2))
        assert first == other


def test_tasks_that_wait_for_one_step_run_in_every_order_the_same_on_every_backend() -> None:
    assert orders(tasks_at_a_step, "turbo") == ALL_ORDERS
    for seed in range(10):
        runs = [run(tasks_at_a_step, backend, seed) for backend in BACKENDS]
        assert all(each == runs[0] for each in runs)


def test_without_it_tasks_run_in_the_order_in_which_they_were_woken() -> None:
    assert {run(tasks_at_an_event, "asyncio", seed, False)[0] for seed in range(20)} == {"abcd"}
    for backend in BACKENDS:
        assert {run(tasks_at_a_step, backend, seed, False)[0] for seed in range(20)} == {"abcd"}
