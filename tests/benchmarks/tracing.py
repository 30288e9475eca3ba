"""What traces cost: a step of 100 us with and without a TraceHook, or a record; bytes of a span.

    python -m tests.benchmarks.tracing

It does not measure stages of data, waits, OpenTelemetry or many sessions.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from asynchooks import TraceHook
from asynchooks.planning import Trace, record, timed

from ._contenders import compare, function_session
from ._report import BusyModel, measure, median_ratio

NUM_ROUNDS, BLOCK_STEPS, NUM_READ = 41, 1000, 100_000
SPANS_PER_STEP = 2
"""A run and its step: calls of hooks that take less than 10 us are left out."""


async def ratio(num_hooks: int, hooks: Any, manager: Any = None) -> str:
    """Of a session with these hooks, or opened within a manager, to one without."""
    off, on = (
        function_session(BusyModel(100e-6).step, num_hooks, more, step_runner="inline")
        for more in ((), hooks)
    )
    # a session that was opened before it is not recorded
    async with off as off_block, manager or nullcontext(), on as on_block:
        secs = await compare({"off": off_block, "on": on_block}, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(secs["on"], secs["off"])


@timed("sized", output_size=lambda result: result)
async def sized() -> int:
    return 37


async def figures(loop: str) -> dict[str, str]:
    found, sizes, step = {}, [], "function step of 100 us, hooks"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.pftrace")
        for num in (0, 4):
            traced = Path(directory, f"{num}.pftrace")
            found[f"{step}: {num}: traced / not traced"] = await ratio(num, [TraceHook(traced)])
            num_spans = SPANS_PER_STEP * BLOCK_STEPS * (NUM_ROUNDS + 1)
            found["bytes of a span in the file"] = f"{os.stat(traced).st_size / num_spans:.0f}"
        found[f"{step}: 4: recorded / not recorded"] = await ratio(4, (), record(path))
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
