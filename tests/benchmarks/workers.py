"""Many workers on one event loop: where they stop, what they get done, how late they make others.

    python -m tests.benchmarks.workers

It does not measure several processes.
"""

import gc
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)

from ._contenders import Block, compare, run_by
from ._linear_model import linear_model
from ._report import BusyModel, is_installed, measure, median_ratio, typical

LAST_STEP, NUM_TRIALS = 200, 2
NUM_ROUNDS, BLOCK_STEPS, NUM_WORKERS = 9, 50 * 64, 64
NUM_RUNS, RUN_SECS, TIMER_SECS = 3, 1.5, 0.01

Model = tuple[SessionCreator, Any, Callable[[Any], int]]
"""A creator, what to fetch, and how to read the true step from the raw session."""


def tensorflow_model() -> Model:
    import tensorflow as tf

    from asynchooks import ChiefSessionCreator

    model = linear_model()
    with model.graph.as_default():
        step = tf.compat.v1.train.get_global_step()
        return ChiefSessionCreator(), model.train_op, lambda session: int(session.run(step))


def function_model() -> Model:
    model = BusyModel()
    creator = FunctionSessionCreator(model.step, thread_safe=True)
    return creator, "loss", lambda session: len(model.done_at) - 1


class ReadTrueStep(SessionRunHook):
    """Reads the step from the model itself at the end, past what the session believes."""

    def __init__(self, steps: set[int], read: Callable[[Any], int]) -> None:
        self._steps, self._read = steps, read

    def end(self, session: Any) -> None:
        self._steps.add(self._read(session))


async def final_step(model: Model, num_workers: int, step_runner: Any) -> int:
    creator, fetch, read = model
    shared, steps = SharedSessionCreator(creator, num_workers), set[int]()

    async def work() -> None:
        hooks = [StopAtStepHook(last_step=LAST_STEP), ReadTrueStep(steps, read)]
        async with MonitoredSession(hooks, shared, step_runner=step_runner) as session:
            while not session.should_stop():
                await session.run(fetch)

    async with anyio.create_task_group() as group:
        for _ in range(num_workers):
            group.start_soon(work)
    return max(steps)


async def final_steps() -> dict[str, str]:
    """Those that occurred over all numbers of workers and trials."""
    found = {}
    for model in [tensorflow_model] * is_installed("tensorflow") + [function_model]:
        for runner in ("inline", "thread"):
            seen = {await final_step(model(), num, runner) for num in (1, 2, 4, 8, 64) * NUM_TRIALS}
            name = f"final step of 1 to 64 workers, {model.__name__}, {runner}"
            found[name] = ", ".join(map(str, sorted(seen)))
    return found


def together(blocks: list[Block]) -> Block:
    """So many steps in all, by workers that each do their part."""

    async def block(num_steps: int) -> None:
        async with anyio.create_task_group() as workers:
            for each in blocks:
                workers.start_soon(each, num_steps // len(blocks))

    return block


async def throughputs() -> dict[str, str]:
    async with AsyncExitStack() as stack:
        blocks: dict[str, Block] = {}
        for runner in ("inline", "thread"):
            creator, fetch, _ = tensorflow_model()
            shared, each = SharedSessionCreator(creator), []
            for _ in range(NUM_WORKERS):
                session = MonitoredSession([], shared, step_runner=runner)
                each.append(run_by(await stack.enter_async_context(session), fetch))
            blocks[f"64 {runner}"] = together(each)
            blocks[f"1 {runner}"] = each[0]
        secs = await compare(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return {
        f"64 workers, one TensorFlow session, {many}: steps/s / of one worker, {one}": median_ratio(
            secs[f"1 {one}"], secs[f"64 {many}"]
        )
        for many, one in (("inline", "inline"), ("thread", "thread"), ("thread", "inline"))
    }


async def latest_ms(num_workers: int) -> float:
    """The largest lateness of a timer in a run of `RUN_SECS`, after all workers have opened."""
    creator = SharedSessionCreator(FunctionSessionCreator(BusyModel().step))
    worst_secs, is_over = 0.0, anyio.Event()

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
            until = time.perf_counter() + RUN_SECS
            while (begun := time.perf_counter()) < until:
                await anyio.sleep(TIMER_SECS)
                worst_secs = max(worst_secs, time.perf_counter() - begun - TIMER_SECS)
            is_over.set()
    return worst_secs * 1e3


async def figures(loop: str) -> dict[str, str]:
    found = await final_steps()
    for num in (1, 64, 1000):
        worst = [await latest_ms(num) for _ in range(NUM_RUNS)]
        name = f"largest lateness of a 10 ms timer beside busy inline workers, {num:,}, ms"
        found[name] = typical(worst, decimals=1)
    return found | (await throughputs() if is_installed("tensorflow") else {})


if __name__ == "__main__":
    measure(figures)
