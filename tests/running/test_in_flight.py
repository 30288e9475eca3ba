"""Steps in flight: the order of calls, limits and stops, saves, results."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    FetchError,
    FunctionSessionCreator,
    GlobalStep,
    LoggingTensorHook,
    MonitoredSession,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import prefetch
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine, simulated
from .service import (
    CYCLE_SECS,
    Doing,
    Gated,
    Service,
    assert_nothing_left,
    feed,
    has_flights,
    logged_session,
    run_to_stop,
)


@simulated
async def test_the_next_step_is_submitted_before_the_results_of_the_first(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)
    async with logged_session(service, log) as session:
        for _ in range(3):
            log.append(await session.run("items"))
    assert log == [
        "B1", "S1", "B2", "S2", "R1", "A1", 0,
        "B3", "S3", "R2", "A2", 1,
        "B4", "S4", "R3", "A3", 2,
        "R4", "A4",
    ]  # fmt: skip


@simulated
async def test_the_order_with_three_in_flight_up_to_a_limit(simulation: Simulation) -> None:
    log: list[Any] = []
    async with logged_session(
        Service(simulation), log, StopAtStepHook(last_step=4), in_flight=3
    ) as session:
        await run_to_stop(session, log)
    assert log == [
        "B1", "S1", "B2", "S2", "B3", "S3", "R1", "A1", 0,
        "B4", "S4", "R2", "A2", 1,
        "R3", "A3", 2,
        "R4", "A4", 3,
    ]  # fmt: skip


@on_every_engine
@pytest.mark.parametrize(("in_flight", "secs"), [(1, 20.0), (2, 10.0), (3, 10.0)])
def test_a_service_with_cycles_makes_one_step_a_cycle(
    backend: Any, in_flight: int, secs: float
) -> None:
    simulation = Simulation(backend=backend)
    ends: list[float] = []

    async def main() -> None:
        service = Service(simulation)
        creator = FunctionSessionCreator(service.step, in_flight=in_flight)
        async with MonitoredSession([feed(), StopAtStepHook(last_step=40)], creator) as session:
            while not session.should_stop():
                await session.run("items")
                ends.append(simulation.now)
        assert service.updates == list(range(40))

    simulation.run(main)
    assert (ends[-1] - ends[0]) / 39 == pytest.approx(secs)


@simulated
async def test_training_stops_exactly_at_its_limit_and_every_result_is_returned(
    simulation: Simulation,
) -> None:
    service, results = Service(simulation), []
    creator = FunctionSessionCreator(service.step, in_flight=3)
    async with MonitoredSession([feed(), StopAtStepHook(last_step=7)], creator) as session:
        raw = session.raw_session()
        while not session.should_stop():
            results.append(await session.run("items"))
            await simulation.sleep(3 * CYCLE_SECS)  # the limit is reached outside of runs
        with pytest.raises(StopTraining, match="limit"):
            await session.run("items")
    assert results == service.updates == list(range(7))
    assert raw.retire()  # no run is under way on it
    assert_nothing_left(session.global_step)


@simulated
async def test_at_a_stop_by_a_hook_nothing_more_is_submitted_and_what_was_is_completed(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)

    async def stop(number: int, run_context: Any) -> None:
        if number == 2:
            run_context.request_stop("enough")

    class End(SessionRunHook):
        async def before_end(self, session: Any) -> None:
            log.append(("before_end", session.global_step.value))

    async with logged_session(service, log, Doing(after=stop), End()) as session:
        while not session.should_stop():
            await session.run("items")
        with pytest.raises(StopTraining, match="enough"):
            await session.run("items")
        assert log[-4:] == ["B3", "S3", "R2", "A2"]
    assert log[-3:] == ["R3", "A3", ("before_end", 3)]
    assert service.updates == [0, 1, 2]
    assert_nothing_left(session.global_step)


@simulated
async def test_training_ends_with_its_input(simulation: Simulation) -> None:
    service, results = Service(simulation), []
    creator = FunctionSessionCreator(service.step, in_flight=3)
    async with MonitoredSession([feed(4)], creator) as session:
        while True:
            results.append(await session.run("items"))
    assert results == service.updates == list(range(4))
    assert session.stop_reason is not None
    assert "has ended" in session.stop_reason.why


@simulated
async def test_what_finish_with_is_given_waits_until_nothing_is_in_flight(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)

    async def after(number: int, run_context: Any) -> None:
        if number == 2:
            run_context.finish_with(lambda: save(run_context))

    async def save(run_context: Any) -> None:
        step = run_context.global_step
        async with step.exclusive(timeout=0.0):
            await simulation.sleep(1.0)
            log.append(("save", step.value, len(service.updates)))

    async with logged_session(service, log, Doing(after=after)) as session:
        for _ in range(5):
            log.append(await session.run("items"))
    assert log == [
        "B1", "S1", "B2", "S2", "R1", "A1", 0,
        "B3", "S3", "R2", "A2", 1,
        "R3", "A3", ("save", 3, 3), 2,
        "B4", "S4", "B5", "S5", "R4", "A4", 3,
        "B6", "S6", "R5", "A5", 4,
        "R6", "A6",
    ]  # fmt: skip
    assert_nothing_left(session.global_step)


@simulated
async def test_a_run_whose_before_run_is_under_way_waits_for_a_save(simulation: Simulation) -> None:
    log: list[Any] = []

    async def before(number: int, run_context: Any) -> None:
        if number == 3:
            await simulation.sleep(1.5 * CYCLE_SECS)

    async def after(number: int, run_context: Any) -> None:
        if number == 2:
            run_context.finish_with(save)

    async def save() -> None:
        await simulation.sleep(3 * CYCLE_SECS)
        log.append("saved")

    async with logged_session(Service(simulation), log, Doing(before, after)) as session:
        for _ in range(3):
            await session.run("items")
    assert log == [
        "B1", "S1", "B2", "S2", "R1", "A1", "B3", "R2", "A2", "saved",
        "S3", "B4", "S4", "R3", "A3", "R4", "A4",
    ]  # fmt: skip


@pytest.mark.anyio
async def test_results_out_of_order_are_counted_in_order() -> None:
    service = Gated(3)
    seen: list[tuple[Any, int]] = []

    class Sees(SessionRunHook):
        may_overlap = True

        async def before_run(self, run_context: Any) -> Any:
            return SessionRunArgs("items")

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append((run_values.results, run_context.global_step.value))

    creator = FunctionSessionCreator(service.step, in_flight=3)
    async with (
        MonitoredSession([feed(3), Sees()], creator) as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(session.run, "items")
        for gate in reversed(service.gates):
            await anyio.wait_all_tasks_blocked()
            assert session.global_step.value == 0
            gate.set()
        await anyio.wait_all_tasks_blocked()
        assert session.global_step.value == 3
        await session.run("items")
        await session.run("items")
    # each hook sees the step of its own run, though all were there before the first after_run
    assert seen == [(0, 1), (1, 2), (2, 3)]


@simulated
async def test_each_run_has_the_fetches_of_its_own_call(simulation: Simulation) -> None:
    async def step(items: int) -> Any:
        async def outputs() -> Any:
            await simulation.sleep(1.0 + items)
            return {"items": items, "twice": 2 * items}

        return outputs()

    asked: list[Any] = []

    async def before(number: int, run_context: Any) -> None:
        asked.append(run_context.original_args.fetches)

    async def after(number: int, run_context: Any) -> None:
        asked.append(run_context.original_args.fetches)

    creator = FunctionSessionCreator(step, in_flight=2)
    hooks = [feed(), Doing(before, after), LoggingTensorHook(["twice"], every_n_iter=1)]
    async with MonitoredSession(hooks, creator) as session:
        assert await session.run("twice") == 0
        assert await session.run(["items"]) == [1]
        assert asked == ["twice", "twice", "twice", ["items"], ["items"]]
        with pytest.raises(FetchError, match="nothing there"):
            await session.run("nothing there")
        assert session.global_step.value >= 3  # that step was made all the same
        assert await session.run({"a": "items"}) == {"a": 3}


@simulated
async def test_workers_that_share_a_model_stop_exactly_at_its_limit(simulation: Simulation) -> None:
    service = Service(simulation, 1.0)
    source = prefetch(range(100), 1)
    creator = SharedSessionCreator(FunctionSessionCreator(service.step, in_flight=2), 3)
    results: list[Any] = []

    async def train() -> None:
        hooks = [FeedHook(source, "items"), StopAtStepHook(last_step=20)]
        async with MonitoredSession(hooks, creator) as session:
            await run_to_stop(session, results)

    for task in [simulation.start(train) for _ in range(3)]:
        await task.wait()
    assert len(service.updates) == 20
    assert results == service.updates
    assert not has_flights()


@simulated
async def test_a_block_that_is_left_early_completes_what_is_in_flight(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)
    async with logged_session(service, log) as session:
        await session.run("items")
    assert log[-2:] == ["R2", "A2"]
    assert service.updates == [0, 1]
    with pytest.raises(RuntimeError, match="closed"):
        await session.run("items")


@pytest.mark.anyio
async def test_plain_hooks_of_overlapping_runs_are_called_in_a_thread_in_order() -> None:
    log: list[str] = []

    class Plain(SessionRunHook):
        may_overlap = True

        def before_run(self, run_context: Any) -> SessionRunArgs:
            log.append("before")
            return SessionRunArgs("items")

        def after_run(self, run_context: Any, run_values: Any) -> None:
            log.append(f"after {run_values.results}")

    creator = FunctionSessionCreator(Gated(20, is_overlapping=True).step, in_flight=2)
    session = MonitoredSession([feed(20), Plain(), Plain()], creator, step_runner="thread")
    async with session:
        for number in range(20):
            assert await session.run("items") == number
    assert [each for each in log if each != "before"] == [
        f"after {number}" for number in range(20) for _ in range(2)
    ]
    assert_nothing_left(session.global_step)


@simulated
async def test_a_counter_that_others_publish_is_left_to_them(simulation: Simulation) -> None:
    step = GlobalStep(published_only=True)
    service = Service(simulation, 1.0)
    creator = FunctionSessionCreator(service.step, in_flight=2, global_step=step)
    async with MonitoredSession([feed(), StopAtStepHook(last_step=2)], creator) as session:
        for _ in range(3):
            await session.run("items")
        assert step.value == 0
        step.publish(2)
        results = [3, 4, 5, 6, 7]
        while not session.should_stop():
            assert await session.run("items") == results.pop(0)
        assert len(results) == 4  # one was in flight


def test_it_runs_on_uvloop() -> None:
    pytest.importorskip("uvloop")
    service = Gated(10, is_overlapping=True)

    async def main() -> None:
        creator = FunctionSessionCreator(service.step, in_flight=2)
        async with MonitoredSession([feed(), StopAtStepHook(last_step=10)], creator) as session:
            while not session.should_stop():
                await session.run("items")
        assert_nothing_left(session.global_step)

    anyio.run(main, backend_options={"use_uvloop": True})
    assert service.updates == list(range(10))


@simulated
async def test_a_hook_may_wait_for_the_step_of_a_run_in_flight(simulation: Simulation) -> None:
    async def before(number: int, run_context: Any) -> None:
        if number == 2:
            assert await run_context.global_step.wait_for(1) == 1

    creator = SharedSessionCreator(
        FunctionSessionCreator(Service(simulation).step, in_flight=2), num_workers=1
    )
    async with MonitoredSession([feed(), Doing(before)], creator) as session:
        assert [await session.run("items") for _ in range(3)] == [0, 1, 2]


@simulated
async def test_items_that_were_not_used_go_to_another_worker_in_order(
    simulation: Simulation,
) -> None:
    errors = {1: OSError("first"), 2: OSError("second")}
    service, source = Service(simulation, errors=errors), prefetch(range(4), 1)
    creator = SharedSessionCreator(FunctionSessionCreator(service.step, in_flight=2))
    async with MonitoredSession([FeedHook(source, "items")], creator) as other:
        async with MonitoredSession([FeedHook(source, "items")], creator) as session:
            for message in ("first", "second"):
                with pytest.raises(OSError, match=message):
                    await session.run("items")
                await simulation.sleep(2 * CYCLE_SECS)
        assert [await other.run("items") for _ in range(4)] == [0, 1, 2, 3]
