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
from ._report import LOOPS, Measure, Row, print_rows, rows_of, run_on, typical

Wait = Callable[[], Coroutine[Any, Any, None]]

NUM_IMPORTS, NUM_TASKS = 9, 1000
HEAVY = ("tensorflow", "trio", "numpy")

IMPORT = Measure("import asynchooks in a fresh process, ms (of no event loop)", "<= 100")
ANYIO = Measure("import anyio, which it needs, ms")
LOADED = Measure(f"which of {', '.join(HEAVY)} it loads", "none")
SESSION = Measure("1,000 waiting function sessions with a waiter hook: KB each", "<= 8")
BARE = Measure("1,000 bare tasks waiting for an anyio.Event: KB each")


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


def loaded() -> str:
    program = f"import asynchooks, sys; print(*({set(HEAVY)!r} & sys.modules.keys()))"
    return python(program) or "none"


class Waiting:
    """Tasks that wait, and how many do."""

    def __init__(self) -> None:
        self._creator = SharedSessionCreator(FunctionSessionCreator(do_nothing))
        self._event = anyio.Event()

    async def bytes_by_task(self) -> tuple[float, float]:
        """Of a task with a waiting session, and of a bare one, by tracemalloc."""

        def num_bare() -> int:
            return self._event.statistics().tasks_waiting

        async with MonitoredSession([], self._creator) as keeper:  # pays for what all share
            await keeper.run("loss")
            step = keeper.global_step

            def num_sessions() -> int:
                return step.statistics().tasks_waiting_for_step

            of_session = await self._bytes(self._session, num_sessions)
        return of_session, await self._bytes(self._event.wait, num_bare)

    async def _session(self) -> None:
        async with MonitoredSession([GlobalStepWaiterHook(10)], self._creator) as session:
            await session.run("loss")

    async def _bytes(self, wait: Wait, num_waiting: Callable[[], int]) -> float:
        await self._traced(wait, num_waiting, 1)  # what the first of its kind loads and caches
        tracemalloc.start()
        try:
            return await self._traced(wait, num_waiting, NUM_TASKS) / NUM_TASKS
        finally:
            tracemalloc.stop()

    async def _traced(self, wait: Wait, num_waiting: Callable[[], int], num_tasks: int) -> int:
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


def memory(loop: str) -> dict[str, str]:
    of_session, of_bare = run_on(loop, lambda: Waiting().bytes_by_task())
    return {SESSION.name: f"{of_session / 1e3:.1f}", BARE.name: f"{of_bare / 1e3:.1f}"}


def rows() -> list[Row]:
    imports = {IMPORT: import_ms("asynchooks"), ANYIO: import_ms("anyio"), LOADED: loaded()}
    others = ["-"] * (len(LOOPS) - 1)
    return [
        *(Row(measure, [figure, *others]) for measure, figure in imports.items()),
        *rows_of([SESSION, BARE], memory),
    ]


if __name__ == "__main__":
    print_rows(rows())
