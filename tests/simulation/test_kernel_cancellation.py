"""Cancellation in virtual time means the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from asynchooks._engine.base import Slot
from asynchooks.simulation import Simulation


def test_a_cancelled_task_that_waits_again_is_cancelled_again(simulation: Simulation) -> None:
    log: list[Any] = []

    async def stubborn() -> None:
        for number in range(4):
            try:
                await simulation.sleep(1)
                log.append("slept")
            except BaseException:
                log.append((number, simulation.now))

    async def main() -> None:
        task = simulation.start(stubborn)
        await simulation.sleep(1.5)
        task.cancel()
        assert await task.wait()
        log.append(simulation.now)

    simulation.run(main)
    assert log == ["slept", (1, 1.5), (2, 1.5), (3, 1.5), 1.5]


def test_a_shield_keeps_cancellation_out_until_its_time_is_over(simulation: Simulation) -> None:
    log: list[Any] = []

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

    async def main() -> None:
        task = simulation.start(worker)
        await simulation.sleep(1)
        task.cancel()
        await simulation.sleep(30)

    simulation.run(main)
    assert log == [("whole", 2.0), ("part", 5.0), (False, True), ("left", 5.0)]


def test_an_inner_shield_outlasts_the_time_of_an_outer_one(simulation: Simulation) -> None:
    log: list[Any] = []

    async def main() -> None:
        with simulation.kernel.shielded(1) as outer:
            with simulation.kernel.shielded(math.inf) as inner:
                await simulation.sleep(3)
                log.append(simulation.now)
            await simulation.sleep(1)
            log.append("never")
        log.append((simulation.now, inner.cancelled_caught, outer.cancelled_caught))

    simulation.run(main)
    assert log == [3.0, (3.0, False, True)]


def test_a_shield_that_ends_before_a_cancellation_is_left_by_its_end(
    simulation: Simulation,
) -> None:
    log: list[Any] = []

    async def worker() -> None:
        with simulation.kernel.shielded(1) as scope:
            await simulation.sleep(5)
        log.append((simulation.now, scope.cancelled_caught))
        await simulation.sleep(5)
        log.append("never")

    async def main() -> None:
        task = simulation.start(worker)
        await simulation.sleep(1.0)  # asked for after the shield's own end
        task.cancel()
        await task.wait()
        log.append(simulation.now)

    simulation.run(main)
    assert log == [(1.0, True), 1.0]


def test_a_cancellation_that_is_raised_again_in_a_shield_leaves_it(simulation: Simulation) -> None:
    log: list[str] = []

    async def worker() -> None:
        try:
            await simulation.sleep(5)
        except BaseException:
            with simulation.kernel.shielded(10):
                await simulation.sleep(1)
                log.append("cleaned")
                raise
            log.append("never")

    async def main() -> None:
        task = simulation.start(worker)
        await simulation.sleep(1)
        task.cancel()
        await task.wait()

    simulation.run(main)
    assert log == ["cleaned"]


def test_a_task_cancelled_before_it_begins_runs_to_its_first_wait(
    simulation: Simulation,
) -> None:
    log: list[str] = []

    async def worker() -> None:
        log.append("begins")
        await simulation.sleep(0)
        log.append("never")

    async def main() -> None:
        task = simulation.start(worker)
        task.cancel()
        assert await task.wait()
        task.cancel()  # it is over: nothing happens
        await simulation.sleep(1)

    simulation.run(main)
    assert log == ["begins"]


def test_a_task_may_cancel_itself(simulation: Simulation) -> None:
    log: list[Any] = []
    tasks: list[Any] = []

    async def worker() -> None:
        tasks[0].cancel()
        log.append("goes on")
        woken = Slot(simulation.kernel, "woken already")
        woken.wake("value")
        log.append(await simulation.kernel.park(woken))
        await simulation.sleep(0)
        log.append("never")

    async def main() -> None:
        tasks.append(simulation.start(worker))
        await tasks[0].wait()

    simulation.run(main)
    assert log == ["goes on", "value"]


def _race(backend: Any, first: str) -> list[Any]:
    """A task is woken and cancelled at one moment; what it sees."""
    simulation = Simulation(backend=backend)
    log: list[Any] = []

    async def main() -> None:
        kernel = simulation.kernel
        slot = Slot(kernel, "a value")

        async def worker() -> None:
            try:
                log.append(await kernel.park(slot, until=100.0))
                await simulation.sleep(1)
                log.append("never")
            finally:
                log.append((slot.is_woken, slot.value, simulation.now))

        task = simulation.start(worker)
        await simulation.sleep(1)
        acts: dict[str, Callable[[], Any]] = {"wake": lambda: slot.wake(7), "cancel": task.cancel}
        acts.pop(first)()
        next(iter(acts.values()))()
        await simulation.sleep(200)

    simulation.run(main)
    return log


def test_a_cancellation_that_comes_with_a_wake_up_loses_no_value(backend: Any) -> None:
    assert _race(backend, first="wake") == [7, (True, 7, 1.0)]
    assert _race(backend, first="cancel") == [(True, 7, 1.0)]


def test_a_wait_for_a_task_ends_after_its_clean_up(simulation: Simulation) -> None:
    async def worker() -> None:
        try:
            await simulation.sleep(100)
        finally:
            with simulation.kernel.shielded(10):
                await simulation.sleep(4)

    async def main() -> list[Any]:
        task = simulation.start(worker)
        await simulation.sleep(1)
        task.cancel()
        seen: list[Any] = [await task.wait(until=2.0), simulation.now]
        return [*seen, await task.wait(), simulation.now]

    assert simulation.run(main) == [False, 2.0, True, 5.0]


def test_a_cancelled_main_ends_the_run_without_a_value(simulation: Simulation) -> None:
    async def cancel(tasks: list[Any]) -> None:
        tasks[0].cancel()

    async def main() -> str:
        simulation.start(cancel, list(simulation.kernel.live))
        await simulation.sleep(5)
        return "never"

    assert simulation.run(main) is None
    assert simulation.now == 0.0
