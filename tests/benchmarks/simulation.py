"""Events per second of simulated workers beside other simulators, and the memory of a worker.

    python -m tests.benchmarks.simulation [most workers]
    python -m tests.benchmarks.simulation gradients [workers]

Each worker waits an exponential time and counts, again and again. Ratios are of medians over
interleaved runs; a ratio above 1 means that asynchooks is the faster one. What opening costs is
not in them: it is measured by a short run and taken off. With "gradients" 10,000 workers make 100
updates each of a small model by real gradients; that has no peer, and prints CPU seconds.
"""

from __future__ import annotations

import asyncio
import selectors
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import trio
import trio.testing

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
)
from asynchooks.protocols import Asynchronous, StaleSynchronous, staleness_aware
from asynchooks.simulation import Simulation, Worker
from asynchooks.simulation._simulation import Backend

from ._report import is_installed, print_table

NUM_ROUNDS = 5
NUM_EVENTS = 60_000
DELAYS: list[float] = np.random.default_rng(0).exponential(1.0, 10_007).tolist()

Contender = Callable[[int, int], None]
"""Runs so many workers until so many events have happened."""


class Looking(SessionRunHook):
    """A hook with both of its coroutines."""

    async def before_run(self, run_context: Any) -> None:
        """Ask for nothing."""

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        """Look at nothing."""


def bare(backend: Backend) -> Contender:
    def run(num_workers: int, num_events: int) -> None:
        simulation, count = Simulation(backend=backend), 0

        async def worker(place: int) -> None:
            nonlocal count
            sleep = simulation.kernel.sleep
            while count < num_events:
                await sleep(DELAYS[place % 10_007])
                place += 7
                count += 1

        async def main() -> None:
            for task in [simulation.start(worker, place) for place in range(num_workers)]:
                await task.wait()

        simulation.run(main)

    return run


def in_sessions(backend: Backend) -> Contender:
    def run(num_workers: int, num_events: int) -> None:
        simulation, count = Simulation(backend=backend), 0

        def step() -> dict[str, int]:
            nonlocal count
            count += 1
            return {"count": count}

        creator = SharedSessionCreator(FunctionSessionCreator(step))

        async def worker(place: int) -> None:
            sleep = simulation.kernel.sleep
            async with MonitoredSession([Looking(), Looking()], creator) as session:
                while count < num_events:
                    await sleep(DELAYS[place % 10_007])
                    place += 7
                    await session.run("count")

        async def main() -> None:
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
    count = 0

    async def worker(place: int) -> None:
        nonlocal count
        while count < num_events:
            await anyio.sleep(DELAYS[place % 10_007])
            place += 7
            count += 1

    async with anyio.create_task_group() as group:
        for place in range(num_workers):
            group.start_soon(worker, place)


def jumping_loop(num_workers: int, num_events: int) -> None:
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        runner.run(count_with_anyio(num_workers, num_events))


def mock_clock(num_workers: int, num_events: int) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(count_with_anyio, num_workers, num_events, clock=clock)


def secs_of(contender: Contender, num_workers: int) -> float:
    """CPU seconds of an event, without those of opening."""
    num_events = max(NUM_EVENTS, 30 * num_workers)
    times = []
    for events in (num_workers, num_workers + num_events):
        begun = time.process_time()
        contender(num_workers, events)
        times.append(time.process_time() - begun)
    return (times[1] - times[0]) / num_events


