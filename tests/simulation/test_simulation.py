"""What a simulation refuses, how it meets the world outside, and check_determinism."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc
import pytest

from asynchooks import GlobalStep, SessionRunHook
from asynchooks._errors import OutsideWorkError, SimulationError
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import (
    Crashes,
    DeadlockError,
    DeterminismError,
    Exponential,
    Simulation,
    Worker,
    at_step,
    check_determinism,
    current_simulation,
)

from .clusters import with_session
from .engines import BACKENDS, on_event_loops, output_of

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
print(check_determinism(main, lambda: float(min({"1", "2", "3"}, key=hash)), seed=5, runs=1))
"""


@pytest.mark.faults
def test_a_seed_gives_one_trace_on_every_engine_in_every_process() -> None:
    """Whatever hashes are, unless the program depends on the order of a set."""
    found = [output_of(_TRAINING, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")]
    in_order, shuffled, with_a_set = map(set, zip(*found, strict=True))
    assert len(in_order) == len(shuffled) == 1  # `check_determinism` compares the engines
    assert in_order != shuffled
    assert len(with_a_set) > 1


_INTERRUPTED = """
import os, signal, threading
from asynchooks.simulation import Simulation

simulation = Simulation(backend={backend!r})

async def worker(number):
    try:
        while True:
            await simulation.sleep(1)
            if number == 2 and simulation.now == 5:
                {act}
    finally:
        with simulation.kernel.shielded(10):
            await simulation.sleep(2)
        print(number, simulation.now >= 7, flush=True)

async def main():
    for number in range(3):
        simulation.start(worker, number)
    await worker(9)

try:
    simulation.run(main)
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
_KILL = "os.kill(os.getpid(), signal.SIGINT)"
_WHILE_OUTSIDE = f"""
                with simulation.outside_work():
                    threading.Timer(0.05, lambda: {_KILL}).start()
                    await simulation.sleep(1)"""


@pytest.mark.faults
@pytest.mark.parametrize("act", [_KILL, _WHILE_OUTSIDE], ids=["busy", "waiting"])
def test_ctrl_c_ends_the_run_with_clean_up_in_virtual_time(backend: Any, act: str) -> None:
    lines = output_of(_INTERRUPTED.format(backend=backend, act=act))
    assert lines == ["9 True", "0 True", "1 True", "2 True", "interrupted"]


def test_a_second_run_is_refused(simulation: Simulation) -> None:
    simulation.run(lambda: simulation.sleep(1))
    with pytest.raises(SimulationError, match="has run; make another one"):
        simulation.run(lambda: simulation.sleep(1))
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


@on_event_loops
def test_a_simulation_in_a_thread_of_another_is_its_own(backend: Any) -> None:
    outer = Simulation(backend=backend)

    def run_inner() -> float:
        inner = Simulation(backend="turbo")
        inner.run(lambda: inner.sleep(7))
        return inner.now

    async def main() -> tuple[float, float]:
        await outer.sleep(1)
        return await anyio.to_thread.run_sync(run_inner), outer.now

    assert outer.run(main) == (7.0, 1.0)


async def test_a_running_event_loop_is_refused(backend: Any, anyio_backend_name: str) -> None:
    with pytest.raises(SimulationError, match=f"an event loop of {anyio_backend_name} runs"):
        Simulation(backend=backend).run(anyio.sleep, 1)


def test_without_sniffio_it_runs_and_a_running_event_loop_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trio requires sniffio; newer versions of anyio do not."""
    monkeypatch.setitem(sys.modules, "sniffio", None)
    simulation = Simulation(backend="turbo")
    simulation.run(lambda: simulation.sleep(7))
    assert simulation.now == 7.0

    async def main() -> None:
        with pytest.raises(SimulationError, match="^an event loop of asyncio runs in this thread"):
            Simulation(backend="turbo").run(simulation.sleep, 1)

    asyncio.run(main())


def test_a_callback_of_a_running_event_loop_is_refused(backend: Any) -> None:
    refused: list[bool] = []

    def run() -> None:
        with pytest.raises(SimulationError, match="^an event loop of asyncio runs in this thread"):
            Simulation(backend=backend).run(anyio.sleep, 1)
        refused.append(True)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(run)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert refused == [True]


def test_real_sleep_is_refused_and_afterwards_allowed_again(simulation: Simulation) -> None:
    real = time.sleep

    async def main() -> None:
        with pytest.raises(OutsideWorkError, match=r"time\.sleep\(0\.5\) in a simulation"):
            time.sleep(0.5)  # noqa: ASYNC251
        thread = threading.Thread(target=time.sleep, args=(0,))
        thread.start()
        thread.join()

    simulation.run(main)
    assert time.sleep is real


async def does_nothing() -> None:
    """A program that does nothing."""


def test_simulations_of_two_threads_leave_real_sleep_as_it_was() -> None:
    real = time.sleep
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    async def first() -> None:
        first_is_in.set()
        assert second_is_in.wait(20)

    async def second() -> None:
        second_is_in.set()
        assert first_is_out.wait(20)
        with pytest.raises(OutsideWorkError, match="real time"):
            time.sleep(0)  # noqa: ASYNC251

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


def test_until_a_step_ends_when_it_is_reached(simulation: Simulation) -> None:
    global_step = GlobalStep(published_only=True)

    async def main() -> None:
        while True:
            await simulation.sleep(1)
            global_step.publish(global_step.value + 1)

    assert simulation.run(main, until=at_step(global_step, 4)) is None
    assert (global_step.value, simulation.now) == (4, 4.0)


@pytest.mark.parametrize("until", [-1, float("nan"), "5", True])
def test_a_bad_end_is_refused(until: Any) -> None:
    with pytest.raises(ValueError, match=r"until is .*; give virtual seconds >= 0, a condition"):
        Simulation().run(anyio.sleep, 1, until=until)


def test_bad_options_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="backend is 'twisted'; give one of asyncio, trio, turbo"):
        Simulation(backend="twisted")  # type: ignore[arg-type]
    for max_turns in (0, -1, 1.5):
        with pytest.raises((TypeError, ValueError), match=r"max_turns is .*; give an integer >= 1"):
            Simulation(max_turns=max_turns)  # type: ignore[arg-type]
    with pytest.raises(SimulationError, match="no trace was kept; give Simulation keep_trace"):
        _ = Simulation().trace
    with pytest.raises(SimulationError, match="has not begun"):
        Simulation().start(anyio.sleep, 1)
    with pytest.raises(SimulationError, match="no simulation runs here"):
        current_simulation()


@pytest.mark.parametrize("young", [0, 700, 1_000_000])
def test_collections_are_rare_while_it_runs_and_as_before_afterwards(young: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(young, 7, 9)
    try:

        async def main() -> tuple[int, ...]:
            return gc.get_threshold()

        expected = 100_000 if young == 700 else young
        assert Simulation(backend="turbo").run(main) == (expected, 7, 9)
        assert gc.get_threshold() == (young, 7, 9)
    finally:
        gc.set_threshold(*before)


def test_garbage_of_a_long_run_is_collected() -> None:
    simulation = Simulation(backend="turbo")
    alive: set[int] = set()

    class Cyclic:
        def __init__(self, number: int) -> None:
            self.itself = self
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    async def main() -> int:
        most = 0
        for number in range(150_000):
            Cyclic(number)
            if number % 1000 == 0:
                await simulation.sleep(1.0)
                most = max(most, len(alive))
        return most

    assert simulation.run(main) < 110_000


async def train(simulation: Simulation, hook_of: Any = None) -> None:
    cluster = simulation.cluster(
        3, protocol=StaleSynchronous(1), failures=[Crashes(Exponential(5.0), Exponential(1.0))]
    )

    async def program(worker: Worker) -> None:
        await with_session(worker, *([] if hook_of is None else [hook_of(simulation)]))

    await cluster.train(program, updates=20)


def test_a_clean_program_gives_one_digest_on_all_backends() -> None:
    digest = check_determinism(train, seed=3)
    assert len(digest) == 64
    assert digest == check_determinism(train, seed=3, backends=["turbo"], runs=1)
    assert digest != check_determinism(train, seed=4)


class Naps(SessionRunHook):
    """Sleeps for seconds that no seed gives."""

    def __init__(self, simulation: Simulation, secs: Callable[[], float]) -> None:
        self.simulation, self.secs = simulation, secs

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.simulation.sleep(self.secs())


@pytest.mark.parametrize("secs", [lambda: time.time() % 1, random.random], ids=["clock", "random"])
def test_a_hook_that_reads_what_no_seed_gives_is_found(secs: Callable[[], float]) -> None:
    with pytest.raises(DeterminismError, match="differs from that of") as caught:
        check_determinism(train, lambda simulation: Naps(simulation, secs), backends=["turbo"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("event ")
    assert lines[0].endswith('of run 2 on "turbo" differs from that of run 1 on "turbo", with the '
                             "same seed:")  # fmt: skip
    assert lines[-3].startswith('  run 1 on "turbo": 0x')
    assert lines[-2].startswith('  run 2 on "turbo": 0x')
    assert "Look for clocks, hash order, random numbers" in lines[-1]


def test_what_a_program_keeps_outside_of_itself_is_found_with_the_events_before() -> None:
    runs: list[Simulation] = []

    async def main(simulation: Simulation) -> None:
        runs.append(simulation)
        await simulation.sleep(1.0)
        if len(runs) == 1:
            simulation.note("only at first")

    with pytest.raises(DeterminismError) as caught:
        check_determinism(main, backends=["turbo"])
    assert str(caught.value).splitlines()[:5] == [
        'event 2 of run 2 on "turbo" differs from that of run 1 on "turbo", with the same seed:',
        "    0x0.0p+0 the start of <main>",
        "    0x1.0000000000000p+0 <main>",
        '  run 1 on "turbo": 0x1.0000000000000p+0 only at first',
        '  run 2 on "turbo": nothing more',
    ]


def test_errors_of_the_program_leave_as_themselves() -> None:
    async def main(simulation: Simulation) -> None:
        await simulation.cluster(2).train(lambda worker: worker.cluster.global_step.wait_for(5))

    with pytest.raises(DeadlockError, match="worker 0, worker 1: global_step 5"):
        check_determinism(main)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"runs": 0}, ValueError, "runs is 0; give an integer >= 1"),
        ({"runs": 1.5}, TypeError, r"runs is 1\.5; give an integer"),
        ({"backends": []}, ValueError, "backends is empty; give at least one of asyncio, trio"),
        ({"backends": "turbo"}, TypeError, r"backends is 'turbo'; give a list, as in \['turbo'\]"),
        ({"backends": ["uvloop"]}, ValueError, "backend is 'uvloop'; give one of asyncio, trio"),
        ({"seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_determinism(train, **options)
