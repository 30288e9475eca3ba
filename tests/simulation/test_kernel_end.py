"""How a run ends: until when, by which errors, and with the clean-up of every task."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest

from asynchooks._engine.base import Slot
from asynchooks._errors import DeadlockError, LivelockError
from asynchooks.simulation import Simulation


def test_a_deadlock_lists_the_waits_of_all_tasks(simulation: Simulation) -> None:
    cleaned: list[float] = []

    async def waiter(name: str) -> None:
        try:
            await simulation.kernel.park(Slot(simulation.kernel, f"the {name}"))
        finally:
            await simulation.sleep(0)
            cleaned.append(simulation.now)

    async def main() -> None:
        await simulation.sleep(2.5)
        simulation.start(waiter, "moon", name="wolf")
        simulation.start(waiter, "moon", name="owl")
        await simulation.start(waiter, "sun", name="cock").wait()

    with pytest.raises(DeadlockError, match=r"virtual time 2\.5, but tasks wait") as caught:
        simulation.run(main)
    text = str(caught.value)
    assert "wolf, owl: the moon at" in text
    assert "cock: the sun at" in text
    assert "main: the end of cock at" in text


def test_a_sleep_without_end_in_a_shield_is_a_deadlock(simulation: Simulation) -> None:
    async def main() -> None:
        with simulation.kernel.shielded(math.inf):
            await simulation.sleep(math.inf)

    with pytest.raises(DeadlockError, match="main: the end of a sleep that has none at "):
        simulation.run(main)


@pytest.mark.parametrize("is_shielded", [False, True])
def test_a_task_that_spends_no_time_is_refused(backend: Any, is_shielded: bool) -> None:
    simulation = Simulation(backend=backend, max_turns=50)

    async def main() -> None:
        simulation.start(simulation.sleep, 50)
        await simulation.sleep(3)
        with simulation.kernel.shielded(math.inf) if is_shielded else nullcontext():
            while True:
                await simulation.sleep(0)

    pattern = r"2 tasks took more than 50 turns each at virtual time 3\.0, the last of them <main>"
    with pytest.raises(LivelockError, match=pattern):
        simulation.run(main)


def test_tasks_that_spin_in_shields_all_end(backend: Any) -> None:
    simulation = Simulation(backend=backend, max_turns=20)
    ended: list[int] = []

    async def spin(number: int) -> None:
        try:
            with simulation.kernel.shielded(math.inf):
                while True:
                    await simulation.sleep(0)
        finally:
            ended.append(number)

    async def main() -> None:
        for number in range(3):
            simulation.start(spin, number)
        await simulation.sleep(3)

    with pytest.raises(LivelockError, match="4 tasks took more than 20 turns"):
        simulation.run(main)
    assert sorted(ended) == [0, 1, 2]  # in no order: trio wakes them all at once


def test_turns_are_counted_for_each_time(backend: Any) -> None:
    simulation = Simulation(backend=backend, max_turns=100)
    slots: list[Slot] = []

    async def wake() -> None:
        while True:
            await simulation.sleep(1)
            slots[-1].wake()

    async def wait() -> None:
        while True:
            slots.append(Slot(simulation.kernel, "a wake-up"))
            await simulation.kernel.park(slots[-1], simulation.now + 1)

    async def beside() -> None:
        while True:
            await simulation.sleep(1)

    async def main() -> float:
        for each in (wake, wait, beside):
            simulation.start(each)
        await simulation.sleep(600)
        return simulation.now

    assert simulation.run(main) == 600


def test_until_a_time_lets_its_events_happen_and_none_later(simulation: Simulation) -> None:
    times: list[float] = []

    async def main() -> None:
        try:
            while True:
                await simulation.sleep(1)
                await simulation.sleep(0)
                times.append(simulation.now)
        finally:
            with simulation.kernel.shielded(10):
                await simulation.sleep(0.25)
            times.append(simulation.now)

    assert simulation.run(main, until=3) is None
    assert times == [1.0, 2.0, 3.0, 3.25]


def test_until_a_time_between_events_is_where_the_clock_stops(simulation: Simulation) -> None:
    simulation.run(lambda: simulation.sleep(10), until=2.5)
    assert simulation.now == 2.5


def test_until_a_condition_ends_at_the_event_that_makes_it_true(simulation: Simulation) -> None:
    count: list[float] = []

    async def main() -> None:
        while True:
            await simulation.sleep(0.5)
            count.append(simulation.now)

    simulation.run(main, until=lambda: len(count) == 3)
    assert count == [0.5, 1.0, 1.5]


def test_a_condition_that_fails_ends_the_run_with_clean_up(simulation: Simulation) -> None:
    cleaned: list[float] = []

    def condition() -> bool:
        return 1 / (1 - simulation.now) < 0

    async def main() -> None:
        try:
            while True:
                await simulation.sleep(0.5)
        finally:
            with simulation.kernel.shielded(1):
                await simulation.sleep(0.5)
            cleaned.append(simulation.now)

    with pytest.raises(ZeroDivisionError):
        simulation.run(main, until=condition)
    assert cleaned == [1.5]


def test_a_task_that_cannot_begin_ends_the_run_with_clean_up(simulation: Simulation) -> None:
    cleaned: list[float] = []

    async def takes_nothing() -> None:
        pass

    async def main() -> None:
        await simulation.sleep(1)
        simulation.start(takes_nothing, "an argument")
        try:
            await simulation.sleep(1)
        finally:
            cleaned.append(simulation.now)

    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        simulation.run(main)
    assert cleaned == [1.0]


def test_a_task_that_clean_up_starts_ends_with_the_run(simulation: Simulation) -> None:
    log: list[Any] = []

    async def for_ever() -> None:
        try:
            while True:
                await simulation.sleep(1)
        finally:
            log.append(("for ever", simulation.now))

    async def save() -> None:
        await simulation.sleep(2)
        log.append(("saved", simulation.now))

    async def main() -> None:
        try:
            await simulation.sleep(100)
        finally:
            simulation.start(for_ever)
            with simulation.kernel.shielded(10):
                await simulation.start(save).wait()

    simulation.run(main, until=5)
    assert log == [("saved", 7.0), ("for ever", 7.0)]


@pytest.mark.parametrize("num_tasks", [2, 9, 100])
def test_the_first_error_leaves_and_the_first_later_ones_are_its_notes(
    simulation: Simulation, num_tasks: int
) -> None:
    async def fail(number: int) -> None:
        try:
            await simulation.sleep(1)
        finally:
            raise KeyError(number)

    async def main() -> None:
        for number in range(num_tasks):
            simulation.start(fail, number)
        await simulation.sleep(2)

    with pytest.raises(KeyError, match="0") as caught:
        simulation.run(main)
    expected = [f"later: KeyError({number})" for number in range(1, min(num_tasks, 9))]
    left_out = ["later: more errors, left out"] if num_tasks > 9 else []
    assert caught.value.__notes__ == expected + left_out
