"""Side tasks are watched: what fails in one is a stop, a restart or a line in the log."""

import logging
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    OnFailure,
    Restart,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession

from ..support.helpers import KeepsCoord, settle, turns
from ..support.moments import at, counting, losing, lost, moments_of, scripted


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


@pytest.mark.parametrize("waits", ["elsewhere", "for a step"])
async def test_an_error_in_a_side_task_ends_the_waits_and_leaves_as_itself(
    waits: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError("the simulator is gone")
    with pytest.raises(OSError, match="the simulator is gone") as caught:
        async with counting() as session:
            session.start_soon(Failing(session, error), name="rollouts")
            if waits == "elsewhere":
                await session.or_stop(anyio.sleep_forever)
            await session.global_step.wait_for(5)
    assert caught.value is error
    assert error.__notes__ == ["in the side task 'rollouts'"]
    assert session.stop_reason is not None
    assert str(session.stop_reason) == f"the side task 'rollouts': {error!r}"
    assert session.stop_reason.error is error
    assert f"failed, so training stops: {error!r}" in caplog.text


@pytest.mark.parametrize("kinds", [("task", "task"), ("coord", "task"), ("task", "coord")])
async def test_the_first_error_leaves_from_wherever_it_comes_and_the_next_is_its_note(
    kinds: tuple[str, str],
) -> None:
    keeps, errors = KeepsCoord(), (ValueError("first"), KeyError("second"))
    with pytest.raises(ValueError, match="first") as caught:
        async with counting(keeps) as session:
            for kind, error in zip(kinds, errors, strict=True):
                if kind == "task":
                    session.start_soon(Failing(session, error), name="failing")
                    await settle()
                else:
                    keeps.coord.request_stop(error)
    assert caught.value is errors[0]
    last = "in the side task 'failing'" if kinds[1] == "task" else "in the coordinator"
    assert errors[0].__notes__[-1] == f"then, {last}: KeyError('second')"


async def test_a_side_task_that_stops_unasked_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with counting() as session:
        session.start_soon(Failing(session, StopTraining("had enough")))
        await settle()
        assert "had enough" in caplog.text
        assert "no stop was requested" in caplog.text
        assert not session.should_stop()


@pytest.mark.parametrize("place", ["the block", "a side task"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
async def test_waits_of_a_task_group_that_a_stop_ended_are_no_failure_but_an_error_beside_them_is(
    place: str, error: Exception | None
) -> None:
    async def wait_in_tasks() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(session.global_step.wait_for, 10**6)
            group.start_soon(session.or_stop, anyio.sleep_forever)
            await settle()
            session.request_stop("enough")
            if error is not None:
                raise error

    hook = RecordingHook("a")
    session = counting(hook)

    async def host() -> None:
        async with session:
            if place == "the block":
                await wait_in_tasks()
            session.start_soon(wait_in_tasks)
            await session.or_stop(anyio.sleep_forever)

    if error is None:
        await host()
        assert session.stop_reason is not None
        assert (session.stop_reason.why, session.stop_reason.error) == ("enough", None)
    else:
        with pytest.raises(BaseExceptionGroup) as caught:
            await host()
        assert caught.value.split(ZeroDivisionError)[0] is not None
    assert ("end" in moments_of(hook)) == (error is None or place == "a side task")


async def test_a_side_task_of_the_session_outlives_a_lost_raw_session_and_a_hooks_does_not() -> (
    None
):
    log: list[str] = []

    async def watch(coord: Coordinator) -> None:
        log.append("hook's begins")
        await coord.wait_stopped()
        log.append("hook's ends")

    hooks = [at(after_create_session=lambda _, coord: coord.start_soon(watch, coord))]
    async with scripted(losing(), *hooks) as session:
        await settle()
        task = Failing(session)
        session.start_soon(task)
        await settle()
        await session.run([])
        await settle()
        assert log == ["hook's begins", "hook's ends", "hook's begins"]
        assert not task.is_stopped
    assert log[3:] == ["hook's ends"]
    assert task.is_stopped


async def test_a_preemption_error_in_a_task_of_the_session_leaves_and_recovers_nothing() -> None:
    raw, error = ScriptedSession(), lost("of the task")
    with pytest.raises(type(error), match="of the task"):
        async with scripted([raw]) as session:
            session.start_soon(Failing(session, error))
            await settle()
            assert session.should_stop()
            await session.run([])
            raise AssertionError("it ran")
    assert raw.num_runs == 0


async def test_a_logged_failure_lets_training_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async with counting() as session:
        task = Failing(session, ValueError("wrong"))
        session.start_soon(task, on_failure=OnFailure.LOG, name="uploads")
        await settle()
        assert not session.should_stop()
        assert await session.run("calls") == 1
    assert session.stop_reason is None
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "The side task uploads failed" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("num_errors", [2, 3])
async def test_a_failed_task_is_restarted_with_its_arguments_until_its_restarts_are_used_up(
    num_errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    errors, seen, has_succeeded = [ValueError(str(n)) for n in range(num_errors)], [], anyio.Event()

    async def task(number: int) -> None:
        seen.append(number)
        if len(seen) <= num_errors:
            raise errors[len(seen) - 1]
        has_succeeded.set()

    async def host() -> None:
        async with counting() as session:
            restart = Restart(max_attempts=2, first_pause_secs=0.0)
            session.start_soon(task, 7, on_failure=restart)
            await session.or_stop(has_succeeded.wait)
            assert not session.should_stop()

    if num_errors == 2:
        await host()
        assert "restarting it, attempt 2 of 2" in caplog.text
    else:
        with pytest.raises(ValueError, match="2") as caught:
            await host()
        assert caught.value is errors[2]
        assert caught.value.__notes__[-1] == "it was restarted 2 times before"
    assert seen == [7, 7, 7]


async def test_a_stop_ends_the_pause_before_a_restart() -> None:
    with anyio.fail_after(5):
        async with counting() as session:
            task = Failing(session, ValueError("a"), ValueError("b"))
            restart = Restart(first_pause_secs=3600, longest_pause_secs=3600)
            session.start_soon(task, on_failure=restart)
            while task.num_calls < 2:
                await turns()
            await settle()
    assert task.num_calls == 2


async def test_a_side_task_may_be_started_in_begin_and_start_another_one() -> None:
    ran: list[bool] = []

    async def inner() -> None:
        ran.append(True)

    async def outer() -> None:
        session.start_soon(inner)

    session = counting(at(begin=lambda: session.start_soon(outer)))
    async with session:
        await settle()
    assert ran == [True]


async def test_a_plain_function_and_another_policy_are_refused() -> None:
    plain: Any = dict
    with pytest.raises(TypeError, match="is no async function: it returned {}"):
        async with counting() as session:
            with pytest.raises(TypeError, match=r"give OnFailure.STOP, OnFailure.LOG or a Restart"):
                session.start_soon(anyio.sleep, 1, on_failure="log")  # type: ignore[arg-type]
            session.start_soon(plain)
            await settle()
