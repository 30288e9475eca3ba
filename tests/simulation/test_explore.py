"""explore: every order of a program's tasks, the shortest failing one told and replayed."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import MonitoredSession, PreemptionError
from asynchooks.simulation import (
    DeadlockError,
    ForeignAwaitError,
    ScheduleError,
    Simulation,
    SimulationError,
    write_trace,
)
from asynchooks.simulation import explore as search

from .engines import on_event_loops

Program = Callable[[Simulation], Awaitable[Any]]


async def run_all(simulation: Simulation, *fns: Callable[[], Awaitable[Any]]) -> None:
    """Each as a task of its name."""
    tasks = [simulation.start(each, name=each.__name__) for each in fns]
    for task in tasks:
        await task.wait()


explore = partial(search, num_processes=1)


def failure_of(main: Program, **options: Any) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        explore(main, **options)
    return caught.value


def replay(main: Program, error: ScheduleError, backend: Any) -> None:
    simulation = Simulation(backend=backend, schedule=error.schedule)
    simulation.run(main, simulation)


def permuting(seen: list[str], names: str = "abc") -> Program:
    """Tasks that are ready together, once each."""

    async def main(simulation: Simulation) -> None:
        order = ""

        async def run(name: str) -> None:
            nonlocal order
            await simulation.sleep(1.0)
            order += name

        tasks = [simulation.start(run, name, name=name) for name in names]
        await simulation.sleep(2.0)
        for each in tasks:
            await each.wait()
        seen.append(order)

    return main


async def lost_update(simulation: Simulation) -> None:
    """Right in the usual order, as the first writes before the second reads."""
    balance = 0

    async def deposit() -> None:
        nonlocal balance
        before = balance
        if before == 0:
            await simulation.sleep(0.0)
        balance = before + 1

    async def pay() -> None:
        nonlocal balance
        await simulation.sleep(0.0)
        balance += 10

    await run_all(simulation, deposit, pay)
    assert balance == 11, balance


async def lost_event(simulation: Simulation) -> None:
    """Between a waiter that an event of anyio wakes and a timer of the same time."""
    event, log = anyio.Event(), []

    async def wait() -> None:
        await event.wait()
        log.append("event")

    async def sleep() -> None:
        await simulation.sleep(1.0)
        log.append("timer")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await simulation.sleep(1.0)
        task = simulation.start(sleep, name="sleep")
        await simulation.sleep(1.0)
        event.set()
        await task.wait()
    assert log[0] == "event", log


def test_every_order_is_tried_once(backend: Any) -> None:
    seen: list[str] = []
    found = explore(permuting(seen), backend=backend, max_delays=6)
    assert {*seen} == {"".join(each) for each in permutations("abc")}
    assert found.is_complete
    assert found.num_schedules == len(seen)
    few: list[str] = []
    assert explore(permuting(few), backend=backend, max_delays=1).num_schedules == len(few)
    assert len(few) < len(seen)


def test_a_race_is_found_told_and_replayed(backend: Any) -> None:
    error = failure_of(lost_update, backend=backend)
    assert isinstance(error.__cause__, AssertionError)
    (told,) = error.deviations
    assert told == "at 0 s, the start of <pay> went on before the start of <deposit>"
    with pytest.raises(AssertionError, match=str(error.__cause__)):
        replay(lost_update, error, backend)
    assert repr(error.schedule) in str(error)


@on_event_loops
def test_what_an_event_loop_wakes_and_what_asynchooks_wakes_run_in_either_order(
    backend: Any,
) -> None:
    assert isinstance(failure_of(lost_event, backend=backend).__cause__, AssertionError)


def test_the_first_failure_has_the_fewest_deviations() -> None:
    seen: list[str] = []

    async def main(simulation: Simulation) -> None:
        await permuting(seen, "abcd")(simulation)
        assert seen[-1] not in ("acbd", "dcba")

    assert len(failure_of(main, max_delays=4).deviations) == 2


async def deadlock(simulation: Simulation) -> None:
    async def first() -> None:
        await simulation.sleep(0.0)
        if second_task.is_done:
            await simulation.sleep(float("inf"))

    first_task = simulation.start(first, name="first")
    second_task: Any = simulation.start(simulation.sleep, 0.0, name="second")
    await first_task.wait()
    await second_task.wait()


def test_a_deadlock_in_one_order_is_a_failure() -> None:
    assert isinstance(failure_of(deadlock).__cause__, DeadlockError)


def test_a_task_that_main_leaves_is_a_failure(backend: Any) -> None:
    async def main(simulation: Simulation) -> None:
        simulation.start(simulation.sleep, 5.0, name="forgotten")

    error = failure_of(main, backend=backend)
    assert isinstance(error.__cause__, SimulationError)
    assert "forgotten" in str(error)
    with pytest.raises(SimulationError, match="forgotten"):
        replay(main, error, backend)


def test_a_task_is_cancelled_at_each_of_its_waits(backend: Any) -> None:
    ends: list[int] = []

    async def main(simulation: Simulation) -> None:
        num = 0

        async def count() -> None:
            nonlocal num
            for _ in range(3):
                await simulation.sleep(1.0)
                num += 1

        await simulation.start(count, name="worker 1").wait()
        ends.append(num)

    found = explore(main, backend=backend, cancel="worker *", max_delays=0)
    assert found.is_complete
    assert {*ends} == {0, 1, 2, 3}


def test_clean_up_that_a_cancellation_skips_is_found(backend: Any) -> None:
    async def main(simulation: Simulation) -> None:
        held = False

        async def use() -> None:
            nonlocal held
            held = True
            await simulation.sleep(1.0)
            held = False

        await simulation.start(use, name="use").wait()
        assert not held, "still held"

    assert explore(main, backend=backend).is_complete
    error = failure_of(main, backend=backend, cancel="use")
    assert "cancel use" in error.schedule
    with pytest.raises(AssertionError, match="still held"):
        replay(main, error, backend)


def test_an_error_is_raised_at_each_await_of_the_user(backend: Any) -> None:
    seen: list[Any] = []

    async def main(simulation: Simulation) -> None:
        async def work() -> None:
            num = 0
            try:
                while num < 3:
                    await simulation.sleep(1.0)
                    num += 1
            except (PreemptionError, ValueError) as error:
                seen.append((type(error), num))

        await simulation.start(work, name="work").wait()

    assert explore(
        main, backend=backend, errors=[PreemptionError, ValueError], max_delays=0
    ).is_complete
    assert {*seen} == {(kind, num) for kind in (PreemptionError, ValueError) for num in range(3)}


def test_an_error_that_was_raised_may_leave_as_itself_and_not_otherwise() -> None:
    async def as_itself(simulation: Simulation) -> None:
        await simulation.sleep(1.0)

    async def wrapped(simulation: Simulation) -> None:
        try:
            await simulation.sleep(1.0)
        except ValueError as error:
            raise RuntimeError from error

    assert explore(as_itself, errors=[ValueError]).is_complete
    assert isinstance(failure_of(wrapped, errors=[ValueError]).__cause__, RuntimeError)


def deep(simulation: Simulation) -> Any:
    """Fails where one task is overtaken four times."""
    log: list[str] = []

    async def main() -> None:
        async def first() -> None:
            await simulation.sleep(0.0)
            assert log.count("x") < 4

        async def second() -> None:
            for _ in range(5):
                log.append("x")
                await simulation.sleep(0.0)

        await run_all(simulation, first, second)

    return main()


def test_what_needs_more_deviations_is_found_at_random_and_shrunk() -> None:
    assert explore(deep, max_delays=2).is_complete
    error = failure_of(deep, max_delays=1, num_random=300)
    assert 2 < len(error.deviations) <= 4
    again = failure_of(deep, max_delays=1, num_random=300)
    assert again.schedule == error.schedule


def test_the_seed_decides_what_is_drawn() -> None:
    def drawn(seed: int) -> list[str]:
        seen: list[str] = []
        explore(permuting(seen, "abcdef"), max_delays=0, num_random=20, seed=seed)
        return seen

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_search_that_takes_too_long_says_so() -> None:
    seen: list[str] = []
    found = explore(permuting(seen, "abcdefg"), max_delays=4, num_random=9, max_secs=0.0)
    assert not found.is_complete
    assert found.num_schedules == len(seen)
    assert found.num_random == 0
    assert "cut short" in str(found)


def test_an_interrupt_says_what_was_tried() -> None:
    num = 0

    async def main(simulation: Simulation) -> None:
        nonlocal num
        num += 1
        await simulation.sleep(1.0)
        if num == 3:  # the first was alone, and two more are drawn
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        explore(main, num_random=10)
    assert "no failure in 1 schedules" in caught.value.__notes__[0]


def test_nothing_is_logged_during_a_search(caplog: pytest.LogCaptureFixture) -> None:
    async def main(simulation: Simulation) -> None:
        async with MonitoredSession([], dict) as session:
            session.request_stop("enough")

    caplog.set_level("INFO", "asynchooks")
    simulation = Simulation(backend="turbo")
    simulation.run(main, simulation)
    assert caplog.records
    caplog.clear()
    assert explore(main).is_complete
    assert not caplog.records


def test_a_foreign_await_is_named() -> None:
    async def main(simulation: Simulation) -> None:
        await anyio.sleep(1.0)

    assert isinstance(failure_of(main).__cause__, ForeignAwaitError)


def test_a_program_that_differs_from_run_to_run_is_refused() -> None:
    runs = []

    async def main(simulation: Simulation) -> None:
        runs.append(1)
        assert len(runs) != 1

    with pytest.raises(SimulationError, match="did not when it was run again"):
        explore(main)


def test_a_schedule_of_another_program_is_refused() -> None:
    async def main(simulation: Simulation) -> None:
        await simulation.sleep(1.0)

    for schedule in ("1:7", "1:cancel worker 9"):
        simulation = Simulation(backend="turbo", schedule=schedule)
        with pytest.raises(SimulationError, match="of another program"):
            simulation.run(main, simulation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_delays": -1}, "max_delays"),
        ({"num_random": 1.5}, "num_random"),
        ({"errors": [KeyboardInterrupt]}, "KeyboardInterrupt"),
        ({"errors": ValueError}, "errors"),
        ({"cancel": 3}, "cancel"),
        ({"max_secs": -1}, "max_secs"),
        ({"backend": "uvloop"}, "backend"),
    ],
)
def test_a_wrong_option_is_refused(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        explore(permuting([]), **options)


def test_a_wrong_schedule_is_refused() -> None:
    for schedule in ("later", "3", "1:raise NoSuchError in main"):
        with pytest.raises(ValueError, match=r"schedule has|is no error"):
            Simulation(schedule=schedule)


def test_the_steps_of_a_failure_are_a_trace(tmp_path: Path) -> None:
    error = failure_of(lost_update)
    write_trace(tmp_path / "failure.json", error)
    text = (tmp_path / "failure.json").read_text()
    events = json.loads(text.rstrip().rstrip(",") + "]")
    names = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    spans = [names[each["tid"]] for each in events if each["ph"] == "X"]
    assert spans == [name for _, name, _ in error.steps]
    assert spans.index("pay") < len(spans)
