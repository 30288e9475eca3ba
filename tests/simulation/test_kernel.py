"""Clock, heap, tasks, cancellation and the end of a run, the same on every engine."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from asynchooks._engine.base import TIMED_OUT, Slot
from asynchooks._errors import DeadlockError, LivelockError
from asynchooks.simulation import Simulation

from ..engine.test_engine import Trace, program, trace_on_trampoline
from .engines import BACKENDS, simulated


@simulated
async def test_sleeps_of_virtual_years_end_at_exactly_their_time(simulation: Simulation) -> None:
    expected = 0.0
    for secs in (0.1, 97 * 86400.0, 3.2e9, 0.3, 1e15, 0.125):
        await simulation.sleep(secs)
        expected += secs
        assert simulation.now == expected


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


@simulated
async def test_equal_times_are_served_in_order_of_asking(simulation: Simulation) -> None:
    order: list[int] = []

    async def sleeper(number: int) -> None:
        await simulation.sleep(number / 10)
        await simulation.sleep(10 - simulation.now)
        order.append(number)

    for number in reversed(range(12)):
        simulation.start(sleeper, number)
    await simulation.sleep(20)
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


@simulated
async def test_a_deadline_that_is_past_ends_a_wait_now(simulation: Simulation) -> None:
    await simulation.sleep(5)
    kernel = simulation.kernel
    assert await kernel.park(Slot(kernel, "nothing"), until=2.0) is TIMED_OUT
    with kernel.shielded(-1):
        await simulation.sleep(1)
    assert simulation.now == 5.0


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
async def test_entries_that_wake_no_task_are_swept(simulation: Simulation) -> None:
    kernel = simulation.kernel
    slots: list[Slot] = []

    async def wait() -> None:
        while True:
            slots.append(Slot(kernel, "a wake-up"))
            await kernel.park(slots[-1], until=1e9)

    waiting = simulation.start(wait)
    for _ in range(4000):  # woken long before their deadlines
        await simulation.sleep(0.5)
        slots.pop().wake()
    assert len(kernel.heap) < 1100
    waiting.cancel()
    for _ in range(2000):  # cancelled long before their ends
        task = simulation.start(simulation.sleep, 1e9)
        await simulation.sleep(0.5)
        task.cancel()
        await task.wait(until=1e8)
    assert len(kernel.heap) < 1100


@simulated
async def test_a_task_forgets_waits_that_timed_out(simulation: Simulation) -> None:
    task: Any = simulation.start(simulation.sleep, 1e6)
    for _ in range(100):
        assert not await task.wait(until=simulation.now + 1)
    assert not task.waiting


@simulated
async def test_what_an_ended_task_held_is_freed(simulation: Simulation) -> None:
    references: list[weakref.ref[Any]] = []

    class Held:
        pass

    async def worker(held: Held) -> None:
        references.append(weakref.ref(held))
        await simulation.sleep(1)

    for _ in range(5):
        simulation.start(worker, Held())
    await simulation.sleep(3)
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


@simulated
async def test_quiescence_comes_last_at_its_time(simulation: Simulation) -> None:
    log: list[str] = []

    async def busy() -> None:
        await simulation.sleep(1)
        for number in range(3):
            await simulation.sleep(0)
            log.append(f"turn {number}")

    simulation.start(busy)
    await simulation.sleep(1)
    await simulation.quiescence()
    assert simulation.now == 1.0
    assert log == ["turn 0", "turn 1", "turn 2"]


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


def run_and_cancel(
    simulation: Simulation, worker: Callable[[], Awaitable[None]], at: float = 1.0
) -> None:
    """Run one task, cancel it at that time, and wait for its end."""

    async def main() -> None:
        task = simulation.start(worker)
        await simulation.sleep(at)
        task.cancel()
        assert await task.wait()

    simulation.run(main)


def test_a_cancelled_task_that_waits_again_is_cancelled_again(
    simulation: Simulation, log: list[Any]
) -> None:
    async def stubborn() -> None:
        for number in range(4):
            try:
                await simulation.sleep(1)
                log.append("slept")
            except BaseException:
                log.append((number, simulation.now))

    run_and_cancel(simulation, stubborn, at=1.5)
    assert log == ["slept", (1, 1.5), (2, 1.5), (3, 1.5)]
    assert simulation.now == 1.5


def test_a_shield_keeps_cancellation_out_until_its_time_is_over(
    simulation: Simulation, log: list[Any]
) -> None:
    async def worker() -> None:
        try:
            with simulation.kernel.shielded(10) as whole:
                await simulation.sleep(2)
                log.append(("whole", simulation.now))
            with simulation.kernel.shielded(3) as part:
                try:
                    await simulation.sleep(20)
                finally:
                    log.append(("part", simulation.now))
            log.append((whole.cancelled_caught, part.cancelled_caught))
            await simulation.sleep(1)
            log.append("never")
        finally:
            log.append(("left", simulation.now))

    run_and_cancel(simulation, worker)
    assert log == [("whole", 2.0), ("part", 5.0), (False, True), ("left", 5.0)]


@simulated
async def test_an_inner_shield_outlasts_the_time_of_an_outer_one(
    simulation: Simulation, log: list[Any]
) -> None:
    with simulation.kernel.shielded(1) as outer:
        with simulation.kernel.shielded(math.inf) as inner:
            await simulation.sleep(3)
            log.append(simulation.now)
        await simulation.sleep(1)
        log.append("never")
    log.append((simulation.now, inner.cancelled_caught, outer.cancelled_caught))
    assert log == [3.0, (3.0, False, True)]


def test_a_shield_that_ends_before_a_cancellation_is_left_by_its_end(
    simulation: Simulation, log: list[Any]
) -> None:
    async def worker() -> None:
        with simulation.kernel.shielded(1) as scope:
            await simulation.sleep(5)
        log.append((simulation.now, scope.cancelled_caught))
        await simulation.sleep(5)
        log.append("never")

    run_and_cancel(simulation, worker, at=1.0)  # asked for after the shield's own end
    assert log == [(1.0, True)]
    assert simulation.now == 1.0


def test_a_cancellation_that_is_raised_again_in_a_shield_leaves_it(
    simulation: Simulation, log: list[Any]
) -> None:
    async def worker() -> None:
        try:
            await simulation.sleep(5)
        except BaseException:
            with simulation.kernel.shielded(10):
                await simulation.sleep(1)
                log.append("cleaned")
                raise
            log.append("never")

    run_and_cancel(simulation, worker)
    assert log == ["cleaned"]


@simulated
async def test_a_task_cancelled_before_it_begins_runs_to_its_first_wait(
    simulation: Simulation, log: list[Any]
) -> None:
    async def worker() -> None:
        log.append("begins")
        await simulation.sleep(0)
        log.append("never")

    task = simulation.start(worker)
    task.cancel()
    assert await task.wait()
    task.cancel()  # it is over: nothing happens
    await simulation.sleep(1)
    assert log == ["begins"]


@simulated
async def test_a_task_may_cancel_itself(simulation: Simulation, log: list[Any]) -> None:
    tasks: list[Any] = []

    async def worker() -> None:
        tasks[0].cancel()
        log.append("goes on")
        woken = Slot(simulation.kernel, "woken already")
        woken.wake("value")
        log.append(await simulation.kernel.park(woken))
        await simulation.sleep(0)
        log.append("never")

    tasks.append(simulation.start(worker))
    await tasks[0].wait()
    assert log == ["goes on", "value"]


@pytest.mark.parametrize(
    ("is_cancelled_first", "expected"), [(False, [7, (True, 7, 1.0)]), (True, [(True, 7, 1.0)])]
)
@simulated
async def test_a_cancellation_that_comes_with_a_wake_up_loses_no_value(
    simulation: Simulation, log: list[Any], is_cancelled_first: bool, expected: list[Any]
) -> None:
    slot = Slot(simulation.kernel, "a value")

    async def worker() -> None:
        try:
            log.append(await simulation.kernel.park(slot, until=100.0))
            await simulation.sleep(1)
            log.append("never")
        finally:
            log.append((slot.is_woken, slot.value, simulation.now))

    task = simulation.start(worker)
    await simulation.sleep(1)
    acts = [lambda: slot.wake(7), task.cancel]
    for act in acts[::-1] if is_cancelled_first else acts:
        act()
    await simulation.sleep(200)
    assert log == expected


@simulated
async def test_a_wait_for_a_task_ends_after_its_clean_up(simulation: Simulation) -> None:
    async def worker() -> None:
        try:
            await simulation.sleep(100)
        finally:
            with simulation.kernel.shielded(10):
                await simulation.sleep(4)

    task = simulation.start(worker)
    await simulation.sleep(1)
    task.cancel()
    assert not await task.wait(until=2.0)
    assert simulation.now == 2.0
    assert await task.wait()
    assert simulation.now == 5.0


def test_a_cancelled_main_ends_the_run_without_a_value(simulation: Simulation) -> None:
    async def cancel(tasks: list[Any]) -> None:
        tasks[0].cancel()

    async def main() -> str:
        simulation.start(cancel, list(simulation.kernel.live))
        await simulation.sleep(5)
        return "never"

    assert simulation.run(main) is None
    assert simulation.now == 0.0


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


def trace_of(backend: Any) -> tuple[Trace, bytes]:
    trace: Trace = []
    simulation = Simulation(backend=backend, keep_trace=True)

    async def main() -> None:
        await program(simulation.kernel, trace)()  # type: ignore[arg-type]

    simulation.run(main)
    return trace, simulation.trace.to_bytes()


def test_sessions_and_hooks_give_one_trace_on_all_kernels() -> None:
    traces = [trace_of(each) for each in BACKENDS]
    assert traces[0] == traces[1] == traces[2]
    assert traces[0][0] == trace_on_trampoline()
