"""What many workers on one session get done, and how late they make others on their event loop.

    python -m tests.benchmarks.many_workers

It does not measure several processes, nor whether workers stop exactly (workers.py does).
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
)

from ._contenders import Block, median_ratio, run_by, secs_per_step
from ._linear_model import linear_model
from ._report import BusyModel, Measure, Row, print_rows, rows_of, run_on, typical
from ._watch import TIMER_SECS, Watch

NUM_ROUNDS, BLOCK_STEPS, NUM_WORKERS = 9, 50 * 64, 64
NUM_RUNS, RUN_SECS = 3, 1.5

INLINE = "64 workers, one TensorFlow session, inline: steps/s / of one worker, inline"
THREAD = "64 workers, one TensorFlow session, thread: steps/s / of one worker, thread"
MIXED = "64 workers, one TensorFlow session, thread: steps/s / of one worker, inline"
THROUGHPUT = [
    Measure(INLINE, ">= 0.95", "tensorflow"),
    Measure(THREAD, ">= 1.20", "tensorflow"),
    Measure(MIXED, peer="tensorflow"),
]
CROWDS = {1: "-", 64: "<= 25", 1000: "<= 150"}


def crowd(num_workers: int) -> str:
    workers = "worker" if num_workers == 1 else "workers"
    return f"{num_workers:,} busy inline {workers}"


def late(num_workers: int) -> str:
    timer = f"{TIMER_SECS * 1e3:.0f} ms timer"
    return f"{timer} beside {crowd(num_workers)}: largest lateness, ms"


def stall(num_workers: int) -> str:
    return f"longest stall of the loop with {crowd(num_workers)}, ms"


LATENESS = [
    *(Measure(late(num), bar) for num, bar in CROWDS.items()),
    *(Measure(stall(num)) for num in CROWDS),
]


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
    pairs = {
        INLINE: ("inline", "inline"),
        THREAD: ("thread", "thread"),
        MIXED: ("inline", "thread"),
    }
    return {
        name: median_ratio(secs[f"1 {one}"], secs[f"64 {many}"])
        for name, (one, many) in pairs.items()
    }


async def worst_secs(num_workers: int, watched: Callable[[Watch], Awaitable[None]]) -> float:
    """The worst of a run of `RUN_SECS`, after all workers have opened."""
    creator = SharedSessionCreator(FunctionSessionCreator(BusyModel().step))
    is_over = anyio.Event()

    async def work(session: MonitoredSession) -> None:
        while not is_over.is_set():
            await session.run("loss")

    watch = Watch()
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                MonitoredSession([], creator, step_runner="inline"),
            )
            for _ in range(num_workers)
        ]
        gc.collect()
        async with anyio.create_task_group() as workers:
            for session in sessions:
                workers.start_soon(work, session)
            with anyio.move_on_after(RUN_SECS):
                await watched(watch)
            is_over.set()
    return watch.worst_secs


async def typical_worst_ms(num_workers: int, watched: Callable[[Watch], Awaitable[None]]) -> str:
    worst = [await worst_secs(num_workers, watched) for _ in range(NUM_RUNS)]
    return typical([secs * 1e3 for secs in worst], decimals=1)


async def worsts() -> dict[str, str]:
    found = {late(num): await typical_worst_ms(num, Watch.timer) for num in CROWDS}
    return found | {stall(num): await typical_worst_ms(num, Watch.turns) for num in CROWDS}


def throughput(loop: str) -> dict[str, str]:
    return run_on(loop, throughputs)


def lateness(loop: str) -> dict[str, str]:
    return run_on(loop, worsts)


def rows() -> list[Row]:
    return [*rows_of(THROUGHPUT, throughput), *rows_of(LATENESS, lateness)]


if __name__ == "__main__":
    print_rows(rows())
