"""What it costs to run a blocking step in a thread, and whether two of them overlap.

    python -m tests.benchmarks.threads

It does not measure steps that hold the GIL, nor what many threads cost.
"""

from __future__ import annotations

import time

import anyio
import anyio.to_thread

from asynchooks import FunctionSessionCreator, MonitoredSession, SharedSessionCreator

from ._contenders import OUTPUTS, above, compare, do_nothing, function_session
from ._report import measure, median_ratio

HAND_OVER = "threaded step: hand-over (thread - inline) / anyio.to_thread.run_sync, nothing done"
OVERLAP = "two workers, thread-safe step sleeps 20 ms, auto: wall / of one"


def sleep() -> dict[str, float]:
    time.sleep(0.02)  # releases the GIL, as large steps do
    return OUTPUTS


async def by_anyio(num_steps: int) -> None:
    for _ in range(num_steps):
        await anyio.to_thread.run_sync(do_nothing)


async def wall(num_workers: int, num_steps: int) -> None:
    """As many steps of each worker, from before its session opens until it has closed."""
    creator = SharedSessionCreator(FunctionSessionCreator(sleep, thread_safe=True))

    async def work() -> None:
        async with MonitoredSession([], creator) as session:
            for _ in range(num_steps):
                await session.run("loss")

    async with anyio.create_task_group() as workers:
        for _ in range(num_workers):
            workers.start_soon(work)


async def figures(loop: str) -> dict[str, str]:
    ours = {each: function_session(do_nothing, step_runner=each) for each in ("thread", "inline")}
    secs = await compare({**ours, "anyio": by_anyio}, 200, 31)
    walls = {"two": lambda steps: wall(2, steps), "one": lambda steps: wall(1, steps)}
    overlap = await compare(walls, 50, 3)
    return {
        HAND_OVER: median_ratio(above(secs["thread"], secs["inline"]), secs["anyio"]),
        OVERLAP: median_ratio(overlap["two"], overlap["one"]),
    }


if __name__ == "__main__":
    measure(figures)
