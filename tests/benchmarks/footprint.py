"""How long `import asynchooks` takes, and how much memory a waiting session holds.

    python -m tests.benchmarks "imports and memory"

It does not measure TensorFlow's imports, nor the memory of graphs, threads or the process.
"""

import gc
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from asynchooks import (
    GlobalStepWaiterHook,
    MonitoredSession,
    SharedSessionCreator,
)

from ._contenders import do_nothing
from ._report import typical

NUM_IMPORTS, NUM_TASKS = 9, 1000


def import_ms(module: str) -> str:
    """Median of the difference to a process that imports nothing, which takes turns with it."""
    secs = []
    # a process may keep what it has compiled
    env = {name: each for name, each in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for program in ["pass", f"import {module}"] * (NUM_IMPORTS + 1):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, env=env)
        secs.append(time.perf_counter() - begun)
    pairs = zip(secs[2::2], secs[3::2], strict=True)  # the first pair may have had to compile
    return typical([(full - empty) * 1e3 for empty, full in pairs], decimals=0)


async def kilobytes(wait: Callable[[], Coroutine[Any, Any, None]]) -> str:
    """What each of many tasks holds while it waits."""
    held = []
    tracemalloc.start()
    for num_tasks in (1, NUM_TASKS):  # the first of its kind loads and caches things
        async with anyio.create_task_group() as group:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(num_tasks):
                group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0] - before)
            group.cancel_scope.cancel()
    tracemalloc.stop()
    return f"{held[1] / NUM_TASKS / 1e3:.1f}"


async def figures(loop: str) -> dict[str, str]:
    found = {}
    if loop == "asyncio":
        for module in ("asynchooks", "anyio"):
            found[f"import {module} in a fresh process, ms (of no event loop)"] = import_ms(module)
    creator = SharedSessionCreator(do_nothing)

    async def in_session() -> None:
        async with MonitoredSession([GlobalStepWaiterHook(10)], creator) as session:
            await session.run("loss")

    async with MonitoredSession([], creator) as keeper:  # pays for what all share
        await keeper.run("loss")
        name = "1,000 waiting function sessions with a waiter hook: KB each"
        found[name] = await kilobytes(in_session)
    bare = await kilobytes(anyio.Event().wait)
    return found | {"1,000 bare tasks waiting for an anyio.Event: KB each": bare}
