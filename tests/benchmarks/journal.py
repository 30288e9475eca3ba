"""What a journal of rollouts costs: time of a finished call, of a step, and bytes.

    python -m tests.benchmarks.journal [--runs 7]

Without and with `journal=`, in turns: calls that do nothing, with results of 1 and of 32 kB, in
batches of 8; and a learner whose steps take 100 ms, with 32 calls of 100 ms under way. Beside it,
what pickling its result and writing it to a file takes alone, since that is paid in any case.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import rollouts

from ._report import LOOPS, print_table, run_on

BATCH_SIZE, NUM_CALLS, NUM_STEPS, STEP_SECS = 8, 2_000, 20, 0.1


async def secs_of_calls(num_bytes: int, journal: str | None) -> float:
    """A call, in a stage that is read by hand."""
    result = np.zeros(num_bytes, np.uint8)

    async def call(item: int) -> Any:
        return result

    source = rollouts(
        call, range(NUM_CALLS), BATCH_SIZE, concurrency=32, max_staleness=8, journal=journal
    )
    async with source as groups:
        begun = time.perf_counter()
        async for _ in groups:
            pass
        return (time.perf_counter() - begun) / NUM_CALLS


async def secs_of_steps(journal: str | None) -> float:
    """A step of a learner."""

    async def call(item: int) -> Any:
        await anyio.sleep(0.1)
        return np.zeros(32_000, np.uint8)

    def step(groups: Any) -> dict[str, Any]:
        until = time.perf_counter() + STEP_SECS
        while time.perf_counter() < until:
            pass
        return {}

    num = NUM_STEPS * BATCH_SIZE
    source = rollouts(
        call, range(num), BATCH_SIZE, concurrency=32, max_staleness=8, journal=journal
    )
    async with MonitoredSession(
        [FeedHook(source, "groups")], step, step_runner="inline"
    ) as session:
        await session.run([])
        begun = time.perf_counter()
        while not session.should_stop():
            await session.run([])
    return (time.perf_counter() - begun) / NUM_STEPS


def secs_of_writing(num_bytes: int, place: str) -> float:
    """Pickling a result and writing it."""
    result = np.zeros(num_bytes, np.uint8)
    with open(os.path.join(place, "alone"), "wb", buffering=0) as file:
        begun = time.perf_counter()
        for _ in range(NUM_CALLS):
            file.write(pickle.dumps(result, 5))
        return (time.perf_counter() - begun) / NUM_CALLS


def size_of(place: str) -> int:
    return sum(each.stat().st_size for each in Path(place).glob("*.journal"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    num_runs = parser.parse_args().runs
    rows: dict[str, list[str]] = {}
    for loop in LOOPS:
        for num_bytes in (1_000, 32_000):
            costs, alone, sizes = [], [], []
            for _ in range(num_runs):
                with TemporaryDirectory() as place:
                    without = run_on(loop, secs_of_calls, num_bytes, None)
                    costs.append(run_on(loop, secs_of_calls, num_bytes, place) - without)
                    sizes.append(size_of(place) / (NUM_CALLS * num_bytes))
                    alone.append(secs_of_writing(num_bytes, place))
            kilobytes = num_bytes // 1000
            rows.setdefault(f"a call with {kilobytes} kB, us more", []).append(
                f"{1e6 * statistics.median(costs):.1f}"
            )
            rows.setdefault(f"pickled and written alone, {kilobytes} kB, us", []).append(
                f"{1e6 * statistics.median(alone):.1f}"
            )
            rows.setdefault(f"journal by bytes of {kilobytes} kB results", []).append(
                f"{statistics.median(sizes):.3f}"
            )
        ratios = []
        for _ in range(num_runs):
            with TemporaryDirectory() as place:
                without = run_on(loop, secs_of_steps, None)
                ratios.append(run_on(loop, secs_of_steps, place) / without)
        rows.setdefault("a step of 100 ms, by that without", []).append(
            f"{statistics.median(ratios):.3f}"
        )
    print_table("journal", ["", *LOOPS], [[name, *found] for name, found in rows.items()])


if __name__ == "__main__":
    main()
