"""What traces cost: processor time of a step with a TraceHook; bytes of a span.

    python -m tests.benchmarks.tracing

It does not measure stages of data, waits, OpenTelemetry or many sessions.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from asynchooks import TraceHook
from asynchooks.planning import Trace, record, timed

from ._contenders import Block, above, compare, function_session
from ._report import BusyModel, measure, typical

NUM_ROUNDS, BLOCK_STEPS, NUM_HOOKS, NUM_READ = 41, 1000, 4, 100_000
CLOCKS = {"all threads": time.process_time, "the event loop's thread": time.thread_time}
SPANS_PER_STEP = 2
"""A run and its step: calls of hooks that take less than 10 us are left out."""


def timed_by(clock: Callable[[], float], block: Block) -> Block:
    async def counted(num_steps: int) -> float:
        begun = clock()
        await block(num_steps)
        return clock() - begun

    return counted


async def costs(hook: TraceHook) -> dict[str, str]:
    """Of a session with the hook above one without."""
    off, on = (
        function_session(BusyModel(100e-6).step, NUM_HOOKS, more, step_runner="inline")
        for more in ((), [hook])
    )
    found = {}
    # a session that was opened before it is not recorded
    async with off as off_block, on as on_block:
        for name, clock in CLOCKS.items():
            blocks = {"off": timed_by(clock, off_block), "on": timed_by(clock, on_block)}
            secs = await compare(blocks, BLOCK_STEPS, NUM_ROUNDS)
            cost = typical([1e6 * each for each in above(secs["on"], secs["off"])])
            found[f"a step with 4 hooks and a TraceHook: processor us of {name}"] = cost
    return found


@timed("sized", output_size=lambda result: result)
async def sized() -> int:
    return 37


async def figures(loop: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        path, traced, sizes = Path(directory, "record"), Path(directory, "traced"), []
        found = await costs(TraceHook(traced))
        num_spans = len(CLOCKS) * SPANS_PER_STEP * BLOCK_STEPS * (NUM_ROUNDS + 1)
        found["bytes of a span in the file"] = f"{os.stat(traced).st_size / num_spans:.0f}"
        for num in (10, NUM_READ + 10):  # what does not grow with the spans is left out
            async with record(path):
                for _ in range(num):
                    await sized()
            sizes.append(os.stat(path).st_size)
        begun = time.perf_counter()
        Trace.read(path)
        found["100,000 spans read by Trace.read, s"] = f"{time.perf_counter() - begun:.3f}"
    size = f"{(sizes[1] - sizes[0]) / NUM_READ:.0f}"
    return found | {"bytes of a span of timed work with its size": size}


if __name__ == "__main__":
    measure(figures)
