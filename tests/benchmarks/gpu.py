"""What hooks, an event loop beside it and saves cost around a PyTorch step on a CUDA device.

    python -m tests.benchmarks.gpu

It needs a CUDA device, and measures one process on one device.
"""

import statistics
import tempfile
import time
from typing import Any

import anyio

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    StateDictSaver,
)

from ._report import measure
from .torch_steps import Training, beside_bare_loop, beside_torch_loop, four_hooks


async def lateness(training: Training, runner: Any) -> str:
    """How late a task beside training is that sleeps 1 ms at a time."""
    late = []

    async def tick() -> None:
        while True:
            begun = time.perf_counter()
            await anyio.sleep(1e-3)
            late.append(time.perf_counter() - begun - 1e-3)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        async with MonitoredSession(four_hooks(), training.step, step_runner=runner) as session:
            for turn in range(550):
                if turn == 50:
                    late.clear()
                await session.run("loss")
        group.cancel_scope.cancel()
    return f"{statistics.quantiles(late, n=100)[98] * 1e3:.1f}"


async def saving(training: Training) -> dict[str, str]:
    """How much longer the steps of a training are that saves in the background."""
    saver = StateDictSaver(module=training.module, optimizer=training.optimizer)
    with tempfile.TemporaryDirectory() as directory:
        hook = CheckpointSaverHook(directory, save_steps=400, saver=saver, background=True)
        async with MonitoredSession([hook], training.step) as session:
            secs = []
            for _ in range(2000):
                begun = time.perf_counter()
                await session.run("loss")
                secs.append(time.perf_counter() - begun)
    megabytes = sum(each.nbytes for each in training.module.parameters()) / 1e6
    usual = statistics.median(secs)
    what = f"{megabytes:.0f} MB saved each 400 steps of {usual * 1e3:.1f} ms"
    longest = statistics.median(sorted(secs)[-6:]) * 1e3
    return {
        f"{what}: all steps longer by": f"{100 * (statistics.mean(secs) / usual - 1):.1f} %",
        f"{what}: the step with the copy, ms": f"{longest:.0f}",
    }


async def figures(loop: str) -> dict[str, str]:
    long, short = Training(0.005, "cuda"), Training(0.001, "cuda")
    found = await beside_bare_loop(long) | await beside_bare_loop(short)
    for runner in ("auto", "inline", "thread"):
        name = f"how late a task beside a 5 ms step is, 99 %, ms, {runner}"
        found[name] = await lateness(long, runner)
    if loop == "asyncio":
        name = "DataLoader, 2 workers, pinned, under FeedHook / torch's loop over it"
        found[name] = await beside_torch_loop(long, 2)
        found |= await saving(long)
    return found


if __name__ == "__main__":
    measure(figures)
