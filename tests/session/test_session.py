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

from ..support.helpers import KeepsCoord, counting_creator, counting_step, raises_at, settle

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
    fails = raises_at("end", ValueError("in end"))
    hook, raw = RecordingHook("a"), ScriptedSession()
    with pytest.raises(ValueError, match="in end") as caught:
        async with MonitoredSession([fails, hook], ScriptedSessionCreator([raw])):
            pass
    assert ("a", "end") in hook.log
    assert raw.is_closed
    assert "in end of Raises" in caught.value.__notes__


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
    class Stops(KeepsCoord):
        async def before_run(self, run_context: SessionRunContext) -> None:
            run_context.request_stop()

    stops, later = Stops(), RecordingHook("later")
    async with MonitoredSession([stops, later], counting_creator()) as session:
        assert await session.run("calls") == 1
        assert session.should_stop()
        assert not stops.coord.should_stop()
        with pytest.raises(StopTraining, match="no run begins after a stop, by before_run of St"):
            await session.run("calls")
        assert later.log[-1] == ("later", "after_run")
    assert stops.coord.should_stop()


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
    hook, fails = RecordingHook("a"), raises_at("before_run", ValueError("in before_run"))
    async with MonitoredSession([hook, fails], counting_creator()) as session:
        with pytest.raises(ValueError, match="in before_run") as caught:
            await session.run("calls")
        assert not session.should_stop()
    assert ("a", "after_run") not in hook.log
    assert "in before_run of Raises" in caught.value.__notes__
    script = [ValueError("in the step")]
    raw = ScriptedSession(script)
    async with MonitoredSession([hook], ScriptedSessionCreator([raw])) as session:
        with pytest.raises(ValueError, match="in the step"):
            await session.run([])
        assert await session.run([]) == []
    assert hook.log.count(("a", "after_run")) == 1


async def test_a_failing_after_run_skips_later_ones_and_loses_the_stop() -> None:
    class Fails(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            run_context.request_stop()
            raise ValueError("in after_run")

    hook = RecordingHook("a")
    async with MonitoredSession([Fails(), hook], counting_creator()) as session:
        with pytest.raises(ValueError, match="in after_run"):
            await session.run("calls")
        assert not session.should_stop()
    assert ("a", "after_run") not in hook.log


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, StopTraining])
async def test_input_that_ends_in_before_run_ends_training_cleanly(error: type[Exception]) -> None:
    hook = RecordingHook("a")
    async with MonitoredSession(
        [hook, raises_at("before_run", error)], counting_creator()
    ) as session:
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
        async with MonitoredSession([raises_at(moment, error)], counting_creator()) as session:
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


async def test_request_stop_ends_waits_and_refuses_the_next_run() -> None:
    step, calls = counting_step()
    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(StopTraining):
                    await session.global_step.wait_for(100)

            group.start_soon(wait)
            await settle()
            await anyio.to_thread.run_sync(session.request_stop, "enough")
        assert session.should_stop()
        with pytest.raises(StopTraining, match="no run begins after a stop, by .*: enough"):
            await session.run("calls")
    assert calls == []


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


async def fail_by_the_coordinator(session: MonitoredSession, coord: Coordinator) -> None:
    coord.request_stop(ValueError("first"))


async def fail_in_a_task_of_the_coordinator(session: MonitoredSession, coord: Coordinator) -> None:
    coord.start_soon(raise_first)
    await settle()


async def fail_in_a_task_of_the_session(session: MonitoredSession, coord: Coordinator) -> None:
    session.start_soon(raise_first)
    await settle()


async def raise_first() -> None:
    raise ValueError("first")


FAILURES = pytest.mark.parametrize(
    "fail",
    [
        fail_by_the_coordinator, fail_in_a_task_of_the_coordinator, fail_in_a_task_of_the_session,
    ],
)  # fmt: skip


@FAILURES
async def test_an_error_beside_the_block_ends_its_waits_and_leaves_after_every_end(
    fail: Any,
) -> None:
    keeps, hook = KeepsCoord(), RecordingHook("a")
    with pytest.raises(ValueError, match="first") as caught:
        async with MonitoredSession([keeps, hook], counting_creator()) as session:
            await fail(session, keeps.coord)
            with pytest.raises(StopTraining):
                await session.or_stop(anyio.sleep_forever)
            assert session.should_stop()
            with pytest.raises(StopTraining, match="no run begins after a stop"):
                await session.run("calls")
    assert [moment for _, moment in hook.log[-2:]] == ["end", "on_error"]
    assert hook.errors == [caught.value]


@FAILURES
async def test_an_error_beside_the_block_goes_before_that_of_the_body(fail: Any) -> None:
    keeps, hook, body = KeepsCoord(), RecordingHook("a"), KeyError("body")
    with pytest.raises(ValueError, match="first") as caught:
        async with MonitoredSession([keeps, hook], counting_creator()) as session:
            await fail(session, keeps.coord)
            raise body
    assert caught.value.__context__ is body
    assert hook.errors == [caught.value]


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
