"""What training loses by a sink that blocks for ever, and by one that raises at each call.

    python -m tests.benchmarks.stuck_sinks

Steps of 100 us, with a point at each 100th (the default of `MetricsHook`) or at each: the step rate
relative to a session without the hook, and to one whose sink works, blocks of steps in turns. After
all blocks: how much the process grew meanwhile, and the points that were put and dropped. It does
not measure what a real tracker does: tests/metrics has them stuck.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

from asynchooks import FunctionSessionCreator, MetricsHook, MonitoredSession
from asynchooks.metrics import Point, Sink

from ._contenders import OUTPUTS, Block, median_ratio, run_by, secs_per_step
from ._report import print_table, run_on

NUM_ROUNDS, NUM_STEPS = 151, 200
STEP_SECS = 100e-6
GRACE_SECS = 1.0
PAGE_BYTES = 4096


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


def busy_step() -> dict[str, float]:
    until = time.perf_counter() + STEP_SECS
    while time.perf_counter() < until:
        pass
    return OUTPUTS


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 2**20


async def figures() -> list[list[str]]:
    hooks = {
        (kind.__name__, every): MetricsHook(kind(), "loss", every_n_steps=every)
        for kind in (Works, Blocks, Raises)
        for every in (100, 1)
    }
    blocks: dict[str, Block] = {}
    async with AsyncExitStack() as stack:
        for name, its_hooks in {"none": [], **{str(key): [hooks[key]] for key in hooks}}.items():
            session = MonitoredSession(
                its_hooks, FunctionSessionCreator(busy_step),
                step_runner="inline", stop_grace_period_secs=GRACE_SECS,
            )  # fmt: skip
            blocks[name] = run_by(await stack.enter_async_context(session), "loss")
        for block in blocks.values():  # the queues are full, and what is imported late is
            await block(50 * NUM_STEPS)
        before = resident_mib()
        secs = await secs_per_step(blocks, NUM_STEPS, NUM_ROUNDS)
        growth = resident_mib() - before
    num_steps = (50 + 1 + NUM_ROUNDS) * NUM_STEPS
    return [
        [
            f"{kind.lower()}, a point at {'each step' if every == 1 else f'each {every} steps'}",
            median_ratio(secs["none"], secs[str((kind, every))]),
            median_ratio(secs[str(("Works", every))], secs[str((kind, every))]),
            str(num_steps // every + (every > 1)),
            str(hook.num_dropped),
            f"{growth:.1f}",
        ]
        for (kind, every), hook in hooks.items()
    ]


def main() -> None:
    logging.getLogger("asynchooks").setLevel(logging.CRITICAL)
    rows = []
    for loop in ("asyncio", "trio"):
        begun = time.perf_counter()
        rows += [[row[0], loop, *row[1:]] for row in run_on(loop, figures)]
        rows[-1].append(f"{time.perf_counter() - begun:.0f}")
    header = [
        "the sink",
        "loop",
        "rate / none",
        "/ works",
        "points",
        "dropped",
        "all: MiB",
        "all: s",
    ]
    print_table(
        "steps of 100 us with a sink that hangs or fails", header, [[*r, ""][:8] for r in rows]
    )


if __name__ == "__main__":
    main()
