"""Steps in flight: errors, lost sessions and cancellations leave nothing behind."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import prefetch, rollouts
from asynchooks.simulation import Simulation

from ..simulation.engines import simulated
from ..support.helpers import cancelled_when_settled, raises_at, settle
from .service import (
    AT_ONCE,
    CYCLE_SECS,
    Doing,
    Gated,
    Log,
    Restores,
    Service,
    assert_nothing_left,
    feed,
    has_flights,
    logged_session,
    run_to_stop,
)


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
    session = logged_session(service, log, in_flight=3)
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
        await run_to_stop(session, results)
    assert results == service.updates == list(range(6))
    assert_nothing_left(session.global_step)


class Lost:
    """A service whose third request is lost, when the results of the next have come or not.

    Each result takes a second; the loss is seen later, or earlier.
    """

    def __init__(self, simulation: Simulation, late: bool = True) -> None:
        self.simulation, self.late = simulation, late
        self.num_requests = 0
        self.updates: list[int] = []

    async def step(self, items: int) -> Any:
        self.num_requests += 1
        return self.outputs(items, is_lost=self.num_requests == 3)

    async def outputs(self, items: int, *, is_lost: bool) -> Any:
        await self.simulation.sleep((3.0 if self.late else 0.5) if is_lost else 1.0)
        if is_lost:
            raise PreemptionError("gone")
        self.updates.append(items)
        return {"items": items}


class Steps(Doing):
    """Writes down the step in after_run."""

    def __init__(self) -> None:
        super().__init__(after=self._note)
        self.seen: list[int] = []

    async def _note(self, number: int, run_context: Any) -> None:
        self.seen.append(run_context.global_step.value)


@pytest.mark.parametrize("last", [4, 6])
@pytest.mark.parametrize("depth", [2, 3, 4])
@simulated
async def test_results_that_have_come_behind_a_lost_step_are_returned_before_it_is_made(
    simulation: Simulation, depth: int, last: int
) -> None:
    service, steps, results = Lost(simulation), Steps(), list[int]()
    hooks = [feed(), steps, StopAtStepHook(last_step=last)]
    creator = FunctionSessionCreator(service.step, in_flight=depth)
    async with MonitoredSession(hooks, creator, recovery=AT_ONCE) as session:
        await run_to_stop(session, results)
    assert results == service.updates
    assert sorted(results) == list(range(last))
    assert results.index(2) > results.index(3)
    assert steps.seen == list(range(1, last + 1))
    assert_nothing_left(session.global_step)


@pytest.mark.parametrize("late", [False, True])
@simulated
async def test_a_restored_model_goes_back_behind_the_results_that_have_come(
    simulation: Simulation, late: bool
) -> None:
    service, steps, results = Lost(simulation, late), Steps(), list[int]()

    hooks = [feed(), Restores(service.updates), steps, StopAtStepHook(last_step=4)]
    creator = FunctionSessionCreator(service.step, in_flight=2)
    async with MonitoredSession(hooks, creator, recovery=AT_ONCE) as session:
        await run_to_stop(session, results)
    assert results == ([0, 1, 3, 2, 4, 5, 6] if late else [0, 1, 2, 3, 4, 5])
    assert service.updates == results[-4:]
    assert steps.seen == ([1, 2, 3, 1, 2, 3, 4] if late else [1, 2, 1, 2, 3, 4])
    assert_nothing_left(session.global_step)


@simulated
async def test_nothing_is_submitted_or_saved_between_a_loss_and_the_recovery(
    simulation: Simulation,
) -> None:
    service, log = Lost(simulation), list[Any]()

    class Saves(SessionRunHook):
        num_sessions = 0

        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.num_sessions += 1
            log.append(("session", self.num_sessions, service.num_requests))

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            step = run_context.global_step.value

            async def save() -> None:
                log.append(("saved", session.global_step.value, self.num_sessions))

            if step in (3, 5):
                log.append(("step", step, service.num_requests))
                run_context.finish_with(save)

    creator = FunctionSessionCreator(service.step, in_flight=2)
    hooks = [feed(), Saves(), StopAtStepHook(last_step=6)]
    async with MonitoredSession(hooks, creator, recovery=AT_ONCE) as session:
        while not session.should_stop():
            await session.run("items")
    assert log == [
        ("session", 1, 0), ("step", 3, 4), ("session", 2, 4), ("step", 5, 6), ("saved", 5, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["break", "request_stop"])
@simulated
async def test_a_loss_that_no_run_has_recovered_from_leaves_the_block(
    simulation: Simulation, how: str
) -> None:
    service, steps = Lost(simulation), Steps()
    creator = FunctionSessionCreator(service.step, in_flight=2)
    session = MonitoredSession([feed(), steps], creator, recovery=AT_ONCE)
    with pytest.raises(PreemptionError, match="gone"):
        async with session:
            while not session.should_stop():
                if await session.run("items") == 3:
                    assert not session.should_stop()
                    if how == "break":
                        break
                    session.request_stop()
    assert steps.seen == [1, 2, 3]
    assert_nothing_left(session.global_step)


@simulated
async def test_a_loss_is_no_error_where_another_worker_has_made_the_last_step(
    simulation: Simulation,
) -> None:
    service, steps, results = Lost(simulation), Steps(), list[int]()
    items = prefetch(range(100), 1)
    creator = SharedSessionCreator(FunctionSessionCreator(service.step, in_flight=2))
    last = StopAtStepHook(last_step=5)
    hooks = [FeedHook(items, "items"), steps, last]
    async with MonitoredSession(hooks, creator, recovery=AT_ONCE) as session:
        while not session.should_stop():
            results.append(await session.run("items"))
            if results[-1] == 3:
                async with MonitoredSession([FeedHook(items, "items"), last], creator) as other:
                    while not other.should_stop():
                        await other.run("items")
                assert session.global_step.value == 5
    assert results == [0, 1, 3]
    assert steps.seen == [1, 2, 3]
    assert len(service.updates) == 5
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
        await run_to_stop(session, results)
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
    service, results = Gated(4), list[int]()
    creator = FunctionSessionCreator(service.step, in_flight=2)
    async with MonitoredSession([feed(4)], creator) as session:
        assert await cancelled_when_settled(session.run, "items")
        assert session.global_step.statistics().tickets == 2
        for gate in service.gates:
            gate.set()
        await run_to_stop(session, results)
    assert results == [0, 1, 2, 3]
    assert_nothing_left(session.global_step)


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
            assert await cancelled_when_settled(session.run, [])
            raise OSError("in the block")
    assert "did not end when it was cancelled" in caplog.text
    async with session.global_step.exclusive(timeout=0.0):
        pass  # it is not waited for any longer
    gate.set()
    await anyio.wait_all_tasks_blocked()
    assert_nothing_left(session.global_step)


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

    async with logged_session(Service(simulation), log, Doing(after=after)) as session:
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
            await run_to_stop(session, results)

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
                await settle()  # the loss is seen, and waits for this submission

        async def outputs() -> Any:
            if number == 1:
                await in_submission.wait()
                raise PreemptionError("gone")
            await anyio.lowlevel.checkpoint()
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
