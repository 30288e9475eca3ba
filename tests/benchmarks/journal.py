"""What a journal of rollouts costs: time of a finished call, of a step, and bytes.

    python -m tests.benchmarks.journal

Without and with `journal=`, in turns: calls that do nothing, with results of 1 and of 32 kB, in
batches of 8; and a learner whose steps take 100 ms, with 32 calls of 100 ms under way. Beside it,
what pickling its result and writing it to a file takes alone, since that is paid in any case.
"""

import os
import pickle
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import rollouts

from ._report import BusyModel, measure, typical

BATCH_SIZE, NUM_CALLS, NUM_STEPS, NUM_RUNS = 8, 2_000, 20, 7


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

    model = BusyModel(0.1)
    num = NUM_STEPS * BATCH_SIZE
    source = rollouts(
        call, range(num), BATCH_SIZE, concurrency=32, max_staleness=8, journal=journal
    )
    hooks = [FeedHook(source, "groups")]
    async with MonitoredSession(
        hooks, lambda groups: model.step(), step_runner="inline"
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


async def figures(loop: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for kilobytes in (1, 32):
        num_bytes, costs, alone, sizes = 1000 * kilobytes, list[float](), list[float](), []
        for _ in range(NUM_RUNS):
            with TemporaryDirectory() as place:
                without = await secs_of_calls(num_bytes, None)
                costs.append(1e6 * (await secs_of_calls(num_bytes, place) - without))
                sizes.append(size_of(place) / (NUM_CALLS * num_bytes))
                alone.append(1e6 * secs_of_writing(num_bytes, place))
        found |= {
            f"a call with {kilobytes} kB, us more": typical(costs, 1),
            f"pickled and written alone, {kilobytes} kB, us": typical(alone, 1),
            f"journal by bytes of {kilobytes} kB results": typical(sizes, 3),
        }
    ratios = []
    for _ in range(NUM_RUNS):
        with TemporaryDirectory() as place:
            without = await secs_of_steps(None)
            ratios.append(await secs_of_steps(place) / without)
    return found | {"a step of 100 ms, by that without": typical(ratios, 3)}


if __name__ == "__main__":
    measure(figures)
