"""session.stop_reason: what ended training, and why."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopReason,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, counting_creator, raises_at, settle

pytestmark = pytest.mark.anyio


class Stops(SessionRunHook):
    def __init__(self, reason: Any = None) -> None:
        self.reason = reason

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.request_stop(self.reason)


class StopsLater(Stops):
    """Another one, which asks second."""


async def test_a_session_whose_block_just_ends_has_no_reason() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        await session.run([])
        assert session.stop_reason is None
    assert session.stop_reason is None


@pytest.mark.parametrize(("given", "why"), [("enough", "enough"), (None, "no reason given")])
async def test_the_hook_that_asked_first_is_named_with_its_reason(
    given: str | None, why: str
) -> None:
    hooks = [Stops(given), StopsLater("too late")]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await session.run([])
        assert session.stop_reason == StopReason("after_run of Stops", why)


async def test_a_reason_that_is_none_is_a_typed_error() -> None:
    with pytest.raises(TypeError, match="give a text, an exception, or nothing"):
        async with MonitoredSession([Stops(3)], counting_creator()) as session:
            await session.run([])


async def test_the_caller_is_named_with_the_first_reason() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        session.request_stop("the user has pressed a key")
        session.request_stop("again")
    assert session.stop_reason == StopReason("session.request_stop", "the user has pressed a key")


async def test_a_thread_that_asks_is_named() -> None:
    class Thread(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            thread = threading.Thread(target=coord.request_stop, name="feeder")
            coord.register_thread(thread)
            thread.start()
            await coord.wait_stopped()

    async with MonitoredSession([Thread()], counting_creator()) as session:
        pass
    assert str(session.stop_reason) == "the coordinator in the thread 'feeder': no reason given"


async def test_an_error_that_leaves_the_block_is_the_reason() -> None:
    error = ValueError("diverged")
    with pytest.raises(ValueError, match="diverged"):
        async with MonitoredSession([], counting_creator()) as session:
            raise error
    assert session.stop_reason == StopReason("the block", repr(error), error)


async def test_the_end_of_the_input_is_the_reason() -> None:
    batches = iter([1])

    def step() -> dict[str, int]:
        return {"batch": next(batches)}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        while True:
            await session.run("batch")
    assert str(session.stop_reason) == "the block: the input ended in the step"


async def test_a_reason_that_a_recovery_forgets_with_its_stop_is_gone() -> None:
    class StopsFirst(KeepsCoord):
        async def before_run(self, run_context: SessionRunContext) -> None:
            if len(self.coords) == 1:
                self.coord.request_stop(reason="of the first")
                assert str(session.stop_reason) == "the coordinator: of the first"

    raws = [ScriptedSession([PreemptionError("lost")]), ScriptedSession()]
    async with MonitoredSession([StopsFirst()], ScriptedSessionCreator(raws)) as session:
        await session.run([])
    assert session.stop_reason is None
    assert [raw.num_runs for raw in raws] == [1, 1]


async def test_the_failure_of_one_worker_reaches_the_others_as_a_stop_with_that_reason() -> None:
    creator = SharedSessionCreator(counting_creator())
    error = ValueError("of the first worker")
    opened = anyio.Event()
    sessions: list[MonitoredSession] = []
    hooks = [RecordingHook(str(i)) for i in range(3)]

    async def waits(i: int, how: str) -> None:
        async with MonitoredSession([hooks[i]], creator) as session:
            sessions.append(session)
            if len(sessions) == 3:
                opened.set()
            if how == "step":
                await session.global_step.wait_for(10**6)
            elif how == "elsewhere":
                await session.or_stop(anyio.sleep_forever)
            else:
                while not session.should_stop():
                    await session.run([])
                    await anyio.lowlevel.checkpoint()

    async def fails() -> None:
        with pytest.raises(ValueError, match="of the first worker") as caught:
            async with MonitoredSession([], creator):
                await opened.wait()
                raise error
        assert caught.value is error

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(fails)
            for i, how in enumerate(["step", "elsewhere", "loop"]):
                group.start_soon(waits, i, how)
    for session, hook in zip(sessions, hooks, strict=True):
        assert session.stop_reason == StopReason("the block", repr(error), error)
        assert hook.log[-1][1] == "end"


async def test_a_worker_that_opens_after_another_has_failed_is_stopped_at_once() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as first:
        with pytest.raises(ValueError, match="of the second"):
            async with MonitoredSession([], creator):
                raise ValueError("of the second")
        assert first.should_stop()
        async with MonitoredSession([], creator) as third:
            assert third.should_stop()
            assert third.stop_reason == first.stop_reason
    async with MonitoredSession([], creator) as fourth:  # a new round
        assert not fourth.should_stop()


@pytest.mark.parametrize("moment", ["begin", "end"])
async def test_a_failing_hook_of_one_worker_reaches_the_others(moment: str) -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as session:
        with pytest.raises(ValueError, match="wrong"):
            async with MonitoredSession([raises_at(moment, ValueError("wrong"))], creator):
                pass
        assert session.should_stop()
        with pytest.raises(StopTraining):
            await session.global_step.wait_for(5)


async def test_a_cancelled_worker_has_not_failed() -> None:
    creator = SharedSessionCreator(counting_creator())

    async def worker(scope: anyio.CancelScope) -> None:
        with scope:
            async with MonitoredSession([], creator):
                await anyio.sleep_forever()

    async with MonitoredSession([], creator) as session:
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()
            group.start_soon(worker, scope)
            await settle()
            scope.cancel()
        assert not session.should_stop()
        await session.run([])
