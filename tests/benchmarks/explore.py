"""Schedules that a search tries in a second, beside simloom and simloop, on the same program.

    python -m tests.benchmarks.explore

Two workers train three steps. asynchooks runs the program by its own search, on "turbo" and on
"asyncio"; the others, where they are installed (Python 3.12 and later), by theirs, in one process
each. Then each looks for a lost update that needs one overtaking.
"""

import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import anyio

from asynchooks import SharedSessionCreator
from asynchooks.simulation import ScheduleError, Simulation, explore

from ..support.step_loops import run_steps
from ._report import print_table

Sleep = Callable[[float], Awaitable[None]]
OTHERS = ("simloom", "simloop")
NUM_SCHEDULES, NUM_RUNS = 300, 5
"""What each search tries at most, and how often, in turns."""


async def train(sleep: Sleep, start: Callable[..., Any], end: Callable[..., Any]) -> None:
    num_made = 0

    async def step() -> dict[str, Any]:
        nonlocal num_made
        await sleep(1.0)
        num_made += 1
        return {}

    creator = SharedSessionCreator(step, num_workers=2)
    await end([start(partial(run_steps, creator, 3)) for _ in range(2)])
    assert num_made == 3


async def lose_update(sleep: Sleep, start: Callable[..., Any], end: Callable[..., Any]) -> None:
    """The second task reads after the first has written, if they take turns as usual."""
    balance = 0

    async def deposit() -> None:
        nonlocal balance
        await sleep(1.0)
        balance += 1

    async def double() -> None:
        nonlocal balance
        await sleep(1.0)
        balance *= 2

    await end([start(deposit), start(double)])
    assert balance == 2


async def in_simulation(program: Callable[..., Any], simulation: Simulation) -> None:
    async def end(tasks: list[Any]) -> None:
        for each in tasks:
            await each.wait()

    await program(simulation.sleep, simulation.start, end)


async def on_asyncio(program: Callable[..., Any]) -> None:
    fns: list[Callable[..., Any]] = []

    async def end(_: object) -> None:
        async with anyio.create_task_group() as group:
            for fn in fns:
                group.start_soon(fn)

    await program(anyio.sleep, fns.append, end)


def search_with(name: Any, program: Callable[..., Any]) -> tuple[int, bool]:
    """How many schedules were tried, and whether one failed."""
    if name in OTHERS:
        num_run = 0

        async def main() -> None:
            nonlocal num_run
            num_run += 1
            await on_asyncio(program)

        module, has_failed = import_module(name), False
        try:
            if name == "simloom":
                has_failed = bool(module.explore(main, runs=NUM_SCHEDULES).failures)
            else:
                has_failed = module.explore(main, range(NUM_SCHEDULES)) is not None
        except AssertionError:
            has_failed = True
        return num_run, has_failed
    main_of = in_simulation if name == "turbo" else lambda program, _: on_asyncio(program)
    run = partial(main_of, program)
    try:
        found = explore(run, backend=name, num_processes=1, max_delays=1, num_random=NUM_SCHEDULES)
    except ScheduleError as error:
        return int(str(error).split("in schedule ")[1].split(",")[0].replace(",", "")), True
    return found.num_schedules, False


def main() -> None:
    logging.disable(logging.WARNING)
    names = ["turbo", "asyncio", *(each for each in OTHERS if find_spec(each) is not None)]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(NUM_RUNS):
        for name in names:
            begun = time.process_time()
            tried, _ = search_with(name, train)
            rates[name].append(tried / (time.process_time() - begun))
    slowest = min(statistics.median(each) for each in rates.values())
    rows = []
    for name in names:
        rate = statistics.median(rates[name])
        tried, has_failed = search_with(name, lose_update)
        found = f"in schedule {tried}" if has_failed else f"not in {tried}"
        label = name if name in OTHERS else f'asynchooks, "{name}"'
        rows.append([label, f"{rate:.0f}", f"{rate / slowest:.1f}", found])
    columns = ["", "schedules a second of processor time", "of the slowest", "lost update found"]
    print_table("2 workers x 3 steps", columns, rows)


if __name__ == "__main__":
    main()
