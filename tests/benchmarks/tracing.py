"""What a trace costs: a step of 100 us with and without a TraceHook, and the bytes of a span.

    python -m tests.benchmarks.tracing

It does not measure stages of data, waits, OpenTelemetry or many sessions.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from asynchooks import FunctionSessionCreator, MonitoredSession, TraceHook

from ._contenders import Block, DoNothing, median_ratio, run_by, secs_per_step
from ._report import Measure, Row, print_rows, rows_of, run_on

STEP_SECS = 100e-6
NUM_ROUNDS, BLOCK_STEPS = 41, 1000
NUM_HOOKS = (0, 4)
SPANS_PER_STEP = 2
"""A run and its step: calls of hooks that take less than 10 us are left out."""


def traced(num_hooks: int) -> str:
    return f"function step of 100 us, {num_hooks} hooks: traced / not traced"


BYTES = Measure("bytes of a span in the file", "<= 60")
MEASURES = [*(Measure(traced(num), "<= 1.02") for num in NUM_HOOKS), BYTES]


def spin() -> dict[str, float]:
    until = time.perf_counter() + STEP_SECS
    while time.perf_counter() < until:
        pass
    return {"loss": 0.0}


async def ratio_and_bytes(num_hooks: int, directory: str) -> tuple[str, float]:
    blocks: dict[str, Block] = {}
    path = Path(directory, f"{num_hooks}.pftrace")
    async with AsyncExitStack() as stack:
        for name, tracing in {"off": [], "on": [TraceHook(path)]}.items():
            hooks = [*tracing, *(DoNothing() for _ in range(num_hooks))]
            session = MonitoredSession(hooks, FunctionSessionCreator(spin), step_runner="inline")
            blocks[name] = run_by(await stack.enter_async_context(session), "loss")
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    num_spans = SPANS_PER_STEP * BLOCK_STEPS * (NUM_ROUNDS + 1)
    return median_ratio(secs["on"], secs["off"]), os.stat(path).st_size / num_spans


async def ratios() -> Mapping[str, str]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for num_hooks in NUM_HOOKS:
            found[traced(num_hooks)], size = await ratio_and_bytes(num_hooks, directory)
            found[BYTES.name] = f"{size:.0f}"
    return found


def figures(loop: str) -> Mapping[str, str]:
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
