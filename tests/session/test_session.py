"""MonitoredSession: the order of moments, clean and failed ends, stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator, settle

pytestmark = pytest.mark.anyio

Log = list[tuple[str, str]]


async def test_moments_come_in_the_order_of_the_hooks() -> None:
    log: Log = []
    hooks = [RecordingHook("a", log), RecordingHook("b", log)]
    raw = ScriptedSession()
    session = MonitoredSession(hooks, ScriptedSessionCreator([raw]))
    assert log == []
    async with session:
        assert not session.should_stop()
        await session.run([])
        assert session.raw_session() is raw
    moments = ["begin", "after_create_session", "before_run", "after_run", "end"]
    assert log == [(name, moment) for moment in moments for name in ("a", "b")]
    assert raw.is_closed
    assert session.raw_session() is None
    assert session.graph is None
    assert session.should_stop()


async def test_a_hook_listed_twice_is_called_twice() -> None:
    hook = RecordingHook("a", fetches="calls")
    async with MonitoredSession(iter([hook, hook]), counting_creator()) as session:
        await session.run("calls")
    moments = ["begin", "after_create_session", "before_run", "after_run", "end"]
    assert hook.log == [("a", moment) for moment in moments for _ in range(2)]
    assert hook.results == [1, 1]


async def test_an_error_in_the_block_leaves_without_end_and_with_on_error_in_reverse() -> None:
    log: Log = []
    hooks = [RecordingHook("a", log), RecordingHook("b", log)]
    raw = ScriptedSession()
    session = MonitoredSession(hooks, ScriptedSessionCreator([raw]))
    error = ValueError("in the block")
    with pytest.raises(ValueError, match="in the block") as caught:
        async with session:
            log.clear()
            raise error
    assert caught.value is error
    assert log == [("b", "on_error"), ("a", "on_error")]
    assert hooks[0].errors == [error]
    assert raw.is_closed
    assert session.should_stop()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_interrupts_leave_without_end(error: type[BaseException]) -> None:
    hook = RecordingHook("a")
    with pytest.raises(error):
        async with MonitoredSession([hook], counting_creator()):
            raise error
    assert hook.log[-1] == ("a", "on_error")


@pytest.mark.parametrize("error", [StopTraining, StopIteration, StopAsyncIteration])
async def test_what_only_ends_training_is_swallowed_and_end_is_called(
    error: type[Exception],
) -> None:
    hook = RecordingHook("a")
    async with MonitoredSession([hook], counting_creator()):
        raise error
    assert hook.log[-1] == ("a", "end")


async def test_a_subclass_of_what_ends_training_is_an_error() -> None:
    class Special(StopTraining):
        pass

    hook = RecordingHook("a")
    with pytest.raises(Special):
        async with MonitoredSession([hook], counting_creator()):
            raise Special
    assert hook.log[-1] == ("a", "on_error")


async def test_end_of_later_hooks_runs_when_an_earlier_end_fails() -> None:
    class FailsAtEnd(SessionRunHook):
        async def end(self, session: Any) -> None:
            raise ValueError("in end")

    hook, raw = RecordingHook("a"), ScriptedSession()
    with pytest.raises(ValueError, match="in end") as caught:
        async with MonitoredSession([FailsAtEnd(), hook], ScriptedSessionCreator([raw])):
            pass
    assert ("a", "end") in hook.log
    assert raw.is_closed
    assert "in end of FailsAtEnd" in caught.value.__notes__


async def test_close_in_the_block_ends_once() -> None:
    hook = RecordingHook("a")
    async with MonitoredSession([hook], counting_creator()) as session:
        await session.close()
        assert session.should_stop()
        with pytest.raises(RuntimeError, match=r"Session is already closed\."):
            await session.close()
        with pytest.raises(RuntimeError, match="Session is already closed"):
            await session.run("calls")
    assert hook.log.count(("a", "end")) == 1


async def test_in_end_the_session_is_still_open() -> None:
    seen = []

    class Looks(SessionRunHook):
        async def end(self, session: Any) -> None:
            seen.append(session.is_closed)

    raw = ScriptedSession()
    async with MonitoredSession([Looks()], ScriptedSessionCreator([raw])):
        pass
    assert seen == [False]
    assert raw.is_closed


async def test_a_hook_s_stop_completes_its_run_and_refuses_the_next() -> None:
    class Stops(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            run_context.request_stop()

        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            self.coord = coord

    stops, later = Stops(), RecordingHook("later")
    async with MonitoredSession([stops, later], counting_creator()) as session:
        assert await session.run("calls") == 1
        assert session.should_stop()
        assert not stops.coord.should_stop()
        with pytest.raises(StopTraining, match="no run begins after a stop, by before_run of St"):
            await session.run("calls")
        assert later.log[-1] == ("later", "after_run")
    assert stops.coord.should_stop()


async def test_a_stop_of_the_coordinator_refuses_runs_until_it_is_cleared() -> None:
    class Keeps(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            self.coord = coord

    hook = Keeps()
    async with MonitoredSession([hook], counting_creator()) as session:
        hook.coord.request_stop()
        assert session.should_stop()
        with pytest.raises(StopTraining, match="no run begins after a stop, by the coordinator"):
            await session.run("calls")
        hook.coord.clear_stop()
        assert not session.should_stop()
        assert await session.run("calls") == 1


async def test_the_same_context_goes_to_before_run_and_after_run() -> None:
    contexts: list[SessionRunContext] = []

    class Keeps(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            contexts.append(run_context)

        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            contexts.append(run_context)
            assert run_values.results is None

    def step(rate: int = 0) -> dict[str, int]:
        return {"rate": rate}

    async with MonitoredSession([Keeps()], FunctionSessionCreator(step)) as session:
        assert await session.run("rate", {"rate": 3}) == 3
    assert contexts[0] is contexts[1]
    assert contexts[0].original_args == SessionRunArgs("rate", {"rate": 3})


async def test_a_failing_before_run_or_step_calls_no_after_run() -> None:
    class Fails(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            raise ValueError("in before_run")

    hook = RecordingHook("a")
    async with MonitoredSession([hook, Fails()], counting_creator()) as session:
        with pytest.raises(ValueError, match="in before_run") as caught:
            await session.run("calls")
        assert not session.should_stop()
    assert ("a", "after_run") not in hook.log
    assert "in before_run of Fails" in caught.value.__notes__
    script = [ValueError("in the step")]
    raw = ScriptedSession(script)
    async with MonitoredSession([hook], ScriptedSessionCreator([raw])) as session:
        with pytest.raises(ValueError, match="in the step"):
            await session.run([])
        assert await session.run([]) == []
    assert hook.log.count(("a", "after_run")) == 1


async def test_a_failing_after_run_skips_later_ones_and_loses_the_stop() -> None:
    class Fails(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            run_context.request_stop()
            raise ValueError("in after_run")

    hook = RecordingHook("a")
    async with MonitoredSession([Fails(), hook], counting_creator()) as session:
        with pytest.raises(ValueError, match="in after_run"):
            await session.run("calls")
        assert not session.should_stop()
    assert ("a", "after_run") not in hook.log


class Raises(SessionRunHook):
    """Raises at one moment."""

    def __init__(self, moment: str, error: type[Exception]) -> None:
        self.moment = moment
        self.error = error

    async def _at(self, moment: str) -> None:
        if moment == self.moment:
            raise self.error

    async def begin(self) -> None:
        await self._at("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self._at("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._at("before_run")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._at("after_run")

    async def end(self, session: Any) -> None:
        await self._at("end")


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, StopTraining])
async def test_input_that_ends_in_before_run_ends_training_cleanly(error: type[Exception]) -> None:
    hook = RecordingHook("a")
    async with MonitoredSession([hook, Raises("before_run", error)], counting_creator()) as session:
        with pytest.raises(StopTraining):
            await session.run("calls")
        await session.run("calls")
        raise AssertionError("not reached")
    assert hook.log[-1] == ("a", "end")
    assert ("a", "after_run") not in hook.log


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, StopTraining])
@pytest.mark.parametrize("moment", ["begin", "after_create_session", "after_run", "end"])
async def test_the_end_of_an_input_where_none_is_read_is_that_hook_s_bug(
    moment: str, error: type[Exception]
) -> None:
    with pytest.raises(RuntimeError, match=f"{moment} of Raises raised .*no input is read there"):
        async with MonitoredSession([Raises(moment, error)], counting_creator()) as session:
            await session.run("calls")


@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_input_that_ends_in_a_sync_step_ends_training_cleanly(step_runner: Any) -> None:
    batches = iter([1, 2])
    creator = FunctionSessionCreator(lambda: {"batch": next(batches)})
    hook, seen = RecordingHook("a"), []
    async with MonitoredSession([hook], creator, step_runner=step_runner) as session:
        while not session.should_stop():
            seen.append(await session.run("batch"))
    assert seen == [1, 2]
    assert hook.log[-1] == ("a", "end")
    assert session.global_step.value == 2


async def test_input_that_ends_in_an_async_step_ends_training_cleanly() -> None:
    async def batches() -> AsyncIterator[int]:
        yield 1
        yield 2

    source = batches()

    async def step() -> dict[str, int]:
        return {"batch": await anext(source)}

    seen = []
    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            seen.append(await session.run("batch"))
    assert seen == [1, 2]


async def test_request_stop_ends_waits_and_lets_run_work() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(StopTraining):
                    await session.global_step.wait_for(100)

            group.start_soon(wait)
            await settle()
            await anyio.to_thread.run_sync(session.request_stop, "enough")
        assert session.should_stop()
        assert await session.run("calls") == 1


async def test_request_stop_before_opening_holds() -> None:
    session = MonitoredSession([], counting_creator())
    session.request_stop()
    async with session:
        assert session.should_stop()


async def test_or_stop_returns_raises_or_ends_with_the_stop() -> None:
    async def value() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    async def fail() -> None:
        raise ValueError("foreign")

    ended = []

    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async with MonitoredSession([], counting_creator()) as session:
        assert await session.or_stop(value) == 7
        with pytest.raises(ValueError, match="foreign"):
            await session.or_stop(fail)
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(StopTraining):
                    await session.or_stop(forever)

            group.start_soon(wait)
            await settle()
            session.request_stop()
        assert ended == [True]
        with pytest.raises(StopTraining):
            await session.or_stop(value)


async def test_or_stop_passes_a_cancellation_on_to_what_it_waits_for() -> None:
    ended = []

    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async with MonitoredSession([], counting_creator()) as session:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.or_stop, forever)
                await settle()
                scope.cancel()
    assert ended == [True]


async def test_an_error_in_a_side_task_stops_the_session_and_leaves_as_itself() -> None:
    error = ValueError("in a side task")

    class Starts(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(self.fail)

        async def fail(self) -> None:
            raise error

    hook = RecordingHook("a")
    session = MonitoredSession([Starts(), hook], counting_creator())
    with pytest.raises(ValueError, match="in a side task") as caught:
        async with session:
            with pytest.raises(StopTraining):
                await session.or_stop(anyio.sleep_forever)
            assert session.should_stop()
            assert await session.run("calls") == 1
    assert caught.value is error
    assert ("a", "end") in hook.log


async def test_the_coordinator_s_error_leaves_with_the_body_s_as_its_context() -> None:
    class Keeps(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            self.coord = coord

    hook, body = Keeps(), KeyError("body")
    with pytest.raises(ValueError, match="coordinator") as caught:
        async with MonitoredSession([hook], counting_creator()):
            hook.coord.request_stop(ValueError("coordinator"))
            raise body
    assert caught.value.__context__ is body


async def test_sessions_open_and_close_in_any_order() -> None:
    first = MonitoredSession([StopAtStepHook(1)], counting_creator())
    second = MonitoredSession([StopAtStepHook(1)], counting_creator())
    await first.__aenter__()
    with anyio.CancelScope():
        await second.__aenter__()
    await first.__aexit__(None, None, None)
    async with anyio.create_task_group() as group:
        group.start_soon(second.run, "calls")
    async with anyio.create_task_group() as group:
        group.start_soon(second.__aexit__, None, None, None)
    assert first.should_stop()
    assert second.should_stop()
