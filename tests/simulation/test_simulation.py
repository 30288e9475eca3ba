"""What a simulation refuses, how it meets the world outside, and check_determinism."""

import asyncio
import gc
import threading
import time
from typing import Any

import anyio
import anyio.abc
import pytest

from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import (
    Crashes,
    DeterminismError,
    Exponential,
    OutsideWorkError,
    Simulation,
    SimulationError,
    check_determinism,
    current_simulation,
)

from .clusters import with_session
from .engines import BACKENDS, output_of

_TRAINING = """
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import Crashes, Exponential, check_determinism

async def main(simulation, nap):
    failures = [Crashes(Exponential(5.0), Exponential(1.0))]
    cluster = simulation.cluster(4, protocol=StaleSynchronous(1), failures=failures)

    async def program(worker):
        async with worker.session() as session:
            while not session.should_stop():
                await session.run("computed")
                await simulation.sleep(nap() + worker.rng.random())

    await cluster.train(program, updates=40)

for shuffle_ties in (False, True):
    print(check_determinism(main, lambda: 0.5, seed=5, runs=1, shuffle_ties=shuffle_ties))
print(check_determinism(main, lambda: float(min(map(str, range(9)), key=hash)), seed=5, runs=1))
"""


@pytest.mark.faults
def test_a_seed_gives_one_trace_on_every_engine_in_every_process() -> None:
    """Whatever hashes are, unless the program depends on the order of a set."""
    found = [output_of(_TRAINING, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    in_order, shuffled, with_a_set = map(set, zip(*found, strict=True))
    assert len(in_order) == len(shuffled) == 1  # `check_determinism` compares the engines
    assert in_order != shuffled
    assert len(with_a_set) > 1


_INTERRUPTED = """
import os, signal, threading
from asynchooks.simulation import Simulation

def kill():
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(backend, is_outside):
    simulation = Simulation(backend=backend)

    async def worker(number):
        try:
            while True:
                await simulation.sleep(1)
                if number == 2 and simulation.now == 5:
                    if is_outside:
                        with simulation.outside_work():
                            threading.Timer(0.05, kill).start()
                            await simulation.sleep(1)
                    else:
                        kill()
        finally:
            with simulation.kernel.shielded(10):
                await simulation.sleep(2)
            print(number, simulation.now >= 7, end=", ")

    async def main():
        for number in range(3):
            simulation.start(worker, number)
        await worker(9)

    try:
        simulation.run(main)
    except KeyboardInterrupt:
        print("interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

for backend in ("asyncio", "trio", "turbo"):
    for is_outside in (False, True):
        interrupted(backend, is_outside)
"""


@pytest.mark.faults
def test_ctrl_c_ends_the_run_with_clean_up_in_virtual_time_busy_or_waiting() -> None:
    assert output_of(_INTERRUPTED) == ["9 True, 0 True, 1 True, 2 True, interrupted"] * 6


def test_a_second_run_is_refused(simulation: Simulation) -> None:
    simulation.run(simulation.sleep, 1)
    with pytest.raises(SimulationError, match="has run; make another one"):
        simulation.run(simulation.sleep, 1)
    with pytest.raises(SimulationError, match="the simulation is over"):
        simulation.start(simulation.sleep, 1)


def test_a_simulation_within_a_simulation_is_refused(backend: Any) -> None:
    async def main() -> None:
        assert current_simulation() is outer
        for inner in BACKENDS:
            with pytest.raises(SimulationError, match="a simulation runs already; start tasks"):
                Simulation(backend=inner).run(main)

    outer = Simulation(backend=backend)
    outer.run(main)


async def test_a_running_event_loop_is_refused(backend: Any, anyio_backend_name: str) -> None:
    with pytest.raises(SimulationError, match=f"an event loop of {anyio_backend_name} runs"):
        Simulation(backend=backend).run(anyio.sleep, 1)


def test_a_callback_of_a_running_event_loop_is_refused() -> None:
    refused: list[bool] = []

    def run() -> None:
        with pytest.raises(SimulationError, match="^an event loop of asyncio runs in this thread"):
            Simulation(backend="turbo").run(anyio.sleep, 1)
        refused.append(True)

    loop = asyncio.new_event_loop()
    loop.call_soon(run)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert refused == [True]


def test_real_sleep_is_refused_as_long_as_a_simulation_runs_in_the_thread() -> None:
    real = time.sleep
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    async def first() -> None:
        first_is_in.set()
        assert second_is_in.wait(20)

    async def second() -> None:
        second_is_in.set()
        assert first_is_out.wait(20)
        with pytest.raises(OutsideWorkError, match=r"time\.sleep\(0\.5\) in a simulation"):
            time.sleep(0.5)  # noqa: ASYNC251

    def run_first() -> None:
        Simulation(backend="turbo").run(first)
        time.sleep(0)
        first_is_out.set()

    thread = threading.Thread(target=run_first)
    thread.start()
    assert first_is_in.wait(20)
    Simulation(backend="turbo").run(second)
    thread.join()
    assert time.sleep is real


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda: Simulation().run(anyio.sleep, 1, until=-1), "until is -1; give virtual seconds"),
        (lambda: Simulation().trace, "no trace was kept; give Simulation keep_trace"),
        (lambda: Simulation().start(anyio.sleep, 1), "has not begun"),
        (current_simulation, "no simulation runs here"),
        (lambda: check_determinism(train, backends=[]), "backends is empty; give at least one of"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_allowed(act: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError, SimulationError), match=match):
        act()


def test_garbage_of_a_long_run_is_collected_and_thresholds_are_as_before_afterwards() -> None:
    simulation, before = Simulation(backend="turbo"), gc.get_threshold()
    num_dead = 0

    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            nonlocal num_dead
            num_dead += 1

    async def main() -> int:
        for _ in range(150):
            await simulation.sleep(1.0)
            for _ in range(1000):
                Cyclic()
        return num_dead

    assert simulation.run(main) > 40_000
    assert gc.get_threshold() == before


async def train(simulation: Simulation) -> None:
    failures = [Crashes(Exponential(5.0), Exponential(1.0))]
    cluster = simulation.cluster(3, protocol=StaleSynchronous(1), failures=failures)
    await cluster.train(with_session, updates=20)


def test_a_clean_program_gives_one_digest_on_all_backends() -> None:
    digest = check_determinism(train, seed=3)
    assert len(digest) == 64
    assert digest == check_determinism(train, seed=3, backends=["turbo"], runs=1)
    assert digest != check_determinism(train, seed=4)


def test_what_no_seed_gives_is_found_with_the_events_before() -> None:
    secs = iter([0.5, 0.25])

    async def main(simulation: Simulation) -> None:
        await simulation.sleep(1.0)
        await simulation.sleep(next(secs))

    with pytest.raises(DeterminismError, match="Look for clocks, hash order") as caught:
        check_determinism(main, backends=["turbo"])
    assert str(caught.value).splitlines()[:5] == [
        'event 2 of run 2 on "turbo" differs from that of run 1 on "turbo", with the same seed:',
        "    0x0.0p+0 the start of <main>",
        "    0x1.0000000000000p+0 <main>",
        '  run 1 on "turbo": 0x1.8000000000000p+0 <main>',
        '  run 2 on "turbo": 0x1.4000000000000p+0 <main>',
    ]
