"""The kernel's clock, heap and tasks, the same on every engine."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest

from asynchooks._engine.base import TIMED_OUT, Slot
from asynchooks.simulation import Simulation

from .engines import BACKENDS


def test_sleeps_of_virtual_years_end_at_exactly_their_time(simulation: Simulation) -> None:
    async def main() -> list[float]:
        times = []
        for secs in (0.1, 97 * 86400.0, 3.2e9, 0.3, 1e15, 0.125):
            await simulation.sleep(secs)
            times.append(simulation.now)
        return times

    expected = np.add.accumulate([0.1, 97 * 86400.0, 3.2e9, 0.3, 1e15, 0.125])
    assert simulation.run(main) == expected.tolist()


@pytest.mark.parametrize("secs", [np.float32(0.1), np.float64(0.1), np.int64(3), 2, True])
def test_any_number_of_seconds_leaves_the_clock_a_float(backend: Any, secs: Any) -> None:
    simulation = Simulation(backend=backend, keep_trace=True)

    async def main() -> float:
        await simulation.sleep(1e6)
        await simulation.sleep(secs)
        return simulation.now

    end = simulation.run(main)
    assert type(end) is float
    assert end == 1e6 + float(secs)
    assert simulation.trace.to_bytes()


@pytest.mark.parametrize("secs", [-1, -1e-300, math.nan, "1", None, -math.inf])
def test_a_sleep_of_no_length_is_refused(simulation: Simulation, secs: Any) -> None:
    async def main() -> None:
        await simulation.sleep(secs)

    with pytest.raises(ValueError, match=rf"secs is {secs!r}; give virtual seconds >= 0"):
        simulation.run(main)


def test_equal_times_are_served_in_order_of_asking(simulation: Simulation) -> None:
    order: list[int] = []

    async def sleeper(number: int) -> None:
        await simulation.sleep(number / 10)
        await simulation.sleep(10 - simulation.now)
        order.append(number)

    async def main() -> None:
        for number in reversed(range(12)):
            simulation.start(sleeper, number)
        await simulation.sleep(20)

    simulation.run(main)
    assert order == list(range(12))


def test_shuffled_ties_come_from_the_seed(backend: Any) -> None:
    def order(seed: int, backend: Any) -> list[int]:
        simulation = Simulation(seed, backend, shuffle_ties=True)
        order: list[int] = []

        async def sleeper(number: int) -> None:
            await simulation.sleep(1)
            order.append(number)

        async def main() -> None:
            for number in range(20):
                simulation.start(sleeper, number)
            await simulation.sleep(2)

        simulation.run(main)
        return order

    assert order(1, backend) == order(1, BACKENDS[0])
    assert order(1, backend) != order(2, backend)
    assert sorted(order(1, backend)) == list(range(20))


def test_a_deadline_that_is_past_ends_a_wait_now(simulation: Simulation) -> None:
    async def main() -> tuple[Any, float]:
        await simulation.sleep(5)
        kernel = simulation.kernel
        value = await kernel.park(Slot(kernel, "nothing"), until=2.0)
        with kernel.shielded(-1):
            await simulation.sleep(1)
        return value, simulation.now

    assert simulation.run(main) == (TIMED_OUT, 5.0)


def test_a_value_that_comes_with_the_deadline_is_not_lost(simulation: Simulation) -> None:
    async def waker(slot: Slot) -> None:
        await simulation.sleep(1.0)
        slot.wake("value")

    async def main() -> list[Any]:
        kernel = simulation.kernel
        early, late = Slot(kernel, "early"), Slot(kernel, "late")
        simulation.start(waker, early)  # asks for its second before the deadline is set
        await simulation.sleep(0)
        values = [await kernel.park(early, until=1.0)]
        simulation.start(waker, late)  # and asks after it
        values.append(await kernel.park(late, until=2.0))
        return [*values, simulation.now]

    assert simulation.run(main) == ["value", TIMED_OUT, 2.0]


def test_entries_that_wake_no_task_are_swept(simulation: Simulation) -> None:
    async def main() -> tuple[int, int]:
        kernel, sizes = simulation.kernel, []
        slots: list[Slot] = []

        async def wait() -> None:
            while True:
                slots.append(Slot(kernel, "a wake-up"))
                await kernel.park(slots[-1], until=1e9)

        waiting = simulation.start(wait)
        for _ in range(4000):  # woken long before their deadlines
            await simulation.sleep(0.5)
            slots.pop().wake()
        sizes.append(len(kernel._heap))
        waiting.cancel()
        for _ in range(2000):  # cancelled long before their ends
            task = simulation.start(simulation.sleep, 1e9)
            await simulation.sleep(0.5)
            task.cancel()
            await task.wait(until=1e8)
        sizes.append(len(kernel._heap))
        return sizes[0], sizes[1]

    assert max(simulation.run(main)) < 1100


def test_a_task_forgets_waits_that_timed_out(simulation: Simulation) -> None:
    async def main() -> int:
        task: Any = simulation.start(simulation.sleep, 1e6)
        for _ in range(100):
            assert not await task.wait(until=simulation.now + 1)
        return len(task.waiting)

    assert simulation.run(main) == 0


def test_what_an_ended_task_held_is_freed(simulation: Simulation) -> None:
    references: list[weakref.ref[Any]] = []

    class Held:
        pass

    async def worker(held: Held) -> None:
        references.append(weakref.ref(held))
        await simulation.sleep(1)

    async def main() -> list[Any]:
        for _ in range(5):
            simulation.start(worker, Held())
        await simulation.sleep(3)
        gc.collect()
        return [reference() for reference in references]

    assert simulation.run(main) == [None] * 5


def test_quiescence_comes_last_at_its_time(simulation: Simulation) -> None:
    log: list[str] = []

    async def busy() -> None:
        await simulation.sleep(1)
        for number in range(3):
            await simulation.sleep(0)
            log.append(f"turn {number}")

    async def main() -> float:
        simulation.start(busy)
        await simulation.sleep(1)
        await simulation.quiescence()
        log.append("quiet")
        return simulation.now

    assert simulation.run(main) == 1.0
    assert log == ["turn 0", "turn 1", "turn 2", "quiet"]


def test_many_tasks_that_end_at_once_are_no_livelock(backend: Any) -> None:
    simulation = Simulation(backend=backend, max_turns=10)

    async def nothing() -> None:
        pass

    async def main() -> float:
        for _ in range(500):
            simulation.start(nothing)
        await simulation.sleep(1)
        return simulation.now

    assert simulation.run(main) == 1.0
