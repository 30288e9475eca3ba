"""How long `import asynchooks` takes, what it loads, and how much memory a waiting session holds.

    python -m tests.benchmarks.footprint

It does not measure TensorFlow's imports, nor the memory of graphs, threads or the process.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel

from asynchooks import (
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    SharedSessionCreator,
)

from ._contenders import do_nothing
from ._report import measure, typical

Wait = Callable[[], Coroutine[Any, Any, None]]

NUM_IMPORTS, NUM_TASKS = 9, 1000
HEAVY = ("tensorflow", "trio", "numpy")


def python(program: str) -> str:
    """What the program prints, in a process of its own, which may keep what it has compiled."""
    env = {name: each for name, each in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, env=env
    ).stdout.strip()


def import_ms(module: str) -> str:
    """Median of the difference to a process that imports nothing, which takes turns with it."""
    secs = []
    for program in ["pass", f"import {module}"] * (NUM_IMPORTS + 1):
        begun = time.perf_counter()
        python(program)
        secs.append(time.perf_counter() - begun)
    pairs = zip(secs[2::2], secs[3::2], strict=True)  # the first pair may have had to compile
    return typical([(full - empty) * 1e3 for empty, full in pairs], decimals=0)


async def traced(wait: Wait, num_waiting: Callable[[], int], num_tasks: int) -> int:
    """Bytes that so many tasks hold while they wait; 0 if nothing is traced."""
    async with anyio.create_task_group() as group:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(num_tasks):
            group.start_soon(wait)
        while num_waiting() < num_tasks:
            await anyio.lowlevel.checkpoint()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        group.cancel_scope.cancel()
    return after - before


async def kilobytes(wait: Wait, num_waiting: Callable[[], int]) -> str:
    await traced(wait, num_waiting, 1)  # what the first of its kind loads and caches
    tracemalloc.start()
    try:
        return f"{await traced(wait, num_waiting, NUM_TASKS) / NUM_TASKS / 1e3:.1f}"
    finally:
        tracemalloc.stop()


async def figures(loop: str) -> dict[str, str]:
    found, event = {}, anyio.Event()
    if loop == "asyncio":
        program = f"import asynchooks, sys; print(*({set(HEAVY)!r} & sys.modules.keys()))"
        for module in ("asynchooks", "anyio"):
            found[f"import {module} in a fresh process, ms (of no event loop)"] = import_ms(module)
        found[f"which of {', '.join(HEAVY)} it loads"] = python(program) or "none"
    creator = SharedSessionCreator(FunctionSessionCreator(do_nothing))

    async def in_session() -> None:
        async with MonitoredSession([GlobalStepWaiterHook(10)], creator) as session:
            await session.run("loss")

    async with MonitoredSession([], creator) as keeper:  # pays for what all share
        await keeper.run("loss")
        step = keeper.global_step
        found["1,000 waiting function sessions with a waiter hook: KB each"] = await kilobytes(
            in_session, lambda: step.statistics().tasks_waiting_for_step
        )
    found["1,000 bare tasks waiting for an anyio.Event: KB each"] = await kilobytes(
        event.wait, lambda: event.statistics().tasks_waiting
    )
    return found


if __name__ == "__main__":
    measure(figures)
