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
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import numpy as np
import trio
import trio.testing

from asynchooks import FunctionSessionCreator, MonitoredSession, SharedSessionCreator
from asynchooks.protocols import Asynchronous, StaleSynchronous, staleness_aware
from asynchooks.simulation import Simulation, Worker

from ._contenders import DoNothing
from ._report import is_installed, print_table, progress

NUM_ROUNDS = 5
NUM_EVENTS = 60_000
DELAYS: list[float] = np.random.default_rng(0).exponential(1.0, 10_007).tolist()

Contender = Callable[[int, int], None]
"""Runs so many workers until so many events have happened."""
Sleep = Callable[[float], Awaitable[Any]]


def counting(sleep: Sleep, num_events: int) -> Callable[[int], Coroutine[Any, Any, None]]:
    """A worker, from a place in the delays."""
    count = 0

    async def worker(place: int) -> None:
        nonlocal count
        while count < num_events:
            await sleep(DELAYS[place % 10_007])
            place += 7
            count += 1

    return worker


def in_sessions(sleep: Sleep, num_events: int) -> Callable[[int], Coroutine[Any, Any, None]]:
    """A worker whose events are runs of a session with two hooks."""
    count = 0

    def step() -> dict[str, int]:
        nonlocal count
        count += 1
        return {"count": count}

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def worker(place: int) -> None:
        async with MonitoredSession([DoNothing(), DoNothing()], creator) as session:
            while count < num_events:
                await sleep(DELAYS[place % 10_007])
                place += 7
                await session.run("count")

    return worker


def simulated(backend: Any, workers: Callable[..., Any] = counting) -> Contender:
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


CONTENDERS: dict[str, Contender] = {
    "turbo": simulated("turbo"),
    "turbo, session.run with two hooks": simulated("turbo", in_sessions),
    "asyncio": simulated("asyncio"),
    "trio": simulated("trio"),
    "exact virtual asyncio loop": jumping_loop,
    "MockClock": mock_clock,
    "SimPy": simpy_processes,
}
RATIOS = {
    "turbo": "SimPy",
    "turbo, session.run with two hooks": "SimPy",
    "asyncio": "exact virtual asyncio loop",
    "trio": "MockClock",
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


def ratios(num_workers: int) -> list[str]:
    secs: dict[str, list[float]] = {}
    for _ in range(NUM_ROUNDS):
        for name, contender in CONTENDERS.items():
            if name != "SimPy" or is_installed("simpy"):
                secs.setdefault(name, []).append(secs_of(contender, num_workers))
    progress(f"{num_workers} workers measured")
    typical = {name: statistics.median(values) for name, values in secs.items()}
    return [
        f"{typical[peer] / typical[ours]:.2f}" if peer in typical else "-"
        for ours, peer in RATIOS.items()
    ]


def megabytes(kind: str, backend: Any, num_workers: int) -> str:
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
        async with MonitoredSession([DoNothing(), DoNothing()], creator) as session:
            while True:
                await session.run("count")

    async def main() -> None:
        nonlocal found
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_workers):
            simulation.start(sleeper if kind == "bare" else in_session)
        await simulation.sleep(2.5)
        found = (tracemalloc.get_traced_memory()[0] - before) / 1e6

    tracemalloc.start()
    simulation.run(main)
    tracemalloc.stop()
    return f"{found:.1f}"


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
            num_workers, parameters=np.zeros(16), protocol=protocol,
            learning_rate=staleness_aware(0.05),
        )  # fmt: skip
        begun = time.process_time()
        report = cluster.run(
            gradient=gradient, updates=num_updates, loss_every=num_updates // 20,
            loss=lambda weights: float(np.mean((rows @ weights - labels) ** 2)),
        )  # fmt: skip
        secs = time.process_time() - begun
        first, last = report.losses[0][2], report.losses[-1][2]
        print(f"{protocol}: {secs:.1f} s, {secs / num_updates * 1e6:.1f} us an update, "
              f"loss {first:.3g} -> {last:.3g}", flush=True)  # fmt: skip


def main(args: list[str]) -> None:
    most = int(args[-1]) if args and args[-1].isdigit() else 10_000
    if "gradients" in args:
        train(most)
        return
    sizes = [size for size in (10, 100, 1000, 10_000) if size <= most]
    cells = zip(RATIOS.items(), zip(*map(ratios, sizes), strict=True), strict=True)
    rows = [[" / ".join(pair), *row] for pair, row in cells]
    print_table("events per second", ["workers", *(f"{size:,}" for size in sizes)], rows)
    backends = ("asyncio", "trio", "turbo")
    for warm_up in backends:
        megabytes("session", warm_up, 10)
    held = [
        [kind, *(megabytes(kind, backend, most) for backend in backends)]
        for kind in ("bare", "session")
    ]
    title = f"MB that {most:,} waiting workers hold"
    print_table(title, ["worker", *backends], held)


if __name__ == "__main__":
    main(sys.argv[1:])
