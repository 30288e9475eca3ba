"""Side tasks are watched: what fails in one is a stop, a restart or a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
    PreemptionError,
    Restart,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, counting_creator, settle

pytestmark = pytest.mark.anyio


class Failing:
    """Raises the errors, one in each call, then waits for its end."""

    def __init__(self, session: Any, *errors: BaseException) -> None:
        self.session = session
        self.errors = list(errors)
        self.num_calls = 0
        self.is_stopped = False

    async def __call__(self) -> None:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        try:
            await self.session.global_step.wait_for(10**9)
        except StopTraining:
            self.is_stopped = True
            raise


async def test_an_error_in_a_side_task_ends_a_foreign_wait_and_leaves_as_itself() -> None:
    error = OSError("the simulator is gone")
    with pytest.raises(OSError, match="the simulator is gone") as caught:
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(Failing(session, error), name="rollouts")
            await session.or_stop(anyio.sleep_forever)
    assert caught.value is error
    assert error.__notes__ == ["in the side task 'rollouts'"]
    assert session.stop_reason is not None
    assert str(session.stop_reason) == f"the side task 'rollouts': {error!r}"
    assert session.stop_reason.error is error


async def test_an_error_in_a_side_task_ends_a_wait_for_a_step() -> None:
    with pytest.raises(ValueError, match="wrong"):
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(Failing(session, ValueError("wrong")))
            await session.global_step.wait_for(5)


@pytest.mark.parametrize("kinds", [("task", "task"), ("coord", "task"), ("task", "coord")])
async def test_the_first_error_leaves_from_wherever_it_comes_and_the_next_is_its_note(
    kinds: tuple[str, str],
) -> None:
    keeps, errors = KeepsCoord(), (ValueError("first"), KeyError("second"))
    with pytest.raises(ValueError, match="first") as caught:
        async with MonitoredSession([keeps], counting_creator()) as session:
            for kind, error in zip(kinds, errors, strict=True):
                if kind == "task":
                    session.start_soon(Failing(session, error), name=str(error))
                    await settle()
                else:
                    keeps.coord.request_stop(error)
    assert caught.value is errors[0]
    of_task, of_coord = f"in the side task {str(errors[1])!r}", "in the coordinator"
    last = of_task if kinds[1] == "task" else of_coord
    assert errors[0].__notes__ == [
        *(["in the side task 'first'"] if kinds[0] == "task" else []),
        f"then, {last}: KeyError('second')",
    ]


async def test_side_tasks_are_stopped_at_a_clean_end_and_have_ended_after_the_block() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        task = Failing(session)
        session.start_soon(task)
        await settle()
    assert task.is_stopped
    assert session.stop_reason is None


async def test_or_stop_in_a_side_task_is_a_stop_also_while_the_session_ends() -> None:
    has_turned, has_ended = anyio.Event(), False

    async def act(session: MonitoredSession) -> None:
        nonlocal has_ended
        try:
            while True:
                await session.or_stop(anyio.lowlevel.checkpoint)
                has_turned.set()
        finally:
            has_ended = True

    async with MonitoredSession([], counting_creator()) as session:
        session.start_soon(act, session)
        await has_turned.wait()
    assert has_ended


async def test_a_side_task_starts_no_other_one_while_the_session_ends() -> None:
    async def act(session: MonitoredSession) -> None:
        with contextlib.suppress(StopTraining):
            await session.global_step.wait_for(10**6)
        with pytest.raises(StopTraining, match="the session ends"):
            session.start_soon(anyio.lowlevel.checkpoint)
        asked.append(True)

    asked: list[bool] = []
    async with MonitoredSession([], counting_creator()) as session:
        session.start_soon(act, session)
        await settle()
    assert asked == [True]


async def test_a_side_task_that_stops_unasked_is_said_and_a_failure_is_logged_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def stop_unasked() -> None:
        raise StopTraining("had enough")

    async def fail() -> None:
        raise OSError("uploader died")

    with pytest.raises(OSError, match="uploader died"):
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(stop_unasked)
            await settle()
            assert "had enough" in caplog.text
            assert "no stop was requested" in caplog.text
            assert not session.should_stop()
            session.start_soon(fail)
            await settle()
            assert "failed, so training stops: OSError('uploader died')" in caplog.text


async def test_waits_of_a_task_group_in_the_block_that_a_stop_ended_are_a_clean_end() -> None:
    log: list[tuple[str, str]] = []
    async with MonitoredSession([RecordingHook("a", log)], counting_creator()) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.global_step.wait_for, 10**6)
            group.start_soon(session.global_step.wait_for, 10**6)
            await settle()
            session.request_stop("enough")
    assert ("a", "end") in log
    assert session.stop_reason is not None
    assert session.stop_reason.why == "enough"


async def test_a_group_with_an_error_beside_the_stop_leaves() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(BaseExceptionGroup) as caught:
        async with MonitoredSession([], counting_creator()) as session:
            async with anyio.create_task_group() as group:
                group.start_soon(session.global_step.wait_for, 10**6)
                group.start_soon(fail)
                session.request_stop("enough")
    assert caught.value.split(ZeroDivisionError)[0] is not None


async def test_a_wait_for_exclusive_access_ends_at_a_stop() -> None:
    is_running, may_end = anyio.Event(), anyio.Event()

    async def step() -> dict[str, float]:
        is_running.set()
        await may_end.wait()
        return {"loss": 0.0}

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    async with MonitoredSession([], creator) as other, MonitoredSession([], creator) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(other.run, "loss")
            await is_running.wait()
            session.start_soon(session.or_stop, settle)
            session.request_stop("enough")
            with pytest.raises(StopTraining, match="under way"):
                async with session.global_step.exclusive():
                    raise AssertionError("a run is under way")
            may_end.set()
        async with session.global_step.exclusive():  # no run is under way: a stop is no obstacle
            assert session.global_step.statistics().is_exclusive


async def test_a_side_task_that_waits_elsewhere_is_cancelled_after_the_grace_period() -> None:
    left = []

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            left.append(True)

    async with MonitoredSession([], counting_creator(), stop_grace_period_secs=0.01) as session:
        session.start_soon(wait)
        await settle()
    assert left == [True]


async def test_a_side_task_of_the_session_outlives_a_lost_raw_session_and_a_hooks_does_not() -> (
    None
):
    log: list[str] = []

    class Starts(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(self.watch, coord)

        async def watch(self, coord: Coordinator) -> None:
            log.append("hook's begins")
            await coord.wait_stopped()
            log.append("hook's ends")

    async def watch() -> None:
        log.append("session's begins")
        try:
            await session.global_step.wait_for(10)
        except StopTraining:
            log.append("session's ends")

    raws = [ScriptedSession([PreemptionError("lost")]), ScriptedSession()]
    async with MonitoredSession([Starts()], ScriptedSessionCreator(raws)) as session:
        await settle()
        session.start_soon(watch)
        await settle()
        await session.run([])
        await settle()
        log.append("body")
    begun = ["hook's begins", "session's begins", "hook's ends", "hook's begins", "body"]
    assert log[:5] == begun
    assert sorted(log[5:]) == ["hook's ends", "session's ends"]


async def test_a_preemption_error_in_a_task_of_the_session_leaves_and_recovers_nothing() -> None:
    raw = ScriptedSession()
    with pytest.raises(PreemptionError, match="of the task"):
        async with MonitoredSession([], ScriptedSessionCreator([raw])) as session:
            session.start_soon(Failing(session, PreemptionError("of the task")))
            await settle()
            assert session.should_stop()
            await session.run([])
            raise AssertionError("it ran")
    assert raw.num_runs == 0


async def test_a_logged_failure_lets_training_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async with MonitoredSession([], counting_creator()) as session:
        session.start_soon(
            Failing(session, ValueError("wrong")), on_failure=OnFailure.LOG, name="uploads"
        )
        await settle()
        assert not session.should_stop()
        assert await session.run("calls") == 1
    assert session.stop_reason is None
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "The side task uploads failed" in record.getMessage()
    assert record.exc_info is not None


async def test_a_restarted_task_is_called_again_with_its_arguments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []
    has_succeeded = anyio.Event()

    async def task(number: int) -> None:
        seen.append(number)
        if len(seen) < 3:
            raise ValueError(f"attempt {len(seen)}")
        has_succeeded.set()

    restart = Restart(max_attempts=2, first_pause_secs=0.0)
    async with MonitoredSession([], counting_creator()) as session:
        session.start_soon(task, 7, on_failure=restart)
        await has_succeeded.wait()
        assert not session.should_stop()
    assert seen == [7, 7, 7]
    assert "restarting it, attempt 2 of 2" in caplog.text


async def test_when_the_restarts_are_used_up_the_last_error_stops_the_session() -> None:
    errors = [ValueError(str(n)) for n in range(4)]
    with pytest.raises(ValueError, match="2") as caught:
        async with MonitoredSession([], counting_creator()) as session:
            task = Failing(session, *errors)
            restart = Restart(max_attempts=2, first_pause_secs=0.0)
            session.start_soon(task, on_failure=restart, name="task")
            await session.or_stop(anyio.sleep_forever)
    assert caught.value is errors[2]
    assert task.num_calls == 3
    assert caught.value.__notes__[-1] == "it was restarted 2 times before"


async def test_a_stop_ends_the_pause_before_a_restart() -> None:
    with anyio.fail_after(5):
        async with MonitoredSession([], counting_creator()) as session:
            task = Failing(session, ValueError("a"), ValueError("b"))
            restart = Restart(first_pause_secs=3600, longest_pause_secs=3600)
            session.start_soon(task, on_failure=restart)
            while task.num_calls < 2:
                await anyio.lowlevel.checkpoint()
            await settle()
    assert task.num_calls == 2


@pytest.mark.parametrize("on_failure", [OnFailure.LOG, Restart()])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_what_is_no_error_stops_whatever_the_policy(
    on_failure: Any, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(Failing(session, error), on_failure=on_failure)
            await session.or_stop(anyio.sleep_forever)
    assert caught.value is error


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_whose_wait_was_cancelled_elsewhere_has_failed_by_that() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await future

    with pytest.raises(asyncio.CancelledError, match="the upload") as caught:
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(wait, name="watcher")
            await settle()
            future.cancel("the upload")
            await session.or_stop(anyio.sleep_forever)
    assert caught.value.__notes__ == ["in the side task 'watcher'"]
    assert session.stop_reason is not None
    assert session.stop_reason.error is caught.value
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0  # the host's task may go on


async def test_tasks_that_have_ended_are_not_kept() -> None:
    async def nothing() -> None:
        await anyio.lowlevel.checkpoint()

    async with MonitoredSession([], counting_creator()) as session:
        for _ in range(100):
            session.start_soon(nothing)
        await settle()
        assert session.status().side_tasks == ()


async def test_a_side_task_may_be_started_in_begin_and_start_another_one() -> None:
    ran = []

    class Starts(SessionRunHook):
        async def begin(self) -> None:
            session.start_soon(self.outer)

        async def outer(self) -> None:
            session.start_soon(self.inner)

        async def inner(self) -> None:
            ran.append(True)

    session = MonitoredSession([Starts()], counting_creator())
    async with session:
        await settle()
    assert ran == [True]


async def test_a_stop_ends_a_side_task_whose_own_tasks_wait() -> None:
    met: list[BaseException] = []

    async def wait_in_two_tasks() -> None:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(session.or_stop, anyio.sleep_forever)
        except BaseException as error:
            met.append(error)
            raise

    hooks = [StopAtStepHook(last_step=2)]
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.start_soon(wait_in_two_tasks)
        while not session.should_stop():
            await session.run("calls")
            await settle()
    assert isinstance(met[0], BaseExceptionGroup)  # of StopTraining alone: no failure
    assert session.stop_reason is not None
    assert session.stop_reason.error is None


async def test_misuse_of_start_soon_says_what_to_do() -> None:
    session = MonitoredSession([], FunctionSessionCreator(dict))
    with pytest.raises(RuntimeError, match=r"start_soon\(\) before the session was opened"):
        session.start_soon(anyio.sleep, 1)
    async with session:
        with pytest.raises(TypeError, match="give an async function"):
            session.start_soon(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"give OnFailure.STOP, OnFailure.LOG or a Restart"):
            session.start_soon(anyio.sleep, 1, on_failure="log")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"start_soon\(\) after the session was closed"):
        session.start_soon(anyio.sleep, 1)
    with pytest.raises(ValueError, match="max_attempts is -1; give an integer"):
        Restart(max_attempts=-1)


async def test_a_plain_function_as_a_side_task_is_an_error_that_says_so() -> None:
    plain: Any = dict
    with pytest.raises(TypeError, match="is no async function: it returned {}"):
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(plain)
            await settle()


async def test_a_side_task_that_fails_after_its_session_is_only_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynchooks._stopping.tasks._CANCEL_SECS", 0.01)
    may_end = anyio.Event()

    async def stubborn() -> None:
        with anyio.CancelScope(shield=True):
            await may_end.wait()
        raise OSError("too late")

    async with MonitoredSession([], counting_creator(), stop_grace_period_secs=0.01) as session:
        session.start_soon(stubborn)
        await settle()
    reason = session.stop_reason
    may_end.set()
    await settle()
    assert "stubborn failed after its session had ended" in caplog.text
    assert session.stop_reason is reason


class CallableCoroutine(Coroutine[Any, Any, None]):
    """Both a coroutine, by its methods, and a function."""

    num_calls = 0

    def send(self, value: Any) -> Any:
        raise StopIteration

    def throw(self, *args: Any) -> Any:
        raise StopIteration

    def close(self) -> None:
        raise AssertionError("it is not ours to close")

    def __await__(self) -> Any:
        yield

    async def __call__(self) -> None:
        self.num_calls += 1


async def test_a_function_that_is_a_coroutine_too_is_called() -> None:
    fn = CallableCoroutine()
    async with MonitoredSession([], counting_creator()) as session:
        session.start_soon(fn)
        await session.or_stop(fn)
    assert fn.num_calls == 2


async def test_a_coroutine_that_has_begun_is_refused_and_left_alone() -> None:
    reached, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def wait() -> None:
        reached.set()
        await go_on.wait()
        ended.set()

    coroutine = wait()

    async def run() -> None:
        await coroutine

    async with MonitoredSession([], counting_creator()) as session, anyio.create_task_group() as g:
        g.start_soon(run)
        await reached.wait()
        with pytest.raises(TypeError, match="fn is the coroutine .*wait.*has been called"):
            session.start_soon(coroutine)  # type: ignore[arg-type]
        go_on.set()
        await ended.wait()
