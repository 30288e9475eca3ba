"""What a simulation refuses, how it meets the world outside, and that a seed gives one trace."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import anyio
import anyio.abc
import pytest

from asynchooks import GlobalStep
from asynchooks._errors import OutsideWorkError, SimulationError
from asynchooks.simulation import Simulation, at_step, current_simulation

from .engines import BACKENDS, on_event_loops, output_of

_TRACED = """
import sys
from asynchooks._engine.base import Slot
from asynchooks.simulation import Simulation

def digest(backend, shuffle_ties):
    simulation = Simulation(7, backend, shuffle_ties=shuffle_ties, keep_trace=True)
    slots = {}

    async def worker(name):
        delays = simulation.streams.generator(len(name), "delay")
        try:
            for number in range(8):
                await simulation.sleep(round(float(delays.exponential()), 1))
                for other in sorted(slots):
                    slots.pop(other).wake(number)
                slots[name] = Slot(simulation.kernel, name)
                await simulation.kernel.park(slots[name], simulation.now + 1)
                simulation.note(f"{name} {number} {slots.keys() ^ {name}  == set()}")
        finally:
            with simulation.kernel.shielded(1):
                await simulation.sleep(2)

    async def main():
        tasks = [simulation.start(worker, "w" * number) for number in range(1, 9)]
        await simulation.sleep(5)
        for task in tasks[::2]:
            task.cancel()
        for task in tasks:
            await task.wait()

    simulation.run(main)
    return simulation.trace.digest()

for shuffle_ties in (False, True):
    print(*{digest(backend, shuffle_ties) for backend in ("asyncio", "trio", "turbo")})
"""


@pytest.mark.faults
def test_a_seed_gives_one_trace_on_every_engine_in_every_process() -> None:
    outputs = [output_of(_TRACED, PYTHONHASHSEED=seed) for seed in ("0", "1", "random")]
    assert outputs[0] == outputs[1] == outputs[2]
    in_order, shuffled = outputs[0]
    assert len(in_order) == len(shuffled) == 64  # one digest of all engines each
    assert in_order != shuffled


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


def test_a_callback_of_a_running_event_loop_is_refused(backend: Any) -> None:
    errors: list[Any] = []

    def run() -> None:
        try:
            Simulation(backend=backend).run(anyio.sleep, 1)
        except SimulationError as error:
            errors.append(str(error))

    async def main() -> None:
        asyncio.get_running_loop().call_soon(run)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(errors) == 1
    assert errors[0].startswith("an event loop of asyncio runs in this thread")


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
    steps: list[int] = []

    async def main() -> None:
        global_step = steps_of.setdefault("it", GlobalStep())
        while True:
            await simulation.sleep(1)
            global_step.publish(global_step.value + 1)
            steps.append(global_step.value)

    steps_of: dict[str, GlobalStep] = {}
    reached = lambda: "it" in steps_of and at_step(steps_of["it"], 4)()  # noqa: E731
    assert simulation.run(main, until=reached) is None
    assert steps == [1, 2, 3, 4]
    assert simulation.now == 4.0


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
