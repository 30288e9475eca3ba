"""The engines that tests run a program on. Nothing is tested here."""

import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from asynchooks.simulation import Simulation

BACKENDS: tuple[Any, ...] = ("asyncio", "trio", "turbo")

on_every_engine = pytest.mark.parametrize("backend", BACKENDS)
on_event_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])

_ROOT = Path(__file__).parents[2]


def simulated(main: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test is the main task of its `simulation`."""

    @wraps(main)
    def run(simulation: Simulation, **arguments: Any) -> None:
        ended: list[bool] = []

        async def to_the_end() -> None:
            await main(simulation=simulation, **arguments)
            ended.append(True)

        simulation.run(to_the_end)
        assert ended

    return run


def run_together(simulation: Simulation, *fns: Callable[[], Awaitable[Any]]) -> None:
    """Run each as a task, until the last has ended."""

    async def main() -> None:
        for task in [simulation.start(each) for each in fns]:
            await task.wait()

    simulation.run(main)


def output_of(program: str, **environment: str) -> list[str]:
    """What a program prints in a process of its own, which may leave no error or warning."""
    command = [sys.executable, "-W", "error", "-c", program]
    variables = {"PYTHONPATH": str(_ROOT), **environment}
    done = run(command, capture_output=True, text=True, timeout=60, env=variables, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()
