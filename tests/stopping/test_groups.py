"""Errors that a task group has wrapped count as what they count as alone: a step may fan out."""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import pytest

from asynchooks import (
    MonitoredSession,
    PreemptionError,
    Recovery,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import settle, turns
from ..support.moments import NOW, at, counting, train


class TakenError(PreemptionError):
    """A library's own error of this kind."""


def lost() -> Exception:
    return ExceptionGroup("parts", [PreemptionError(f"machine {each} went") for each in range(2)])


def nested() -> Exception:
    return ExceptionGroup("all", [lost(), TakenError("machine 9 went")])


async def fan_out(*parts: Callable[[], Coroutine[Any, Any, object]]) -> None:
    async with anyio.create_task_group() as group:
        for part in parts:
            group.start_soon(part)


async def lose(make: Callable[[], Exception] = lost) -> None:
    async def fail() -> None:
        await turns()
        raise make()

    await fan_out(anyio.sleep_forever, fail)


def acting(place: str, act: Callable[..., Any], *hooks: Any) -> MonitoredSession:
    """A session that acts in its step, or at a moment of its first hook."""
    first = [] if place == "step" else [at(**{place: act})]
    return MonitoredSession([*first, *hooks], act if place == "step" else dict, recovery=NOW)


@pytest.mark.parametrize("make", [lost, nested], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("place", "num_calls"),
    [("step", 4), ("after_create_session", 2), ("before_run", 4), ("after_run", 3), ("coord", 2)],
)
async def test_where_all_tasks_were_preempted_the_session_is_recovered(
    place: str, num_calls: int, make: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    num, is_in_task = 0, place == "coord"

    async def act(*given: Any) -> Any:
        nonlocal num
        num += 1
        if num == 1 and is_in_task:
            given[1].start_soon(lose, make)
            await settle()
        elif num == 1:
            await lose(make)
        return {} if place == "step" else None

    moment = "after_create_session" if is_in_task else place
    async with acting(moment, act, StopAtStepHook(last_step=3)) as session:
        await train(session)
    # a run whose after_run fails has made its step
    assert (session.global_step.value, num) == (3, num_calls)
    if is_in_task:
        return
    [said] = [each for each in caplog.messages if "was lost" in each]
    also = "; TakenError: machine 9 went" if make is nested else ""
    words = "PreemptionError: machine 0 went; PreemptionError: machine 1 went"
    assert f"The session was lost ({words}{also}); recreating it, attempt 1 of 20" in said


async def test_a_group_with_another_error_and_the_last_of_all_attempts_leave_as_they_are() -> None:
    mixed = ExceptionGroup("all", [lost(), ZeroDivisionError("a bug")])
    for errors in ([mixed], [lost(), nested(), lost()]):
        creator = ScriptedSessionCreator([ScriptedSession([error]) for error in errors])
        recovery = Recovery(2, first_pause_secs=0, longest_pause_secs=0)
        with pytest.raises(ExceptionGroup) as caught:
            async with MonitoredSession([], creator, recovery=recovery) as session:
                await session.run([])
        assert caught.value is errors[-1]
    assert caught.value.__notes__ == ["recreating the session was given up after 2 attempts"]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_step_whose_waits_a_stop_has_ended_raises_one_stop_also_beside_a_preemption(
    is_lost: bool,
) -> None:
    async def wait() -> None:
        try:
            await session.or_stop(anyio.sleep_forever)
        finally:
            if is_lost:
                raise PreemptionError("the connection was closed")

    async def stop() -> None:
        await settle()
        session.request_stop("enough")

    async def step() -> dict[str, int]:
        await fan_out(wait, lambda: session.global_step.wait_for(10**6), stop)
        return {}

    hook = RecordingHook("a")
    session = MonitoredSession([hook], step)
    async with session:
        with pytest.raises(StopTraining) as caught:
            await session.run([])
        if not is_lost:
            assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert hook.log[-1] == ("a", "end")
    assert str(session.stop_reason) == "session.request_stop: enough"


def reader(*, is_plain: bool, num: int) -> Callable[[], Coroutine[Any, Any, object]]:
    """Reads an iterator with so many items; a plain one raises StopIteration in its coroutine."""
    items: Iterator[int] = iter(range(num))

    async def read_plain() -> int:
        return next(items)

    async def read() -> int:
        for item in items:
            return item
        raise StopAsyncIteration

    return read_plain if is_plain else read


@pytest.mark.parametrize("is_plain", [True, False], ids=["next", "__anext__"])
@pytest.mark.parametrize("place", ["step", "before_run", "after_run"])
async def test_the_end_of_input_in_tasks_ends_training_where_an_input_is_read(
    place: str, is_plain: bool
) -> None:
    read, hook = reader(is_plain=is_plain, num=4), RecordingHook("a")

    async def act(*given: Any) -> Any:
        await fan_out(read, read)
        return {} if place == "step" else None

    session = acting(place, act, hook)
    if place == "after_run":
        with pytest.raises(RuntimeError, match="after_run of At raised .*no input is read there"):
            async with session:
                await train(session)
        return
    async with session:
        for _ in range(2):
            await session.run([])
        with pytest.raises(StopTraining, match=f"the input ended in (the )?{place}"):
            await session.run([])
    assert session.global_step.value == 2
    assert hook.log[-1] == ("a", "end")


async def test_the_end_of_iterators_in_tasks_of_the_block_is_a_clean_end_of_a_side_task_a_bug() -> (
    None
):
    read, hook = reader(is_plain=False, num=2), RecordingHook("a")
    async with counting(hook):
        while True:
            await fan_out(read, read)
    assert hook.log[-1] == ("a", "end")
    with pytest.raises(RuntimeError, match="no input is read there"):
        async with counting():
            async with counting() as session:
                session.start_soon(fan_out, read, read)
                await settle()
