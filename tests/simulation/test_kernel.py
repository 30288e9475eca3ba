"""Clock, heap, tasks, cancellation and the end of a run, the same on every engine.

Slots are private: by them all waits suspend, and nothing public is woken at a chosen moment.
"""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from asynchooks._engine.base import TIMED_OUT, Slot
from asynchooks.simulation import DeadlockError, LivelockError, Simulation

from .engines import run_together, simulated


@pytest.mark.parametrize("secs", [np.float32(0.1), np.int64(3), True])
@simulated
async def test_any_number_of_seconds_leaves_the_clock_a_float(
    simulation: Simulation, secs: Any
) -> None:
    await simulation.sleep(secs)
    assert (type(simulation.now), simulation.now) == (float, float(secs))


def test_sleeps_end_at_exactly_their_times_and_equal_ones_in_the_order_of_asking(
    simulation: Simulation, log: list[Any]
) -> None:
    secs = [*[1.0] * 12, 1 / 3, 1e12, 0.1, 0.0]

    async def sleeper(number: int) -> None:
        await simulation.sleep(secs[number])
        log.append((simulation.now, number))

    run_together(simulation, *(partial(sleeper, number) for number in range(len(secs))))
    assert log == sorted((each, number) for number, each in enumerate(secs))


@pytest.mark.parametrize("secs", [-1e-300, math.nan, "1", None])
def test_a_sleep_of_no_length_is_refused(simulation: Simulation, secs: Any) -> None:
    with pytest.raises(ValueError, match=rf"secs is {secs!r}; give virtual seconds >= 0"):
        simulation.run(simulation.sleep, secs)


@simulated
async def test_a_value_that_comes_with_the_deadline_is_not_lost(simulation: Simulation) -> None:
    async def waker(slot: Slot) -> None:
        await simulation.sleep(1.0)
        slot.wake("value")

    kernel = simulation.kernel
    early, late = Slot(kernel, "early"), Slot(kernel, "late")
    simulation.start(waker, early)  # asks for its second before the deadline is set
    await simulation.sleep(0)
    assert await kernel.park(early, until=1.0) == "value"
    simulation.start(waker, late)  # and asks after it
    assert await kernel.park(late, until=2.0) is TIMED_OUT
    assert simulation.now == 2.0


@simulated
async def test_quiescence_comes_after_all_that_happens_at_its_time(
    simulation: Simulation, log: list[Any]
) -> None:
    async def turns() -> None:
        for _ in range(3):
            await simulation.sleep(0)
        log.append(simulation.now)

    simulation.start(turns)
    await simulation.quiescence()
    assert log == [0.0]


@simulated
async def test_entries_that_wake_no_task_are_swept(simulation: Simulation) -> None:
    kernel = simulation.kernel

    async def wake(slot: Slot) -> None:
        slot.wake()

    for _ in range(1500):  # woken and cancelled long before their ends
        slot = Slot(kernel, "a wake-up")
        simulation.start(wake, slot)
        await kernel.park(slot, until=1e9)
        task = simulation.start(simulation.sleep, 1e9)
        await simulation.sleep(0.5)
        task.cancel()
    assert len(kernel.heap) < 1100  # what it would go on holding shows nowhere else


@simulated
async def test_a_shield_keeps_cancellation_out_until_its_time_is_over(
    simulation: Simulation, log: list[Any]
) -> None:
    async def worker() -> None:
        try:
            with simulation.kernel.shielded(10) as whole:
                await simulation.sleep(2)
                log.append(simulation.now)
            with simulation.kernel.shielded(3) as part:
                await simulation.sleep(20)
            log.append((simulation.now, whole.cancelled_caught, part.cancelled_caught))
            await simulation.sleep(1)
            log.append("never")
        finally:
            with simulation.kernel.shielded(10):
                await simulation.sleep(4)

    task = simulation.start(worker)
    await simulation.sleep(1)
    task.cancel()
    assert not await task.wait(until=7.0)
    assert await task.wait()
    assert simulation.now == 9.0
    assert log == [2.0, (5.0, False, True)]


