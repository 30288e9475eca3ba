"""explore in several processes finds what it finds in one."""

from collections.abc import Awaitable, Callable

import pytest

from asynchooks.simulation import ScheduleError, Simulation, explore

pytestmark = pytest.mark.faults


def crowd(num: int, most: int) -> Callable[[Simulation], Awaitable[None]]:
    """So many tasks that are ready together; it fails where the last one is before all others."""

    async def main(simulation: Simulation) -> None:
        order: list[int] = []

        async def run(number: int) -> None:
            await simulation.sleep(1.0)
            order.append(number)

        tasks = [simulation.start(run, number) for number in range(num)]
        await simulation.sleep(2.0)
        for task in tasks:
            await task.wait()
        assert order[0] < most

    return main


def test_the_same_schedules_are_tried_and_the_same_one_fails() -> None:
    whole = [explore(crowd(8, 8), num_processes=num) for num in (1, 2)]
    assert whole[0] == whole[1]
    assert whole[0].num_schedules > 100  # several batches
    failures = []
    for num in (1, 2):
        with pytest.raises(ScheduleError) as caught:
            explore(crowd(8, 7), max_delays=2, num_processes=num)
        failures.append(str(caught.value))
    assert failures[0] == failures[1]
