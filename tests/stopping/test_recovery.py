"""Recovery: which errors recreate the raw session, in which order, and within which bounds."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    Restart,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._errors import leave_as_itself
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, counting_creator, raises_at, settle

pytestmark = pytest.mark.anyio

LOST = PreemptionError("the machine went away")
AT_ONCE = Recovery(first_pause_secs=0, longest_pause_secs=0)


async def test_a_lost_session_is_recreated_and_the_run_repeated_hooks_included() -> None:
    raws = [ScriptedSession([LOST]), ScriptedSession()]
    hook, coords = RecordingHook("a"), KeepsCoord()
    async with MonitoredSession([hook, coords], ScriptedSessionCreator(raws)) as session:
        assert await session.run([]) == []
        assert session.raw_session() is raws[1]
        assert session.global_step.epoch == 1
    assert [moment for _, moment in hook.log] == [
        "begin", "after_create_session", "before_run", "after_create_session", "before_run",
        "after_run", "end",
    ]  # fmt: skip
    assert raws[0].is_closed
    assert coords.coords[0] is not coords.coords[1]
    assert coords.coords[0].joined


async def test_preemption_while_creating_is_retried_with_a_new_coordinator_each_time() -> None:
    class FailsTwice(KeepsCoord):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            await super().after_create_session(session, coord)
            if len(self.coords) < 3:
                raise LOST

    hook = FailsTwice()
    raws: list[Any] = [LOST, ScriptedSession(), ScriptedSession(), ScriptedSession()]
    async with MonitoredSession([hook], ScriptedSessionCreator(raws), recovery=AT_ONCE) as session:
        assert session.raw_session() is raws[3]
    assert len(set(map(id, hook.coords))) == 3


async def test_a_preemption_from_begin_leaves() -> None:
    with pytest.raises(PreemptionError, match="the machine went away"):
        async with MonitoredSession([raises_at("begin", LOST)], counting_creator()):
            raise AssertionError("not reached")


async def test_another_error_while_recreating_leaves_and_the_next_run_tries_again() -> None:
    raws: list[Any] = [ScriptedSession([LOST]), ValueError("cannot create"), ScriptedSession()]
    async with MonitoredSession([], ScriptedSessionCreator(raws)) as session:
        with pytest.raises(ValueError, match="cannot create"):
            await session.run([])
        assert session.should_stop()
        assert await session.run([]) == []
        assert not session.should_stop()


async def test_a_stop_that_a_hook_asked_for_is_forgotten_when_the_session_is_lost() -> None:
    class StopsThenFails(SessionRunHook):
        def __init__(self) -> None:
            self.runs = 0

        async def before_run(self, run_context: SessionRunContext) -> None:
            self.runs += 1
            if self.runs == 1:
                run_context.request_stop()

    raws = [ScriptedSession([LOST]), ScriptedSession()]
    async with MonitoredSession([StopsThenFails()], ScriptedSessionCreator(raws)) as session:
        await session.run([])
        assert not session.should_stop()


async def test_a_stop_of_a_hook_is_forgotten_with_a_preemption_found_before_the_next_run() -> None:
    coords = KeepsCoord()

    class StopsOnce(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            if len(coords.coords) == 1:
                run_context.request_stop()

    raws = [ScriptedSession(), ScriptedSession()]
    async with MonitoredSession([coords, StopsOnce()], ScriptedSessionCreator(raws)) as session:
        await session.run([])
        assert session.should_stop()
        coords.coord.request_stop(LOST)
        assert not session.should_stop()
        await session.run([])
        assert not session.should_stop()
        assert session.stop_reason is None


async def test_recovering_ends_no_wait_of_the_session() -> None:
    raws = [ScriptedSession([LOST]), ScriptedSession()]
    reached = []
    async with MonitoredSession([], ScriptedSessionCreator(raws)) as session:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                reached.append(await session.global_step.wait_for(1))

            group.start_soon(wait)
            await settle()
            await session.run([])
    assert reached == [1]


class ReportsInRun(KeepsCoord):
    """Reports an error to the first coordinator in a run, which goes on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def before_run(self, run_context: SessionRunContext) -> None:
        if len(self.coords) == 1:
            self.coord.request_stop(self.error)


