"""Trio's own scopes, nurseries and helpers in virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import trio
import trio.testing

from asynchooks._errors import LivelockError
from asynchooks.simulation import Simulation


def simulate(main: Any, **options: Any) -> Any:
    return Simulation(backend="trio", **options).run(main)


def test_deadlines_and_nurseries_end_at_exactly_their_times() -> None:
    async def main() -> list[float]:
        times = []
        async with trio.open_nursery() as nursery:
            for secs in (3.0, 0.1, 3.2e9):
                nursery.start_soon(trio.sleep, secs)
        times.append(trio.current_time())
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.3):
            await trio.sleep(100)
        times.append(trio.current_time())
        with trio.move_on_at(3.2e9 + 10):
            await trio.sleep_forever()
        times.append(trio.current_time())
        return times

    assert simulate(main) == [3.2e9, 3.2e9 + 0.3, 3.2e9 + 10]


def test_a_deadline_that_is_past_ends_at_once_and_time_stays() -> None:
    simulation = Simulation(backend="trio")

    async def main() -> float:
        simulation.start(simulation.sleep, 20)
        await simulation.sleep(5)
        with trio.move_on_at(2):
            await trio.sleep_forever()
        return simulation.now

    assert simulation.run(main) == 5.0


@pytest.mark.parametrize(
    "wait", [trio.testing.wait_all_tasks_blocked, anyio.wait_all_tasks_blocked]
)
def test_all_tasks_are_blocked_before_time_passes(wait: Any) -> None:
    simulation = Simulation(backend="trio")
    log: list[str] = []

    async def main() -> list[float]:
        async def child() -> None:
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            log.append("blocked")
            await trio.sleep(50)

        simulation.start(simulation.sleep, 100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            await wait()
            log.append("unblocked")
            times = [simulation.now]
        await wait()
        return [*times, simulation.now]

    assert simulation.run(main) == [0.0, 50.0]
    assert log == ["blocked", "unblocked"]


def test_to_ask_for_the_time_is_no_turn() -> None:
    async def main() -> float:
        for _ in range(1000):
            trio.current_time()
        await trio.sleep(1)
        return trio.current_time()

    assert simulate(main, max_turns=10) == 1.0


def test_a_wait_of_trios_that_spends_no_time_is_refused() -> None:
    async def main() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    with pytest.raises(LivelockError, match="more than 50 turns each at virtual time 0.0"):
        simulate(main, max_turns=50)
