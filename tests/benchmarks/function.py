"""What a session adds to a step function, beside Ignite's engine, a bare loop and a bare thread.

    python -m tests.benchmarks "function steps"

It does not measure steps that hold the GIL in threads, nor many workers.
"""

import time
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from asynchooks import FunctionSessionCreator, MonitoredSession, SharedSessionCreator

from ._contenders import (
    OUTPUTS,
    Block,
    above,
    called,
    compare,
    do_nothing,
    function_session,
    ratio,
)
from ._report import BusyModel, is_installed, median_ratio

NUM_ROUNDS = 25
BLOCK_STEPS, BUSY_BLOCK_STEPS = 2000, 500

HAND_OVER = "threaded step: hand-over (thread - inline) / anyio.to_thread.run_sync, nothing done"
OVERLAP = "two workers, thread-safe step sleeps 20 ms, auto: wall / of one"


def by_ignite(num_pairs: int) -> Block:
    """Ignite's engine over a range, with handlers that do nothing around each step."""
    from ignite.engine import Engine, Events

    engine = Engine(lambda engine, batch: do_nothing())

    def handler(engine: Any) -> None:
        return None

    for _ in range(num_pairs):
        engine.add_event_handler(Events.ITERATION_STARTED, handler)
        engine.add_event_handler(Events.ITERATION_COMPLETED, handler)

    async def block(num_steps: int) -> None:
        engine.run(range(num_steps), max_epochs=1)
        assert engine.state.iteration == num_steps, "Ignite went on with its last run"

    return block


async def ignite_ratio(num_hooks: int) -> str:
    contenders = {
        "ours": function_session(do_nothing, num_hooks),
        "bare": called(do_nothing),
        "theirs": by_ignite(num_hooks),
    }
    secs = await compare(contenders, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(*(above(secs[name], secs["bare"]) for name in ("ours", "theirs")))


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
    busy = {
        f"function step of 33 us, hooks: {num} / bare loop": function_session(BusyModel().step, num)
        for num in (0, 4)
    }
    contenders: dict[str, Any] = {"bare": called(BusyModel().step), **busy}
    secs = await compare(contenders, BUSY_BLOCK_STEPS, NUM_ROUNDS)
    bare = secs.pop("bare")
    found = {name: median_ratio(each, bare) for name, each in secs.items()}
    beside = "overhead / PyTorch Ignite's, as many handler pairs"
    for num in (0, 1, 4, 8) if is_installed("ignite") else ():
        found[f"function step, hooks: {num}: {beside}"] = await ignite_ratio(num)
    ours: dict[str, Any] = {
        each: function_session(do_nothing, step_runner=each) for each in ("thread", "inline")
    }
    secs = await compare({**ours, "anyio": by_anyio}, 200, 31)
    handed_over = above(secs["thread"], secs["inline"])
    return found | {
        HAND_OVER: median_ratio(handed_over, secs["anyio"]),
        OVERLAP: await ratio(partial(wall, 2), partial(wall, 1), 50, 3),
    }