async def test_a_run_error_while_the_coordinator_holds_a_preemption_recovers() -> None:
    hook = ReportsInRun(LOST)
    raws = [ScriptedSession([ValueError("a consequence")]), ScriptedSession()]
    async with MonitoredSession([hook], ScriptedSessionCreator(raws)) as session:
        assert await session.run([]) == []
        assert not session.should_stop()
    assert len(hook.coords) == 2


async def test_a_preemption_held_by_the_coordinator_recovers_at_the_next_run() -> None:
    hook = KeepsCoord()
    raws = [ScriptedSession(), ScriptedSession()]
    async with MonitoredSession([hook], ScriptedSessionCreator(raws)) as session:
        hook.coords[0].request_stop(LOST)
        assert not session.should_stop()
        await session.run([])
        assert session.raw_session() is raws[1]
        assert raws[1].global_step.value == session.global_step.value == 1
        assert not session.should_stop()


async def test_a_preemption_error_given_to_request_stop_recreates_nothing() -> None:
    error = PreemptionError("of the caller")

    class Stops(ScriptedSession):
        def run(self, *args: Any, **options: Any) -> Any:
            session.request_stop(error)
            raise ValueError("in the step")

    raws = [Stops(), ScriptedSession()]
    session = MonitoredSession([], ScriptedSessionCreator(raws), recovery=AT_ONCE)
    with pytest.raises(PreemptionError, match="of the caller") as caught:
        async with session:
            await session.run([])
    assert isinstance(caught.value.__context__, ValueError)
    assert [raw.is_closed for raw in raws] == [True, False], "the second was never made"


async def test_a_preemption_while_the_coordinator_holds_another_error_is_replaced_by_it() -> None:
    error = ValueError("the cause")
    raw = ScriptedSession([LOST])
    session = MonitoredSession([ReportsInRun(error)], ScriptedSessionCreator([raw]))
    with pytest.raises(ValueError, match="the cause") as caught:
        async with session:
            with pytest.raises(ValueError, match="the cause") as of_run:
                await session.run([])
    assert of_run.value is caught.value is error
    assert raw.num_runs == 1


async def test_any_other_run_error_stands_whatever_the_coordinator_holds() -> None:
    hook = ReportsInRun(ValueError("held"))
    raw = ScriptedSession([KeyError("of the run")])
    with pytest.raises(ValueError, match="held"):
        async with MonitoredSession([hook], ScriptedSessionCreator([raw])) as session:
            with pytest.raises(KeyError, match="of the run") as of_run:
                await session.run([])
            assert session.should_stop()
            with pytest.raises(StopTraining, match="no run begins after a stop") as refusal:
                await session.run([])
    assert (of_run.type, refusal.type, raw.num_runs) == (KeyError, StopTraining, 1)


async def test_a_preemption_held_at_the_end_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, recording = KeepsCoord(), RecordingHook("a")
    with caplog.at_level(logging.ERROR, "asynchooks"):
        async with MonitoredSession([hook, recording], counting_creator()):
            hook.coords[0].request_stop(LOST)
    assert "the machine went away" in caplog.text
    assert recording.log[-1] == ("a", "end")


async def test_errors_from_closing_the_raw_session_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailsToClose(ScriptedSession):
        def close(self) -> None:
            raise ValueError("cannot close")

    async with MonitoredSession([], ScriptedSessionCreator([FailsToClose()])):
        pass
    assert "cannot close" in caplog.text


