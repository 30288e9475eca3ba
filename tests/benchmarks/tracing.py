"""What traces cost: a step of 100 us with and without a TraceHook, or a record; bytes of a span.

    python -m tests.benchmarks.tracing

It does not measure stages of data, waits, OpenTelemetry or many sessions.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from asynchooks import FunctionSessionCreator, MonitoredSession, TraceHook
from asynchooks.planning import Trace, record, timed

from ._contenders import Block, DoNothing, called, median_ratio, run_by, secs_per_step
from ._report import Measure, Row, print_rows, rows_of, run_on

STEP_SECS = 100e-6
NUM_ROUNDS, BLOCK_STEPS = 41, 1000
NUM_HOOKS = (0, 4)
NUM_READ = 100_000
SPANS_PER_STEP = 2
"""A run and its step: calls of hooks that take less than 10 us are left out."""


def traced(num_hooks: int) -> str:
    return f"function step of 100 us, {num_hooks} hooks: traced / not traced"


BYTES = Measure("bytes of a span in the file", "<= 110")
RECORDED = Measure("function step of 100 us, 4 hooks: recorded / not recorded", "<= 1.15")
TIMED = Measure("function step of 100 us, 4 hooks: timed, recorded / neither", "<= 1.25")
TIMED_BYTES = Measure("bytes of a span of timed work with its size", "<= 110")
OFF = Measure("function of 100 us: timed, not recorded / not timed", "1.00")
READ = Measure("100,000 spans read by Trace.read, s", "<= 1")
MEASURES = [
    *(Measure(traced(num), "<= 1.15") for num in NUM_HOOKS),
    BYTES, RECORDED, TIMED, TIMED_BYTES, OFF, READ,
]  # fmt: skip


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


timed_spin = timed("spin")(spin)


async def ratio_of_record(step: Callable[[], dict[str, float]], directory: str) -> str:
    """Of a session that is recorded, with this step, and of one without either."""
    blocks: dict[str, Block] = {}
    async with AsyncExitStack() as stack:
        for name, fn in {"off": spin, "on": step}.items():
            if name == "on":  # a session that was opened before it is not recorded
                await stack.enter_async_context(record(Path(directory, "record.pftrace")))
            hooks = [DoNothing() for _ in range(4)]
            session = MonitoredSession(hooks, FunctionSessionCreator(fn), step_runner="inline")
            blocks[name] = run_by(await stack.enter_async_context(session), "loss")
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(secs["on"], secs["off"])


@timed("sized", output_size=lambda result: result)
async def sized() -> int:
    return 37


async def bytes_and_secs_to_read(directory: str) -> tuple[float, float]:
    sizes, path = [], Path(directory, "timed.pftrace")
    for num in (10, NUM_READ + 10):  # what does not grow with the spans is left out
        async with record(path):
            for _ in range(num):
                await sized()
        sizes.append(os.stat(path).st_size)
    begun = time.perf_counter()
    Trace.read(path)
    return (sizes[1] - sizes[0]) / NUM_READ, time.perf_counter() - begun


async def ratios() -> Mapping[str, str]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for num_hooks in NUM_HOOKS:
            found[traced(num_hooks)], size = await ratio_and_bytes(num_hooks, directory)
            found[BYTES.name] = f"{size:.0f}"
        found[RECORDED.name] = await ratio_of_record(spin, directory)
        found[TIMED.name] = await ratio_of_record(timed_spin, directory)
        size, secs = await bytes_and_secs_to_read(directory)
        found[TIMED_BYTES.name], found[READ.name] = f"{size:.0f}", f"{secs:.3f}"
        blocks = {"off": called(spin), "on": called(timed_spin)}
        of_calls = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
        found[OFF.name] = median_ratio(of_calls["on"], of_calls["off"])
    return found


def figures(loop: str) -> Mapping[str, str]:
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