@pytest.mark.parametrize("is_cancelled_first", [False, True])
@simulated
async def test_a_cancellation_that_comes_with_a_wake_up_loses_no_value(
    simulation: Simulation, log: list[Any], is_cancelled_first: bool
) -> None:
    slot = Slot(simulation.kernel, "a value")

    async def worker() -> None:
        try:
            log.append(await simulation.kernel.park(slot, until=100.0))
            await simulation.sleep(1)
        finally:
            log.append((slot.is_woken, slot.value, simulation.now))

    task = simulation.start(worker)
    await simulation.sleep(1)
    acts = [lambda: slot.wake(7), task.cancel]
    for act in acts[::-1] if is_cancelled_first else acts:
        act()
    await simulation.sleep(200)
    assert log == [7, (True, 7, 1.0)][is_cancelled_first:]


def test_a_deadlock_lists_the_waits_of_all_tasks_and_lets_them_clean_up(
    simulation: Simulation,
) -> None:
    cleaned: list[float] = []

    async def waiter(name: str) -> None:
        try:
            await simulation.kernel.park(Slot(simulation.kernel, f"the {name}"))
        finally:
            with simulation.kernel.shielded(10):
                await simulation.sleep(1)
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
    assert cleaned == [3.5, 3.5, 3.5]


@pytest.mark.parametrize("is_shielded", [False, True])
def test_tasks_that_spend_no_time_are_refused_and_all_end(backend: Any, is_shielded: bool) -> None:
    simulation = Simulation(backend=backend, max_turns=20)
    ended: list[int] = []

    async def spin(number: int) -> None:
        try:
            with simulation.kernel.shielded(math.inf) if is_shielded else nullcontext():
                while True:
                    await simulation.sleep(0)
        finally:
            ended.append(number)

    async def main() -> None:
        await simulation.sleep(3)
        for number in range(3):
            simulation.start(spin, number)
        await spin(3)

    match = r"4 tasks took more than 20 turns each at virtual time 3\.0"
    with pytest.raises(LivelockError, match=match):
        simulation.run(main)
    assert sorted(ended) == [0, 1, 2, 3]  # in no order: trio wakes them all at once


def test_turns_are_counted_for_each_time(backend: Any) -> None:
    simulation = Simulation(backend=backend, max_turns=100)

    async def main() -> None:
        for _ in range(150):
            await simulation.sleep(1)
            await simulation.sleep(0)

    simulation.run(main)


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
    between = Simulation(backend=simulation.backend)
    between.run(between.sleep, 10, until=2.5)
    assert between.now == 2.5


def test_a_condition_that_fails_ends_the_run_with_clean_up(simulation: Simulation) -> None:
    cleaned: list[float] = []

    async def main() -> None:
        try:
            while True:
                await simulation.sleep(0.5)
        finally:
            with simulation.kernel.shielded(1):
                await simulation.sleep(0.5)
            cleaned.append(simulation.now)

    with pytest.raises(ZeroDivisionError):
        simulation.run(main, until=lambda: 1 / (1 - simulation.now) < 0)
    assert cleaned == [1.5]


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


def test_the_first_error_leaves_and_the_first_later_ones_are_its_notes(
    simulation: Simulation,
) -> None:
    async def fail(number: int) -> None:
        try:
            await simulation.sleep(1)
        finally:
            raise KeyError(number)

    async def main() -> None:
        for number in range(20):
            simulation.start(fail, number)
        await simulation.sleep(2)

    with pytest.raises(KeyError, match="0") as caught:
        simulation.run(main)
    expected = [f"later: KeyError({number})" for number in range(1, 9)]
    assert caught.value.__notes__ == [*expected, "later: more errors, left out"]