def ratios(num_workers: int) -> dict[str, str]:
    contenders: dict[str, Contender] = {
        "turbo": bare("turbo"),
        "sessions": in_sessions("turbo"),
        "asyncio": bare("asyncio"),
        "trio": bare("trio"),
        "jumping": jumping_loop,
        "mock": mock_clock,
    }
    if is_installed("simpy"):
        contenders["simpy"] = simpy_processes
    secs: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(NUM_ROUNDS):
        for name, contender in contenders.items():
            secs[name].append(secs_of(contender, num_workers))
    typical = {name: statistics.median(values) for name, values in secs.items()}

    def ratio(ours: str, theirs: str) -> str:
        return f"{typical[theirs] / typical[ours]:.2f}" if theirs in typical else "-"

    return {
        "turbo / SimPy": ratio("turbo", "simpy"),
        "turbo, session.run with two hooks / SimPy": ratio("sessions", "simpy"),
        "asyncio / exact virtual asyncio loop": ratio("asyncio", "jumping"),
        "trio / MockClock": ratio("trio", "mock"),
    }


BARS = {
    "turbo / SimPy": ">= 1.4",
    "turbo, session.run with two hooks / SimPy": ">= 0.3",
    "asyncio / exact virtual asyncio loop": ">= 1.3",
    "trio / MockClock": ">= 3",
}


def megabytes(contender: str, backend: Backend, num_workers: int) -> float:
    """What all workers hold while they wait, by tracemalloc."""
    simulation, found = Simulation(backend=backend), 0.0

    async def step() -> dict[str, int]:
        await simulation.sleep(1.0)
        return {"count": 1}

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def sleeper() -> None:
        while True:
            await simulation.sleep(1.0)

    async def in_session() -> None:
        async with MonitoredSession([Looking(), Looking()], creator) as session:
            while True:
                await session.run("count")

    async def main() -> None:
        nonlocal found
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_workers):
            simulation.start(sleeper if contender == "bare" else in_session)
        await simulation.sleep(2.5)
        found = (tracemalloc.get_traced_memory()[0] - before) / 1e6

    tracemalloc.start()
    simulation.run(main)
    tracemalloc.stop()
    return found


def train(num_workers: int) -> None:
    """Least squares of 16 weights on minibatches of 16 rows: 100 updates for each worker."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4096, 16))
    labels = rows @ rng.normal(size=16)

    def gradient(weights: Any, worker: Worker) -> Any:
        first = int(worker.rng.random() * 4080)
        batch = rows[first : first + 16]
        return batch.T @ (batch @ weights - labels[first : first + 16]) / 16

    num_updates = 100 * num_workers
    for protocol in (Asynchronous(), StaleSynchronous(3)):
        cluster = Simulation(seed=1, backend="turbo").cluster(
            num_workers,
            parameters=np.zeros(16),
            protocol=protocol,
            learning_rate=staleness_aware(0.05),
        )
        begun = time.process_time()
        report = cluster.run(
            gradient=gradient,
            updates=num_updates,
            loss=lambda weights: float(np.mean((rows @ weights - labels) ** 2)),
            loss_every=num_updates // 20,
        )
        secs = time.process_time() - begun
        first, last = report.losses[0][2], report.losses[-1][2]
        print(f"{protocol}: {secs:.1f} s, {secs / num_updates * 1e6:.1f} us an update, "
              f"loss {first:.3g} -> {last:.3g}", flush=True)  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["gradients"]:
        train(int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
        return
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    sizes = [size for size in (10, 100, 1000, 10_000) if size <= most]
    columns = []
    for size in sizes:
        columns.append(ratios(size))
        print(f"{size} workers measured", file=sys.stderr, flush=True)
    rows = [[name, bar, *(column[name] for column in columns)] for name, bar in BARS.items()]
    print_table("events per second", ["workers", "bar", *(f"{size:,}" for size in sizes)], rows)
    backends: tuple[Backend, ...] = ("asyncio", "trio", "turbo")
    for warm_up in backends:
        megabytes("session", warm_up, 10)
    held = [
        [name, bar, *(f"{megabytes(name, backend, most):.1f}" for backend in backends)]
        for name, bar in (("bare", "<= 60, 60, 15"), ("session", "<= 100, 100, 60"))
    ]
    title = f"MB that {most:,} waiting workers hold"
    print_table(title, ["worker", "bar", *backends], held)


if __name__ == "__main__":
    main()
