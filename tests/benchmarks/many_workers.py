"""What many workers on one session get done, and how late they make others on their event loop.

    python -m tests.benchmarks.many_workers

It does not measure several processes, nor whether workers stop exactly (workers.py does).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel

from asynchooks import FunctionSessionCreator, MonitoredSession, SharedSessionCreator

from ._contenders import Block, run_by, secs_per_step
from ._linear_model import linear_model
from ._report import BusyModel, is_installed, measure, median_ratio, typical

NUM_ROUNDS, BLOCK_STEPS, NUM_WORKERS = 9, 50 * 64, 64
NUM_RUNS, RUN_SECS, TIMER_SECS = 3, 1.5, 0.01


def together(blocks: list[Block]) -> Block:
    """So many steps in all, by workers that each do their part."""

    async def block(num_steps: int) -> None:
        async with anyio.create_task_group() as workers:
            for each in blocks:
                workers.start_soon(each, num_steps // len(blocks))

    return block


async def throughputs() -> dict[str, str]:
    from asynchooks import ChiefSessionCreator  # needs TensorFlow

    async with AsyncExitStack() as stack:
        blocks: dict[str, Block] = {}
        for runner in ("inline", "thread"):
            model = linear_model()
            with model.graph.as_default():
                creator = SharedSessionCreator(ChiefSessionCreator())
            each = []
            for _ in range(NUM_WORKERS):
                session = MonitoredSession([], creator, step_runner=runner)
                each.append(run_by(await stack.enter_async_context(session), model.train_op))
            blocks[f"64 {runner}"] = together(each)
            blocks[f"1 {runner}"] = together(each[:1])
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return {
        f"64 workers, one TensorFlow session, {many}: steps/s / of one worker, {one}": median_ratio(
            secs[f"1 {one}"], secs[f"64 {many}"]
        )
        for many, one in (("inline", "inline"), ("thread", "thread"), ("thread", "inline"))
    }


class Watch:
    """The worst that a task beside the workers saw; one for the timer, another for the turns.

    A task that asks for every turn never lets the event loop sleep: beside busy workers it does
    not sleep anyway, but a timer measured at the same time would be served sooner.
    """

    def __init__(self) -> None:
        self.worst_secs = 0.0

    async def timer(self) -> None:
        """For ever: how long after its time a timer of `TIMER_SECS` lets its task go on."""
        while True:
            due = time.perf_counter() + TIMER_SECS
            await anyio.sleep(TIMER_SECS)
            self.worst_secs = max(self.worst_secs, time.perf_counter() - due)

    async def turns(self) -> None:
        """For ever: how long the loop takes to come back to a task that only yields."""
        last = time.perf_counter()
        while True:
            await anyio.lowlevel.checkpoint()
            now = time.perf_counter()
            self.worst_secs, last = max(self.worst_secs, now - last), now


async def worst_ms(num_workers: int, watched: Callable[[Watch], Awaitable[None]]) -> float:
    """The worst of a run of `RUN_SECS`, after all workers have opened."""
    creator = SharedSessionCreator(FunctionSessionCreator(BusyModel().step))
    is_over, watch = anyio.Event(), Watch()

    async def work(session: MonitoredSession) -> None:
        while not is_over.is_set():
            await session.run("loss")

    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(MonitoredSession([], creator, step_runner="inline"))
            for _ in range(num_workers)
        ]
        gc.collect()
        async with anyio.create_task_group() as workers:
            for session in sessions:
                workers.start_soon(work, session)
            with anyio.move_on_after(RUN_SECS):
                await watched(watch)
            is_over.set()
    return watch.worst_secs * 1e3


async def figures(loop: str) -> dict[str, str]:
    found = {}
    for name, watched in (
        ("largest lateness of a 10 ms timer", Watch.timer),
        ("longest stall of the loop", Watch.turns),
    ):
        for num in (1, 64, 1000):
            worst = [await worst_ms(num, watched) for _ in range(NUM_RUNS)]
            found[f"{name} beside busy inline workers, {num:,}, ms"] = typical(worst, decimals=1)
    return found | (await throughputs() if is_installed("tensorflow") else {})


if __name__ == "__main__":
    measure(figures)
