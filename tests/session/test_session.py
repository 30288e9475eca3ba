"""MonitoredSession: the order of moments, clean and failed ends, stops."""

import inspect

import anyio
import pytest

from asynchooks import (
    MonitoredSession,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, cancelled_when_settled, in_task, raises_at, settle, turns
from ..support.moments import at, counting, moments_of, scripted

MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]
ENDS = pytest.mark.parametrize("error", [StopTraining, StopIteration, StopAsyncIteration])


class Special(StopTraining):
    """A user's own subclass of what ends training: an error."""


async def test_moments_come_in_the_order_of_the_hooks_and_the_raw_session_closes_last() -> None:
    log: list[tuple[str, str]] = []
    raw, is_closed = ScriptedSession(), list[bool]()
    twice = RecordingHook("b", log)
    last = at(end=lambda _: is_closed.append(raw.is_closed))
    hooks = [RecordingHook("a", log), twice, twice, last]
    session = MonitoredSession(iter(hooks), ScriptedSessionCreator([raw]))
    assert log == []
    async with session:
        assert not session.should_stop()
        await session.run([])
        assert session.raw_session() is raw
    assert log == [(name, moment) for moment in MOMENTS for name in "abb"]
    assert (is_closed, raw.is_closed) == ([False], True)
    assert session.raw_session() is session.graph is None
    assert session.should_stop()


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(), Special()])
async def test_an_error_in_the_block_leaves_without_end_and_with_on_error_in_reverse(
    error: BaseException,
) -> None:
    log: list[tuple[str, str]] = []
    hooks, raw = [RecordingHook("a", log), RecordingHook("b", log)], ScriptedSession()
    with pytest.raises(type(error)) as caught:
        async with scripted([raw], *hooks) as session:
            log.clear()
            raise error
    assert caught.value is hooks[0].errors[0] is error
    assert log == [("b", "on_error"), ("a", "on_error")]
    assert raw.is_closed
    assert session.should_stop()


@ENDS
async def test_what_only_ends_training_is_swallowed_and_end_is_called(
    error: type[Exception],
) -> None:
    hook = RecordingHook("a")
    async with counting(hook) as session:
        raise error
    assert hook.log[-1] == ("a", "end")
    assert str(session.stop_reason).startswith("the block: ")


async def test_end_of_later_hooks_runs_when_an_earlier_end_fails() -> None:
    hook, raw = RecordingHook("a"), ScriptedSession()
    hooks = [raises_at("end", ValueError("in end")), hook]
    with pytest.raises(ValueError, match="in end") as caught:
        async with scripted([raw], *hooks):
            pass
    assert "end" in moments_of(hook)
    assert raw.is_closed
    assert "in end of Raises" in caught.value.__notes__


async def test_close_in_the_block_ends_once() -> None:
    hook = RecordingHook("a")
    async with counting(hook) as session:
        await session.close()
        assert session.should_stop()
        for call in (session.close, lambda: session.run("calls")):
            with pytest.raises(RuntimeError, match="Session is already closed"):
                await call()
    assert moments_of(hook).count("end") == 1


@ENDS
@pytest.mark.parametrize(
    "moment", ["begin", "restore_model", "after_create_session", "after_run", "end"]
)
async def test_the_end_of_an_input_where_none_is_read_is_that_hook_s_bug(
    moment: str, error: type[Exception]
) -> None:
    with pytest.raises(RuntimeError, match=f"{moment} of Raises,? raised .*no input is read there"):
        async with counting(raises_at(moment, error)) as session:
            await session.run("calls")
            session.request_stop()  # which excuses no StopTraining


async def test_or_stop_returns_raises_ends_with_the_stop_and_passes_a_cancellation_on() -> None:
    ended: list[bool] = []

    async def value() -> int:
        await turns()
        return 7

    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async with counting() as session:
        assert await session.or_stop(value) == 7
        with pytest.raises(ValueError, match="foreign"):
            await session.or_stop(raise_error, ValueError("foreign"))
        assert await cancelled_when_settled(session.or_stop, forever)
        async with (
            in_task(session.or_stop, forever) as waiting,
            in_task(session.global_step.wait_for, 100) as waiting_for_step,
        ):
            await anyio.to_thread.run_sync(session.request_stop, "enough")
        assert isinstance(waiting.error, StopTraining)
        assert isinstance(waiting_for_step.error, StopTraining)
        assert ended == [True, True]
        with pytest.raises(StopTraining, match="a stop was requested before"):
            await session.or_stop(value)


async def raise_error(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("body_fails", [False, True])
@pytest.mark.parametrize("is_task", [False, True])
async def test_an_error_beside_the_block_goes_before_that_of_the_body(
    is_task: bool, body_fails: bool
) -> None:
    keeps, hook, error, body = KeepsCoord(), RecordingHook("a"), ValueError("first"), KeyError()
    with pytest.raises(ValueError, match="first") as caught:
        async with counting(keeps, hook) as session:
            if is_task:
                keeps.coord.start_soon(raise_error, error)
            else:
                keeps.coord.request_stop(error)
            await settle()
            if body_fails:
                raise body
            for wait in (session.or_stop(anyio.sleep_forever), session.run("calls")):
                with pytest.raises(StopTraining):
                    await wait
    assert caught.value is error
    assert hook.errors == [error]
    if body_fails:
        assert error.__context__ is body
    else:
        assert moments_of(hook)[-2:] == ["end", "on_error"]


async def test_sessions_open_and_close_in_any_order_and_task() -> None:
    first, second = (counting() for _ in range(2))
    await first.__aenter__()
    with anyio.CancelScope():
        await second.__aenter__()
    await first.__aexit__(None, None, None)
    for call in (second.run, second.__aexit__):
        async with anyio.create_task_group() as group:
            group.start_soon(call, *(["calls"] if call == second.run else [None] * 3))
    assert first.should_stop()
    assert second.should_stop()


def test_the_signature_of_run_shows_what_a_caller_gives() -> None:
    parameters = list(inspect.signature(MonitoredSession.run).parameters)
    assert parameters == ["self", "fetches", "feed_dict", "options", "run_metadata"]
