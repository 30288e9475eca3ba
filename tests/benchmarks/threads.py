"""What it costs to run a blocking step in a thread, and whether two of them overlap.

    python -m tests.benchmarks.threads

It does not measure steps that hold the GIL, nor what many threads cost.
"""

from __future__ import annotations

import time

import anyio
import anyio.to_thread

from asynchooks import FunctionSessionCreator, MonitoredSession, SharedSessionCreator

from ._contenders import OUTPUTS, above, do_nothing, function_session, median_ratio, secs_per_step
from ._report import Measure, Row, print_rows, rows_of, run_on

NUM_ROUNDS, BLOCK_STEPS = 31, 200
NUM_OVERLAP_ROUNDS, NUM_SLEEPS = 3, 50
SLEEP_SECS = 0.02

HAND_OVER = "threaded step: hand-over (thread - inline) / anyio.to_thread.run_sync, nothing done"
OVERLAP = f"two workers, thread-safe step sleeps {SLEEP_SECS * 1e3:.0f} ms, auto: wall / of one"
MEASURES = [Measure(HAND_OVER, "<= 0.60"), Measure(OVERLAP, "<= 1.15")]


def sleep() -> dict[str, float]:
    time.sleep(SLEEP_SECS)  # releases the GIL, as large steps do
    return OUTPUTS


async def by_anyio(num_steps: int) -> None:
    for _ in range(num_steps):
        await anyio.to_thread.run_sync(do_nothing)


async def hand_over() -> str:
    async with (
        function_session(do_nothing, step_runner="thread") as thread,
        function_session(do_nothing, step_runner="inline") as inline,
    ):
        blocks = {"thread": thread, "inline": inline, "anyio": by_anyio}
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(above(secs["thread"], secs["inline"]), secs["anyio"])


async def wall(num_workers: int, num_steps: int) -> None:
    """As many steps of each worker, from before its session opens until it has closed."""
    creator = SharedSessionCreator(FunctionSessionCreator(sleep, thread_safe=True))

    async def work() -> None:
        async with MonitoredSession([], creator, step_runner="auto") as session:
            for _ in range(num_steps):
                await session.run("loss")

    async with anyio.create_task_group() as workers:
        for _ in range(num_workers):
            workers.start_soon(work)


async def overlap() -> str:
    blocks = {"two": lambda steps: wall(2, steps), "one": lambda steps: wall(1, steps)}
    secs = await secs_per_step(blocks, NUM_SLEEPS, NUM_OVERLAP_ROUNDS)
    return median_ratio(secs["two"], secs["one"])


async def ratios() -> dict[str, str]:
    return {HAND_OVER: await hand_over(), OVERLAP: await overlap()}


def figures(loop: str) -> dict[str, str]:
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
