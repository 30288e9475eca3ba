"""Events per second of simulated workers beside other simulators, and the memory of a worker.

    python -m tests.benchmarks.simulation [most workers]

Each worker waits an exponential time and counts, again and again. Ratios are of medians over
interleaved runs; a ratio above 1 means that asynchooks is the faster one. What opening costs is
not in them: it is measured by a short run and taken off.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import numpy as np
import trio
import trio.testing

from asynchooks import MonitoredSession, SharedSessionCreator
from asynchooks.simulation import Simulation

from ._contenders import DoNothing
from ._report import is_installed, median_ratio, print_table

NUM_ROUNDS = 5
NUM_EVENTS = 60_000
DELAYS: list[float] = np.random.default_rng(0).exponential(1.0, 10_007).tolist()

Contender = Callable[[int, int], None]
"""Runs so many workers until so many events have happened."""
Sleep = Callable[[float], Awaitable[Any]]
Worker = Callable[[int], Coroutine[Any, Any, None]]
"""From a place in the delays."""


def counting(sleep: Sleep, num_events: int) -> Worker:
    count = 0

    async def worker(place: int) -> None:
        nonlocal count
        while count < num_events:
            await sleep(DELAYS[place % 10_007])
            place += 7
            count += 1

    return worker


def in_sessions(sleep: Sleep, num_events: int) -> Worker:
    """A worker whose events are runs of a session with two hooks."""
    count = 0

    def step() -> dict[str, int]:
        nonlocal count
        count += 1
        return {"count": count}

    creator = SharedSessionCreator(step)

    async def worker(place: int) -> None:
        async with MonitoredSession([DoNothing(), DoNothing()], creator) as session:
            while count < num_events:
                await sleep(DELAYS[place % 10_007])
                place += 7
                await session.run("count")

    return worker


def simulated(backend: Any, workers: Callable[[Sleep, int], Worker] = counting) -> Contender:
    def run(num_workers: int, num_events: int) -> None:
        simulation = Simulation(backend=backend)

        async def main() -> None:
            worker = workers(simulation.kernel.sleep, num_events)
            for task in [simulation.start(worker, place) for place in range(num_workers)]:
                await task.wait()

        simulation.run(main)

    return run


def simpy_processes(num_workers: int, num_events: int) -> None:
    import simpy

    environment, count = simpy.Environment(), 0

    def worker(place: int) -> Any:
        nonlocal count
        while count < num_events:
            yield environment.timeout(DELAYS[place % 10_007])
            place += 7
            count += 1

    for place in range(num_workers):
        environment.process(worker(place))
    environment.run()


class _Jumping(selectors.DefaultSelector):
    """Advances a virtual asyncio loop to its next timer."""

    loop: _JumpingLoop

    def select(self, timeout: float | None = None) -> Any:
        timers = self.loop._scheduled  # type: ignore[attr-defined]
        if timeout and timers:
            self.loop.moment = timers[0]._when
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    """The peer on asyncio: exact, also after virtual years, in as few lines as that takes."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.moment = 0.0
        super().__init__(selector)

    def time(self) -> float:
        self._clock_resolution = np.spacing(self.moment)  # else it rounds away, and spins
        return self.moment


async def count_with_anyio(num_workers: int, num_events: int) -> None:
    worker = counting(anyio.sleep, num_events)
    async with anyio.create_task_group() as group:
        for place in range(num_workers):
            group.start_soon(worker, place)


def jumping_loop(num_workers: int, num_events: int) -> None:
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        runner.run(count_with_anyio(num_workers, num_events))


def mock_clock(num_workers: int, num_events: int) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(count_with_anyio, num_workers, num_events, clock=clock)


PAIRS: dict[str, tuple[Contender, Contender]] = {
    "turbo / SimPy": (simulated("turbo"), simpy_processes),
    "turbo, session.run with two hooks / SimPy": (simulated("turbo", in_sessions), simpy_processes),
    "asyncio / exact virtual asyncio loop": (simulated("asyncio"), jumping_loop),
    "trio / MockClock": (simulated("trio"), mock_clock),
}
"""Ours and the peer."""


def secs_of(contender: Contender, num_workers: int) -> float:
    """CPU seconds of an event, without those of opening."""
    num_events = max(NUM_EVENTS, 30 * num_workers)
    times = []
    for events in (num_workers, num_workers + num_events):
        begun = time.process_time()
        contender(num_workers, events)
        times.append(time.process_time() - begun)
    return (times[1] - times[0]) / num_events


def speed(pair: tuple[Contender, Contender], num_workers: int) -> str:
    if simpy_processes in pair and not is_installed("simpy"):
        return "-"
    rounds = [[secs_of(each, num_workers) for each in pair] for _ in range(NUM_ROUNDS)]
    ours, theirs = zip(*rounds, strict=True)
    return median_ratio(theirs, ours)


def megabytes(kind: str, backend: Any, num_workers: int) -> str:
    """What all workers hold while they wait, by tracemalloc."""
    simulation, found = Simulation(backend=backend), 0.0

    async def step() -> dict[str, int]:
        await simulation.sleep(1.0)
        return {"count": 1}

    creator = SharedSessionCreator(step)

    async def bare() -> None:
        while True:
            await simulation.sleep(1.0)

    async def in_session() -> None:
        async with MonitoredSession([DoNothing(), DoNothing()], creator) as session:
            while True:
                await session.run("count")

    async def main() -> None:
        nonlocal found
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_workers):
            simulation.start(bare if kind == "bare" else in_session)
        await simulation.sleep(2.5)
        found = (tracemalloc.get_traced_memory()[0] - before) / 1e6

    tracemalloc.start()
    simulation.run(main)
    tracemalloc.stop()
    return f"{found:.1f}"


def main(most: int) -> None:
    sizes = [size for size in (10, 100, 1000, 10_000) if size <= most]
    rows = [[name, *(speed(pair, size) for size in sizes)] for name, pair in PAIRS.items()]
    print_table("events per second", ["workers", *(f"{size:,}" for size in sizes)], rows)
    backends = ("asyncio", "trio", "turbo")
    for warm_up in backends:
        megabytes("session", warm_up, 10)
    held = [
        [kind, *(megabytes(kind, backend, most) for backend in backends)]
        for kind in ("bare", "session")
    ]
    print_table(f"MB that {most:,} waiting workers hold", ["worker", *backends], held)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10_000)
