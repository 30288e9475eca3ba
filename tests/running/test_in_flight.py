"""Steps in flight: the order of calls, exact stops, errors, recovery, cancellation, refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedFnHook,
    FeedHook,
    FetchError,
    FunctionSessionCreator,
    GlobalStep,
    LoggingTensorHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StepFunctionError,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine.current import current_engine
from asynchooks.data import prefetch, rollouts
from asynchooks.simulation import Simulation

from ..simulation.engines import BACKENDS, on_every_engine, simulated
from ..support.helpers import raises_at
from .service import CYCLE_SECS, Log, Service

AT_ONCE = Recovery(first_pause_secs=0.0)


@pytest.fixture(params=BACKENDS)
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(backend=request.param)


class Doing(SessionRunHook):
    """Calls functions with the number of the run, from 1, before and after it."""

    may_overlap = True

    def __init__(
        self,
        before: Callable[[int, Any], Awaitable[None]] | None = None,
        after: Callable[[int, Any], Awaitable[None]] | None = None,
    ) -> None:
        self.before, self.after = before, after
        self.num_before = self.num_after = 0

    async def before_run(self, run_context: Any) -> None:
        self.num_before += 1
        if self.before is not None:
            await self.before(self.num_before, run_context)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.num_after += 1
        if self.after is not None:
            await self.after(self.num_after, run_context)


def logged(service: Service, log: list[Any]) -> Callable[..., Any]:
    """The step function of the service, which writes down submissions and results."""

    async def step(items: Any) -> Any:
        number = service.num_requests + 1
        log.append(f"S{number}")
        reply = service.submit(items)

        async def outputs() -> Any:
            result = await reply.result()
            log.append(f"R{number}")
            return result

        return outputs()

    return step


def feed(num_items: int = 100) -> FeedHook:
    return FeedHook(prefetch(range(num_items), 1), "items")


def has_flights() -> bool:
    return any("_fly" in repr(coroutine) for _, coroutine in current_engine().running_tasks())


def assert_nothing_left(step: GlobalStep) -> None:
    statistics = step.statistics()
    assert statistics.tickets == statistics.tasks_waiting_for_ticket == 0
    assert not statistics.is_exclusive
    assert not has_flights()


@simulated
async def test_the_next_step_is_submitted_before_the_results_of_the_first(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)
    creator = FunctionSessionCreator(logged(service, log), in_flight=2)
    async with MonitoredSession([feed(), Log(log)], creator) as session:
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
    creator = FunctionSessionCreator(logged(Service(simulation), log), in_flight=3)
    hooks = [feed(), Log(log), StopAtStepHook(last_step=4)]
    async with MonitoredSession(hooks, creator) as session:
        while not session.should_stop():
            log.append(await session.run("items"))
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

    hooks = [feed(), Log(log), Doing(after=stop), End()]
    creator = FunctionSessionCreator(logged(service, log), in_flight=2)
    async with MonitoredSession(hooks, creator) as session:
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
async def test_an_error_leaves_the_run_of_its_step_and_the_others_go_on(
    simulation: Simulation,
) -> None:
    service = Service(simulation, errors={3: OSError("step 3")})
    results: list[Any] = []
    creator = FunctionSessionCreator(service.step, in_flight=3)
    async with MonitoredSession([feed(6)], creator) as session:
        results += [await session.run("items") for _ in range(2)]
        with pytest.raises(OSError, match="step 3"):
            await session.run("items")
        results += [await session.run("items") for _ in range(4)]
    # the item of the failed step was fed again, as soon as another step was submitted
    assert results == service.updates == [0, 1, 3, 4, 2, 5]
    assert_nothing_left(session.global_step)


@simulated
async def test_an_error_that_leaves_the_block_cancels_what_is_in_flight(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation, errors={2: OSError("step 2"), 3: OSError("step 3")})
    creator = FunctionSessionCreator(logged(service, log), in_flight=3)
    session = MonitoredSession([feed(), Log(log)], creator)
    with pytest.raises(OSError, match="step 2") as caught:
        async with session:
            while True:
                await session.run("items")
                await simulation.sleep(3 * CYCLE_SECS)  # both have failed by then
    assert caught.value.__notes__ == ["then, in a run in flight behind it: OSError('step 3')"]
    assert log[-1] == "A1"
    assert_nothing_left(session.global_step)


@pytest.mark.parametrize("moment", ["before_run", "after_run"])
@pytest.mark.parametrize("is_plain", [False, True])
@simulated
async def test_an_error_of_a_hook_names_it_and_leaves_nothing_in_flight(
    simulation: Simulation, moment: str, is_plain: bool
) -> None:
    service = Service(simulation)
    hook = raises_at(moment, OSError("of the hook"), is_plain=is_plain)
    creator = FunctionSessionCreator(service.step, in_flight=2)
    session = MonitoredSession([feed(), hook], creator)
    with pytest.raises(OSError, match="of the hook") as caught:
        async with session:
            await session.run("items")
    assert caught.value.__notes__ == [f"in {moment} of Raises"]
    assert service.updates == ([] if moment == "before_run" else [0])
    assert_nothing_left(session.global_step)


@simulated
async def test_errors_of_hooks_of_two_runs_at_once_both_have_their_hook(
    simulation: Simulation,
) -> None:
    async def before(number: int, run_context: Any) -> None:
        if number == 2:
            await simulation.sleep(CYCLE_SECS)  # while after_run of the first is called
            raise KeyError("before the second")

    async def after(number: int, run_context: Any) -> None:
        await simulation.sleep(2 * CYCLE_SECS)
        raise OSError("after the first")

    class After(Doing):
        pass

    creator = FunctionSessionCreator(Service(simulation).step, in_flight=2)
    session = MonitoredSession([feed(), Doing(before), After(after=after)], creator)
    with pytest.raises(OSError, match="after the first") as caught:
        async with session:
            await session.run("items")
    assert caught.value.__notes__ == [
        "in after_run of After",
        "then, in a run in flight behind it: KeyError('before the second')",
    ]
    assert_nothing_left(session.global_step)


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

    hooks = [feed(), Log(log), Doing(after=after)]
    creator = FunctionSessionCreator(logged(service, log), in_flight=2)
    async with MonitoredSession(hooks, creator) as session:
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

    hooks = [feed(), Log(log), Doing(before, after)]
    creator = FunctionSessionCreator(logged(Service(simulation), log), in_flight=2)
    async with MonitoredSession(hooks, creator) as session:
        for _ in range(3):
            await session.run("items")
    assert log == [
        "B1", "S1", "B2", "S2", "R1", "A1", "B3", "R2", "A2", "saved",
        "S3", "B4", "S4", "R3", "A3", "R4", "A4",
    ]  # fmt: skip


@pytest.mark.parametrize("goes_on", [False, True])
@simulated
async def test_a_save_is_not_lost_by_an_error_of_a_later_step(
    simulation: Simulation, goes_on: bool
) -> None:
    saved: list[int] = []
    service = Service(simulation, errors={2: OSError("step 2")})

    async def after(number: int, run_context: Any) -> None:
        if number == 1:
            run_context.finish_with(lambda: save(run_context))

    async def save(run_context: Any) -> None:
        saved.append(run_context.global_step.value)

    creator = FunctionSessionCreator(service.step, in_flight=2)
    async with MonitoredSession([feed(), Doing(after=after)], creator) as session:
        await session.run("items")
        with pytest.raises(OSError, match="step 2"):
            await session.run("items")
        assert saved == []
        if goes_on:
            assert await session.run("items") == 1
            assert saved == [1]
    assert saved == [1]


@simulated
async def test_a_lost_session_submits_all_that_was_in_flight_again_in_order(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation, errors={3: PreemptionError("gone")})
    creator = FunctionSessionCreator(service.step, in_flight=3)
    session = MonitoredSession([feed(6), Log(log)], creator, recovery=AT_ONCE)
    results: list[Any] = []
    async with session:
        while not session.should_stop():
            results.append(await session.run("items"))
    assert results == service.updates == list(range(6))
    assert_nothing_left(session.global_step)


@simulated
async def test_a_preemption_that_a_side_task_reports_submits_them_again(
    simulation: Simulation,
) -> None:
    service = Service(simulation)

    class Reports(SessionRunHook):
        num_created = 0

        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.num_created += 1
            if self.num_created == 1:
                coord.start_soon(self.report)

        async def report(self) -> None:
            await simulation.sleep(2.5 * CYCLE_SECS)
            raise PreemptionError("reported")

    hook = Reports()
    creator = FunctionSessionCreator(service.step, in_flight=2)
    hooks = [feed(), hook, StopAtStepHook(last_step=6)]
    results: list[Any] = []
    async with MonitoredSession(hooks, creator, recovery=AT_ONCE) as session:
        while not session.should_stop():
            results.append(await session.run("items"))
    assert hook.num_created == 2
    assert results == service.updates == list(range(6))


@simulated
async def test_a_preemption_after_a_stop_leaves_the_block(simulation: Simulation) -> None:
    service = Service(simulation, errors={2: PreemptionError("gone")})

    async def stop(number: int, run_context: Any) -> None:
        run_context.request_stop("enough")

    creator = FunctionSessionCreator(service.step, in_flight=2)
    session = MonitoredSession([feed(), Doing(after=stop)], creator, recovery=AT_ONCE)
    with pytest.raises(PreemptionError, match="gone"):
        async with session:
            await session.run("items")
    assert_nothing_left(session.global_step)


SECS = [0.0, 1.0, 4.0, 5.0, 9.5, 10.0, 12.0, 14.0, 15.0, 20.0, 21.0, 26.0]


@pytest.mark.parametrize("secs", SECS)
@simulated
async def test_a_cancellation_at_any_time_leaves_no_ticket_and_no_task(
    simulation: Simulation, secs: float
) -> None:
    service = Service(simulation)
    left: list[BaseException] = []

    async def slow(number: int, run_context: Any) -> None:
        await simulation.sleep(2.0)

    async def after(number: int, run_context: Any) -> None:
        await simulation.sleep(1.0)
        if number == 2:
            run_context.finish_with(last, exclusive=True)

    async def last() -> None:
        await simulation.sleep(3.0)

    async def step(items: int) -> Any:
        await simulation.sleep(1.5)
        return service.submit(items).result()

    creator = FunctionSessionCreator(step, in_flight=2)
    session = MonitoredSession([feed(), Doing(slow, after)], creator)

    async def train() -> None:
        try:
            async with session:
                while True:
                    await session.run("items")
        except BaseException as error:
            left.append(error)
            raise

    task = simulation.start(train)
    await task.wait(secs)
    task.cancel()
    await task.wait()
    assert not isinstance(left[0], Exception)
    assert_nothing_left(session.global_step)


@pytest.mark.anyio
async def test_a_run_that_was_cancelled_leaves_its_steps_in_flight_for_the_next() -> None:
    gates = [anyio.Event() for _ in range(4)]
    results: list[Any] = []

    async def step(items: int) -> Any:
        async def outputs() -> Any:
            await gates[items].wait()
            return {"items": items}

        return outputs()

    creator = FunctionSessionCreator(step, in_flight=2)
    async with MonitoredSession([feed(4)], creator) as session:
        with anyio.move_on_after(0.02) as scope:
            await session.run("items")
        assert scope.cancelled_caught
        assert session.global_step.statistics().tickets == 2
        for gate in gates:
            gate.set()
        while not session.should_stop():
            results.append(await session.run("items"))
    assert results == [0, 1, 2, 3]
    assert_nothing_left(session.global_step)


@pytest.mark.anyio
async def test_results_out_of_order_are_counted_in_order() -> None:
    gates = [anyio.Event() for _ in range(3)]
    seen: list[tuple[Any, int]] = []

    async def step(items: int) -> Any:
        async def outputs() -> Any:
            await gates[items].wait()
            return {"items": items}

        return outputs()

    class Sees(SessionRunHook):
        may_overlap = True

        async def before_run(self, run_context: Any) -> Any:
            return SessionRunArgs("items")

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append((run_values.results, run_context.global_step.value))

    creator = FunctionSessionCreator(step, in_flight=3)
    async with (
        MonitoredSession([feed(3), Sees()], creator) as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(session.run, "items")
        for gate in reversed(gates):
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
            while not session.should_stop():
                results.append(await session.run("items"))

    for task in [simulation.start(train) for _ in range(3)]:
        await task.wait()
    assert len(service.updates) == 20
    assert results == service.updates
    assert not has_flights()


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, True, "2", None])
def test_in_flight_is_a_positive_integer(in_flight: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="in_flight"):
        FunctionSessionCreator(dict, in_flight=in_flight)


def test_a_creator_shows_how_many_steps_it_has_in_flight() -> None:
    async def step() -> Any: ...

    assert repr(FunctionSessionCreator(step, in_flight=2)).endswith("step, in_flight=2)")
    assert SharedSessionCreator(FunctionSessionCreator(step, in_flight=2)).in_flight == 2
    assert FunctionSessionCreator(step).in_flight == 1


async def one_phase() -> dict[str, Any]:
    return {"loss": 0.5}


def sync_phase() -> dict[str, Any]:
    return {"loss": 0.5}


async def counting() -> Any:
    async def outputs() -> Any:
        return {"loss": 0.5, "global_step": 7}

    return outputs()


async def no_mapping() -> Any:
    async def outputs() -> Any:
        return 0.5

    return outputs()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (one_phase, "returns an awaitable of its outputs"),
        (sync_phase, "returns an awaitable of its outputs"),
        (counting, "leave that output out, or in_flight"),
        (no_mapping, "expected a mapping of named outputs"),
    ],
)
async def test_a_step_function_that_does_not_fit_says_so(step: Any, message: str) -> None:
    session = MonitoredSession([], FunctionSessionCreator(step, in_flight=2))
    with pytest.raises(StepFunctionError, match=message):
        async with session:
            await session.run("loss")
    assert_nothing_left(session.global_step)


@simulated
async def test_a_function_of_two_phases_runs_with_one_step_in_flight(
    simulation: Simulation,
) -> None:
    service = Service(simulation)
    async with MonitoredSession([], FunctionSessionCreator(service.step)) as session:
        async for item in session.batches(range(2)):
            assert await session.run("items", {"items": item}) == item
    assert service.updates == [0, 1]


@pytest.mark.anyio
async def test_what_a_session_does_not_do_with_steps_in_flight_is_refused() -> None:
    async def step(items: int = 0) -> Any:
        return one_phase()

    async def step_fn(step_context: Any) -> None: ...

    async with MonitoredSession([], FunctionSessionCreator(step, in_flight=2)) as session:
        with pytest.raises(ValueError, match=r"Have a hook feed each step: FeedHook\("):
            await session.run("loss", {"items": 1})
        with pytest.raises(ValueError, match="leave them out"):
            await session.run("loss", options=object())
        with pytest.raises(RuntimeError, match=r"run_step_fn\(\) in a session with several steps"):
            await session.run_step_fn(step_fn)
        with pytest.raises(RuntimeError, match=r"feed the steps by a hook, FeedHook\("):
            session.batches(range(3))
        async with session.global_step.exclusive():
            with pytest.raises(RuntimeError, match="it would wait for itself"):
                await session.run("loss")
        assert await session.run("loss", {}) == 0.5


@pytest.mark.anyio
async def test_a_step_that_asks_for_exclusive_access_is_refused() -> None:
    async def step() -> Any:
        async def outputs() -> Any:
            async with session.global_step.exclusive():
                return {}

        return outputs()

    session = MonitoredSession([], FunctionSessionCreator(step, in_flight=2))
    with pytest.raises(RuntimeError, match="this task is in a step"):
        async with session:
            await session.run([])
    assert_nothing_left(session.global_step)


class Both(SessionRunHook):
    async def before_run(self, run_context: Any) -> None: ...

    async def after_run(self, run_context: Any, run_values: Any) -> None: ...


class SaysSo(Both):
    may_overlap = True


class OverridesOne(SaysSo):
    async def after_run(self, run_context: Any, run_values: Any) -> None: ...


class ChangedLogging(LoggingTensorHook):
    async def before_run(self, run_context: Any) -> None: ...


class OnlyAfter(SessionRunHook):
    async def after_run(self, run_context: Any, run_values: Any) -> None: ...


class Inherits(SaysSo):
    pass


async def two_phases() -> Any:
    return one_phase()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "hook", [Both(), OverridesOne(), ChangedLogging(["loss"], 1), FeedFnHook(dict)]
)
async def test_a_hook_that_does_not_say_that_it_may_overlap_is_refused(hook: Any) -> None:
    session = MonitoredSession([hook], FunctionSessionCreator(two_phases, in_flight=2))
    with pytest.raises(RuntimeError, match=type(hook).__name__):
        await session.__aenter__()
    async with MonitoredSession([hook], FunctionSessionCreator(two_phases)) as session:
        if not isinstance(hook, ChangedLogging):
            assert await session.run("loss") == 0.5


@pytest.mark.anyio
async def test_hooks_that_may_overlap_are_taken() -> None:
    by_instance = Both()
    by_instance.may_overlap = True
    hooks = [SaysSo(), Inherits(), OnlyAfter(), by_instance]
    async with MonitoredSession(hooks, FunctionSessionCreator(two_phases, in_flight=2)) as session:
        assert await session.run("loss") == 0.5


@pytest.mark.tensorflow
@pytest.mark.anyio
async def test_hooks_of_tensorflow_are_refused() -> None:
    tf = pytest.importorskip("tensorflow")
    hook = tf.compat.v1.train.StopAtStepHook(last_step=3)
    session = MonitoredSession([hook], FunctionSessionCreator(two_phases, in_flight=2))
    with pytest.raises(RuntimeError, match="StopAtStepHook.*knows one run at a time"):
        await session.__aenter__()


@simulated
async def test_a_block_that_is_left_early_completes_what_is_in_flight(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)
    creator = FunctionSessionCreator(logged(service, log), in_flight=2)
    async with MonitoredSession([feed(), Log(log)], creator) as session:
        await session.run("items")
    assert log[-2:] == ["R2", "A2"]
    assert service.updates == [0, 1]
    with pytest.raises(RuntimeError, match="closed"):
        await session.run("items")


@simulated
async def test_a_worker_that_restores_the_model_late_has_prepared_runs_begin_again(
    simulation: Simulation,
) -> None:
    log: list[Any] = []
    service = Service(simulation)

    class Restores(SessionRunHook):
        async def restore_model(self, session: Any) -> int:
            assert session.global_step.statistics().tickets == 0
            log.append(("restored", list(service.updates)))
            service.updates.clear()
            return 0

    async def before(number: int, run_context: Any) -> None:
        if number == 3:
            await simulation.sleep(4 * CYCLE_SECS)

    creator = SharedSessionCreator(FunctionSessionCreator(logged(service, log), in_flight=2))

    async def train() -> None:
        hooks = [feed(), Log(log), Doing(before)]
        async with MonitoredSession(hooks, creator) as session:
            for _ in range(3):
                await session.run("items")

    task = simulation.start(train)
    await simulation.sleep(1.5 * CYCLE_SECS)
    async with MonitoredSession([Restores()], creator) as late:
        await task.wait()
        assert late.global_step.epoch == 1
    start = log.index(("restored", [0, 1]))
    assert log[start + 1 :] == ["B4", "S3", "B5", "S4", "R3", "A3", "R4", "A4"]
    assert service.updates == [2, 3]  # the item of the third run was kept


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

    async def step(items: int) -> Any:
        async def outputs() -> Any:
            await anyio.sleep(0.001)
            return {"items": items}

        return outputs()

    creator = FunctionSessionCreator(step, in_flight=2)
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


@pytest.mark.anyio
async def test_errors_outside_of_exception_pass_through_a_step_in_flight() -> None:
    async def step() -> Any:
        async def outputs() -> Any:
            raise SystemExit(3)

        return outputs()

    session = MonitoredSession([], FunctionSessionCreator(step, in_flight=2))
    with pytest.raises(SystemExit):
        async with session:
            await session.run([])
    assert_nothing_left(session.global_step)


@pytest.mark.anyio
async def test_a_step_that_ignores_its_cancellation_is_left_alone_after_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = anyio.Event()

    async def step() -> Any:
        async def outputs() -> Any:
            with anyio.CancelScope(shield=True):
                await gate.wait()
            return {}

        return outputs()

    creator = FunctionSessionCreator(step, in_flight=2)
    session = MonitoredSession([], creator, stop_grace_period_secs=0.05)
    with pytest.raises(OSError, match="in the block"):
        async with session:
            with anyio.move_on_after(0.01):
                await session.run([])
            raise OSError("in the block")
    assert "did not end when it was cancelled" in caplog.text
    async with session.global_step.exclusive(timeout=0.0):
        pass  # it is not waited for any longer
    gate.set()
    await anyio.wait_all_tasks_blocked()
    assert_nothing_left(session.global_step)


def test_it_runs_on_uvloop() -> None:
    pytest.importorskip("uvloop")
    service_items: list[int] = []

    async def step(items: int) -> Any:
        async def outputs() -> Any:
            await anyio.sleep(0.001)
            service_items.append(items)
            return {"items": items}

        return outputs()

    async def main() -> None:
        creator = FunctionSessionCreator(step, in_flight=2)
        async with MonitoredSession([feed(), StopAtStepHook(last_step=10)], creator) as session:
            while not session.should_stop():
                await session.run("items")
        assert_nothing_left(session.global_step)

    anyio.run(main, backend_options={"use_uvloop": True})
    assert service_items == list(range(10))


@simulated
async def test_a_ticket_that_comes_during_a_save_is_given_back(simulation: Simulation) -> None:
    log: list[Any] = []

    async def after(number: int, run_context: Any) -> None:
        if number == 2:
            run_context.finish_with(save)

    async def save() -> None:
        await simulation.sleep(2 * CYCLE_SECS)
        log.append("saved")

    async def hold() -> None:
        async with session.global_step.exclusive():  # the third run waits for its ticket
            await simulation.sleep(1.5 * CYCLE_SECS)
        log.append("let go")

    hooks = [feed(), Log(log), Doing(after=after)]
    creator = FunctionSessionCreator(logged(Service(simulation), log), in_flight=2)
    async with MonitoredSession(hooks, creator) as session:
        await session.run("items")
        task = simulation.start(hold)
        await simulation.sleep(1.0)
        await session.run("items")
        await session.run("items")
        await task.wait()
    assert log[5:] == [
        "A1", "B3", "R2", "A2", "let go", "saved", "S3", "B4", "S4", "R3", "A3", "R4", "A4",
    ]  # fmt: skip


@simulated
async def test_a_step_that_was_made_is_not_made_again_after_a_preemption_in_after_run(
    simulation: Simulation,
) -> None:
    service = Service(simulation)

    async def after(number: int, run_context: Any) -> None:
        if number == 2:
            raise PreemptionError("after the step")

    creator = FunctionSessionCreator(service.step, in_flight=2)
    hooks = [Doing(after=after), feed(5)]  # the hook that feeds has not seen the end of that run
    session = MonitoredSession(hooks, creator, recovery=AT_ONCE)
    async with session:
        while not session.should_stop():
            await session.run("items")
    assert [each for each in service.updates if each == 1] == [1]
    assert sorted(set(service.updates)) == list(range(5))


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
async def test_an_error_on_what_another_worker_has_replaced_counts_as_its_loss(
    simulation: Simulation,
) -> None:
    errors = {1: PreemptionError("gone"), 3: OSError("what it used is closed")}
    service = Service(simulation, errors=errors)
    service.lose = lambda client=None: None  # type: ignore[method-assign]  # the first step alone
    submitted, results = list[int](), list[int]()

    async def step(items: int) -> Any:
        submitted.append(items)
        return service.submit(items).result()

    creator = SharedSessionCreator(FunctionSessionCreator(step, in_flight=2))
    source = prefetch(range(6), 1)

    async def train() -> None:
        hooks = [FeedHook(source, "items")]
        async with MonitoredSession(hooks, creator, recovery=AT_ONCE) as session:
            while not session.should_stop():
                results.append(await session.run("items"))

    for task in [simulation.start(train) for _ in range(2)]:
        await task.wait()
    assert sorted(results) == sorted(service.updates) == list(range(6))
    # both workers have submitted all that they had in flight again
    assert sorted(submitted) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]
    assert not has_flights()


@pytest.mark.anyio
async def test_a_submission_that_ends_after_a_loss_begins_no_further_run() -> None:
    calls: list[int] = []
    in_submission = anyio.Event()

    async def step(items: int) -> Any:
        calls.append(items)
        number = len(calls)
        if number == 2:
            in_submission.set()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)

        async def outputs() -> Any:
            if number == 1:
                await in_submission.wait()
                raise PreemptionError("gone")
            await anyio.sleep(0.001)
            return {"items": items}

        return outputs()

    class Counts(SessionRunHook):
        num_created = 0

        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.num_created += 1

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            assert self.num_created == 2

    creator = FunctionSessionCreator(step, in_flight=3)
    async with MonitoredSession([feed(4), Counts()], creator, recovery=AT_ONCE) as session:
        assert [await session.run("items") for _ in range(4)] == [0, 1, 2, 3]
    assert calls == [0, 1, 0, 1, 2, 3]
    assert_nothing_left(session.global_step)


@simulated
async def test_a_stop_names_the_hook_that_asked_while_another_run_calls_hooks(
    simulation: Simulation,
) -> None:
    async def before(number: int, run_context: Any) -> None:
        if number == 2:
            await simulation.sleep(2.2 * CYCLE_SECS)  # until after_run of the first is called

    class Stops(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            await simulation.sleep(0.5 * CYCLE_SECS)
            run_context.request_stop("enough")

    creator = FunctionSessionCreator(Service(simulation).step, in_flight=2)
    hooks = [feed(), Doing(before), Stops()]
    async with MonitoredSession(hooks, creator) as session:
        await session.run("items")
        assert session.should_stop()
    assert session.stop_reason is not None
    assert session.stop_reason.who == "after_run of Stops"


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


@simulated
async def test_a_failed_step_gets_its_item_again_though_the_next_waits_for_that_step(
    simulation: Simulation,
) -> None:
    service = Service(simulation, errors={2: OSError("step 2")})

    async def roll(item: int) -> int:
        await simulation.sleep(1.0)
        return item

    async def step(items: Any) -> Any:
        return service.submit([each.item for each in items]).result()

    source = rollouts(roll, range(4), 1, concurrency=1, max_staleness=0)  # waits for each step
    creator = FunctionSessionCreator(step, in_flight=2)
    async with MonitoredSession([FeedHook(source, "items")], creator) as session:
        assert await session.run("items") == [0]
        with pytest.raises(OSError, match="step 2"):
            await session.run("items")
        assert [await session.run("items") for _ in range(3)] == [[1], [2], [3]]
