"""What training loses by a sink that blocks for ever, and by one that raises at each call.

    python -m tests.benchmarks.stuck_sinks

Steps of 100 us, with a point at each 100th (the default of `MetricsHook`) or at each: the step rate
relative to a session without the hook, and to one whose sink works, blocks of steps in turns. It
does not measure what a real tracker does: tests/metrics has them stuck.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AsyncExitStack

from asynchooks import MetricsHook
from asynchooks.metrics import Point, Sink

from ._contenders import Block, function_session, secs_per_step
from ._report import BusyModel, median_ratio, print_table, run_on

NUM_ROUNDS, NUM_STEPS = 151, 200


class Works(Sink):
    """What the others are compared with."""

    def write(self, point: Point) -> None:
        pass


class Blocks(Sink):
    """As a tracker whose process is stopped."""

    def write(self, point: Point) -> None:
        threading.Event().wait()


class Raises(Sink):
    """As a tracker whose server refuses everything."""

    def write(self, point: Point) -> None:
        raise ConnectionRefusedError(f"step {point.step}")


async def figures(loop: str) -> list[list[str]]:
    hooks = {
        f"{kind.__name__}, a point each {every}": MetricsHook(kind(), "loss", every_n_steps=every)
        for kind in (Works, Blocks, Raises)
        for every in (100, 1)
    }
    blocks: dict[str, Block] = {}
    async with AsyncExitStack() as stack:
        for name, more in {"none": [], **{name: [hook] for name, hook in hooks.items()}}.items():
            session = function_session(
                BusyModel(100e-6).step, hooks=more, step_runner="inline",
                stop_grace_period_secs=1.0,
            )  # fmt: skip
            blocks[name] = await stack.enter_async_context(session)
        for block in blocks.values():  # the queues are full, and what is imported late is
            await block(50 * NUM_STEPS)
        secs = await secs_per_step(blocks, NUM_STEPS, NUM_ROUNDS)
    return [
        [
            name, loop, median_ratio(secs["none"], secs[name]),
            median_ratio(secs[f"Works,{name.partition(',')[2]}"], secs[name]),
            str(hook.num_dropped),
        ]
        for name, hook in hooks.items()
    ]  # fmt: skip


def main() -> None:
    logging.getLogger("asynchooks").setLevel(logging.CRITICAL)
    rows = [row for loop in ("asyncio", "trio") for row in run_on(loop, figures, loop)]
    header = ["the sink", "loop", "rate / none", "/ works", "dropped"]
    print_table("steps of 100 us with a sink that hangs or fails", header, rows)


if __name__ == "__main__":
    main()
