"""Facts about every program: random ones, run on every engine."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks._engine.base import Slot
from asynchooks.simulation import Simulation

from .engines import BACKENDS, outcome_of
from .random_programs import PROGRAMS, Op, Run


def run_on(
    backend: Any, scripts: list[list[Op]], shuffle_ties: bool, keep_trace: bool = True
) -> tuple[Run, Any]:
    simulation = Simulation(
        5, backend, shuffle_ties=shuffle_ties, max_turns=500, keep_trace=keep_trace
    )
    run = Run(simulation, scripts)
    return run, outcome_of(simulation, run.main)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, st.booleans())
def test_every_engine_does_the_same_and_loses_nothing(
    scripts: list[list[Op]], shuffle_ties: bool
) -> None:
    runs = [run_on(backend, scripts, shuffle_ties) for backend in BACKENDS]
    runs.append(run_on("turbo", scripts, shuffle_ties, keep_trace=False))  # by its faster way
    first, expected = runs[0]
    for run, outcome in runs:
        # time went back, or a sleep ended at another time
        assert outcome is not AssertionError
        assert outcome == expected
        assert run.log == first.log
        if run.simulation.recording is not None:
            assert run.simulation.trace.to_bytes() == first.simulation.trace.to_bytes()
        # every task ends once, whatever fails; no wake-up comes twice
        assert run.begun == run.ended
        assert set(run.begun.values()) <= {1}
        assert run.num_woken <= run.num_wakes
        assert all(getattr(task, "is_done", False) for task in run.started)


def test_no_wake_up_is_lost_that_a_shuffle_puts_before_its_waker(backend: Any) -> None:
    simulation = Simulation(3, backend, shuffle_ties=True)
    slots: dict[int, Slot] = {}
    num_woken = 0

    async def wait(number: int) -> None:
        nonlocal num_woken
        for _ in range(20):
            slots[number] = Slot(simulation.kernel, f"a wake-up of {number}")
            await simulation.kernel.park(slots[number])
            num_woken += 1

    async def wake(number: int) -> None:
        for _ in range(20):
            await simulation.sleep(1)
            slots[number].wake()

    async def main() -> None:
        for number in range(10):
            simulation.start(wait, number)
            simulation.start(wake, number)
        await simulation.sleep(30)

    simulation.run(main)
    assert num_woken == 200


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_sleeps_end_at_exactly_their_times_in_order(secs: list[float], shuffle_ties: bool) -> None:
    for backend in BACKENDS:
        simulation = Simulation(1, backend, shuffle_ties=shuffle_ties)
        ends: list[tuple[float, int]] = []

        async def sleeper(
            number: int, secs: float, simulation: Simulation = simulation, ends: Any = ends
        ) -> None:
            await simulation.sleep(secs)
            ends.append((simulation.now, number))

        async def main(simulation: Simulation = simulation, start: Any = sleeper) -> None:
            tasks = [simulation.start(start, number, each) for number, each in enumerate(secs)]
            for task in tasks:
                await task.wait()

        simulation.run(main)
        assert sorted(ends) == sorted((each, number) for number, each in enumerate(secs))
        assert [time for time, _ in ends] == sorted(secs)
        if not shuffle_ties:
            assert ends == sorted(ends)