async def test_step_fn_is_called_again_with_the_new_raw_session() -> None:
    raws = [ScriptedSession([{}, LOST]), ScriptedSession()]
    seen = []

    async def step_fn(step_context: StepContext) -> str:
        seen.append(step_context.session)
        await step_context.run_with_hooks([])
        await step_context.run_with_hooks([])
        return "done"

    async with MonitoredSession([], ScriptedSessionCreator(raws)) as session:
        assert await session.run_step_fn(step_fn) == "done"
    assert seen == raws


async def test_a_shared_session_is_recreated_once_for_all_workers() -> None:
    script: list[Any] = [{}] * 6 + [LOST]
    raws = [ScriptedSession(script), ScriptedSession()]
    creator = SharedSessionCreator(ScriptedSessionCreator(raws))
    coords = KeepsCoord()

    async def worker() -> None:
        async with MonitoredSession([coords, StopAtStepHook(last_step=20)], creator) as session:
            while not session.should_stop():
                await session.run([])
                await anyio.lowlevel.checkpoint()
            assert session.global_step.value == 20
            assert session.global_step.epoch == 1

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(worker)
    assert raws[0].is_closed
    assert raws[1].is_closed
    assert raws[1].read_step() == 20


async def test_a_worker_on_its_way_to_a_run_does_not_run_on_a_session_given_up_meanwhile() -> None:
    may_go = anyio.Event()
    raws = [ScriptedSession([LOST]), ScriptedSession()]
    creator = SharedSessionCreator(ScriptedSessionCreator(raws))

    class Waits(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            await may_go.wait()

    async def late() -> None:
        async with MonitoredSession([Waits()], creator) as session:
            await session.run([])
            assert session.raw_session() is raws[1]

    async with MonitoredSession([], creator) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(late)
            await settle()
            await session.run([])
            may_go.set()
    assert [raw.num_runs for raw in raws] == [1, 2]


async def test_a_function_session_keeps_its_step_when_recreated() -> None:
    calls = 0

    def step() -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise LOST
        return {"calls": calls}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        assert [await session.run("calls") for _ in range(3)] == [1, 2, 4]
        assert (session.global_step.value, session.global_step.epoch) == (3, 0)


def test_pauses_double_up_to_the_longest() -> None:
    recovery = Recovery(first_pause_secs=0.5, longest_pause_secs=3)
    assert [recovery.pause_before(n) for n in range(1, 7)] == [0, 0.5, 1, 2, 3, 3]
    assert recovery.pause_before(10_000) == 3


PAUSES = "give 0 <= first_pause_secs <= longest_pause_secs"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"max_attempts": -1}, "max_attempts is -1; give an integer >= 0"),
        ({"first_pause_secs": -1}, f"first_pause_secs is -1; {PAUSES}"),
        ({"longest_pause_secs": 0.01}, f"first_pause_secs is 0.1; {PAUSES}"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Recovery(**bad)


@pytest.mark.parametrize("kind", [Recovery, Restart])
def test_a_number_of_attempts_is_whole(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"max_attempts is 2\.5; give an integer"):
        kind(max_attempts=2.5)


async def test_a_subclass_s_run_surrounds_all_attempts_and_no_nested_run() -> None:
    calls: list[Any] = []

    class Logged(MonitoredSession):
        async def run(
            self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
        ) -> Any:
            calls.append(fetches)
            return await super().run(fetches, feed_dict, options, run_metadata)

    lost, good = ScriptedSession([PreemptionError("lost")]), ScriptedSession([{"x": 1}, {"x": 2}])

    async def step_fn(step_context: StepContext) -> Any:
        return await step_context.run_with_hooks("x")

    async with Logged([RecordingHook("a")], ScriptedSessionCreator([lost, good])) as session:
        assert await session.run("x") == 1
        assert await session.run_step_fn(step_fn) == 2
    assert calls == ["x"]


async def test_hooks_of_a_retry_see_no_error_that_is_being_handled() -> None:
    seen: list[Any] = []

    class Looks(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            seen.append(sys.exception())

    lost, good = ScriptedSession([PreemptionError("lost")]), ScriptedSession([{"x": 1}])
    async with MonitoredSession([Looks()], ScriptedSessionCreator([lost, good])) as session:
        assert await session.run("x") == 1
    assert seen == [None, None]


@pytest.mark.parametrize("is_marked", [True, False])
async def test_an_error_that_happened_elsewhere_is_not_taken_for_the_loss_of_the_session(
    is_marked: bool,
) -> None:
    """Such as that of a write in the background, raised in a run whose session was replaced."""
    error = OSError("the disk is full")

    class Raises(SessionRunHook):
        num_calls = 0

        async def before_run(self, run_context: SessionRunContext) -> None:
            self.num_calls += 1
            if self.num_calls == 1:
                run_context.session.retire()  # as another worker does that shares it
                raise leave_as_itself(error) if is_marked else error

    async with MonitoredSession([Raises()], counting_creator(), recovery=Recovery()) as session:
        if is_marked:
            with pytest.raises(OSError, match="the disk is full") as caught:
                await session.run([])
            assert caught.value is error
        await session.run([])
        assert session.global_step.value == 1


class Model:
    """Counts its steps; one that is asked to wait does so before or after it has counted."""

    def __init__(self, *, moves_first: bool) -> None:
        self.num_steps = 0
        self.may_go_on = anyio.Event()
        self.is_under_way = anyio.Event()
        self._thread_may_go_on = threading.Event()
        self._moves_first = moves_first
        self._token = anyio.lowlevel.current_token()

    async def step_async(self, waits: bool = False) -> dict[str, Any]:
        self.num_steps += self._moves_first
        if waits:
            self.is_under_way.set()
            await self.may_go_on.wait()
        self.num_steps += not self._moves_first
        return {"loss": 0.5}

    def step(self, waits: bool = False) -> dict[str, Any]:
        self.num_steps += self._moves_first
        if waits:
            anyio.from_thread.run_sync(self.is_under_way.set, token=self._token)
            assert self._thread_may_go_on.wait(5.0)
        self.num_steps += not self._moves_first
        return {"loss": 0.5}

    def go_on(self) -> None:
        self.may_go_on.set()
        self._thread_may_go_on.set()


@pytest.fixture(params=["async", "in a thread"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def creator_of(model: Model, how: str) -> SharedSessionCreator:
    if how == "async":
        return SharedSessionCreator(FunctionSessionCreator(model.step_async))
    return SharedSessionCreator(FunctionSessionCreator(model.step, thread_safe=True))


@pytest.mark.parametrize("moves_first", [True, False])
async def test_a_step_that_outlives_its_raw_session_counts(how: str, moves_first: bool) -> None:
    model, preempts = Model(moves_first=moves_first), KeepsCoord()
    creator = creator_of(model, how)
    waits = MonitoredSession([], creator, step_runner="thread")
    loses = MonitoredSession([preempts], creator, step_runner="thread")
    with anyio.fail_after(20.0):
        async with waits, loses, anyio.create_task_group() as group:
            group.start_soon(waits.run, "loss", {"waits": True})
            await model.is_under_way.wait()
            lost = preempts.coord
            lost.request_stop(PreemptionError("lost"))
            await loses.run("loss")
            assert preempts.coord is not lost, "the raw session was replaced"
            model.go_on()
            await waits.global_step.wait_for(2, timeout=10.0)
    assert model.num_steps == 2


async def test_a_step_that_outlives_its_raw_session_is_one_of_those_below_the_limit(
    how: str,
) -> None:
    model, preempts = Model(moves_first=False), KeepsCoord()
    creator = creator_of(model, how)
    waits = MonitoredSession([StopAtStepHook(last_step=2)], creator, step_runner="thread")
    loses = MonitoredSession([preempts], creator, step_runner="thread")

    async def train() -> None:
        async with loses:
            while not loses.should_stop():
                await loses.run("loss")

    with anyio.fail_after(20.0):
        async with anyio.create_task_group() as group, waits:
            await waits.run("loss")
            group.start_soon(waits.run, "loss", {"waits": True})
            await model.is_under_way.wait()
            group.start_soon(train)
            await settle()
            preempts.coord.request_stop(PreemptionError("lost"))
            await settle()
            model.go_on()
            await waits.global_step.wait_for(2)
    assert model.num_steps == waits.global_step.value == 2


async def test_exclusive_waits_for_a_step_that_outlives_its_raw_session(how: str) -> None:
    model, preempts = Model(moves_first=True), KeepsCoord()
    creator = creator_of(model, how)
    waits = MonitoredSession([], creator, step_runner="thread")
    loses = MonitoredSession([preempts], creator, step_runner="thread")
    with anyio.fail_after(20.0):
        async with waits, loses, anyio.create_task_group() as group:
            group.start_soon(waits.run, "loss", {"waits": True})
            await model.is_under_way.wait()
            preempts.coord.request_stop(PreemptionError("lost"))
            await loses.run("loss")
            with pytest.raises(TimeoutError):
                async with loses.global_step.exclusive(timeout=0.0):
                    pass
            model.go_on()
            async with loses.global_step.exclusive():
                assert loses.global_step.value == 2


async def test_a_side_tasks_error_leaves_after_the_ends_of_hooks_of_a_lost_session() -> None:
    async def fail() -> None:
        raise ValueError("the side task")

    async def lost_after_the_failure() -> Any:
        while not session.should_stop():
            await anyio.lowlevel.checkpoint()
        raise LOST

    hook = RecordingHook("a")
    with pytest.raises(ValueError, match="the side task"):
        async with MonitoredSession(
            [hook], FunctionSessionCreator(lost_after_the_failure), recovery=AT_ONCE
        ) as session:
            session.start_soon(fail)
            with pytest.raises(StopTraining):
                await session.run([])
    assert [moment for _, moment in hook.log][-2:] == ["end", "on_error"]


async def test_a_side_tasks_error_costs_no_end_where_another_worker_loses_the_session() -> None:
    is_lost = False

    async def fail() -> None:
        raise ValueError("the side task")

    def step() -> dict[str, float]:
        nonlocal is_lost
        if is_lost:
            is_lost = False
            raise LOST
        return {"loss": 0.0}

    async def other() -> None:
        nonlocal is_lost
        async with MonitoredSession([], creator, recovery=AT_ONCE) as session:
            has_opened.set()
            await has_failed.wait()
            is_lost = True
            await session.run([])
            is_recovered.set()
            await has_ended.wait()

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    has_opened, has_failed, is_recovered, has_ended = (anyio.Event() for _ in range(4))
    hook = RecordingHook("a")
    async with anyio.create_task_group() as group:
        group.start_soon(other)
        await has_opened.wait()
        with pytest.raises(ValueError, match="the side task"):
            async with MonitoredSession([hook], creator, recovery=AT_ONCE) as session:
                await session.run([])
                session.start_soon(fail)
                while not session.should_stop():
                    await anyio.lowlevel.checkpoint()
                has_failed.set()
                await is_recovered.wait()
        has_ended.set()
    assert [moment for _, moment in hook.log][-2:] == ["end", "on_error"]


async def test_a_stop_by_a_hook_refuses_runs_in_a_step_fn_also_after_a_preemption() -> None:
    class Stops(KeepsCoord):
        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            run_context.request_stop("enough")

    async def two_runs(step_context: StepContext) -> None:
        await step_context.run_with_hooks([])
        hook.coord.request_stop(LOST)
        with pytest.raises(StopTraining):
            await step_context.run_with_hooks([])

    hook = Stops()
    async with MonitoredSession([hook], counting_creator(), recovery=AT_ONCE) as session:
        await session.run_step_fn(two_runs)
        assert session.global_step.value == 1
