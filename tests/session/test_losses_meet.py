"""A loss of the shared raw session that meets something else: another loss, an end, a stop."""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    Coordinator,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)

from ..support.helpers import settle

pytestmark = pytest.mark.anyio


class Model:
    """Its next step loses the raw session, where it is told so."""

    loses = False

    def step(self) -> dict[str, Any]:
        if self.loses:
            self.loses = False
            raise PreemptionError("the machine went away")
        return {}


class WaitsInSuccessor(SessionRunHook):
    """Holds the session where it takes up its second raw session."""

    def __init__(self) -> None:
        self.num_created = 0
        self.is_there, self.may_go_on = anyio.Event(), anyio.Event()
        self.has_ended = False

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.num_created += 1
        if self.num_created == 2:
            self.is_there.set()
            await self.may_go_on.wait()

    async def end(self, session: Any) -> None:
        self.has_ended = True


async def test_a_clean_end_is_one_also_where_the_successor_is_replaced_meanwhile() -> None:
    model, hook = Model(), WaitsInSuccessor()
    has_run, may_leave = anyio.Event(), anyio.Event()
    creator = SharedSessionCreator(model.step)

    async def train() -> None:
        async with MonitoredSession([hook], creator) as session:
            await session.run([])
            has_run.set()
            await may_leave.wait()

    async with MonitoredSession([], creator) as other, anyio.create_task_group() as group:
        group.start_soon(train)
        await has_run.wait()
        model.loses = True
        await other.run([])
        may_leave.set()
        await hook.is_there.wait()
        model.loses = True
        await other.run([])
        hook.may_go_on.set()
    assert hook.has_ended
    assert hook.num_created == 3


class Stops(SessionRunHook):
    """Asks for a stop after its run, and looks at the reason in its end."""

    session: MonitoredSession
    seen: Any = None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.request_stop("it is enough")

    async def end(self, session: Any) -> None:
        self.seen = self.session.stop_reason


async def test_the_reason_of_a_stop_stays_where_the_raw_session_was_replaced_before_the_end() -> (
    None
):
    model, hook = Model(), Stops()
    has_run, may_leave = anyio.Event(), anyio.Event()
    creator = SharedSessionCreator(model.step)

    async def train() -> None:
        hook.session = MonitoredSession([hook], creator)
        async with hook.session:
            await hook.session.run([])
            has_run.set()
            await may_leave.wait()

    async with MonitoredSession([], creator) as other, anyio.create_task_group() as group:
        group.start_soon(train)
        await has_run.wait()
        model.loses = True
        await other.run([])
        may_leave.set()
    assert "it is enough" in str(hook.seen)
    assert "it is enough" in str(hook.session.stop_reason)


class LosesOnce(SessionRunHook):
    """Loses the raw session at the next run when it is told so, and says that it is replaced."""

    def __init__(self) -> None:
        self.loses = False
        self.is_replaced = threading.Event()
        self.num_created = 0

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.num_created += 1
        if self.num_created == 2:
            self.is_replaced.set()

    async def before_run(self, run_context: SessionRunContext) -> None:
        if self.loses:
            self.loses = False
            raise PreemptionError("the machine went away")


async def test_a_call_in_a_thread_that_submits_counts_though_its_raw_session_was_replaced() -> None:
    """The call returns an awaitable of its outputs; the limit is reached, and no ticket leaks."""
    loses, has_begun = LosesOnce(), threading.Event()

    async def outputs() -> dict[str, Any]:
        return {}

    def step() -> Awaitable[dict[str, Any]]:
        if threading.current_thread() is not threading.main_thread() and not has_begun.is_set():
            has_begun.set()
            assert loses.is_replaced.wait(20)
        return outputs()

    creator = SharedSessionCreator(step)

    async def train_in_thread() -> None:
        hooks = [StopAtStepHook(last_step=10)]
        async with MonitoredSession(hooks, creator, step_runner="thread") as session:
            while not session.should_stop():
                await session.run([])

    async with (
        MonitoredSession([loses], creator, step_runner="inline") as session,
        anyio.create_task_group() as group,
    ):
        await session.run([])  # alone, so that the stride is known
        group.start_soon(train_in_thread)
        await anyio.to_thread.run_sync(has_begun.wait)
        loses.loses = True
        with pytest.raises(StopTraining):
            while True:
                await session.run([])
                await settle()
    statistics = session.global_step.statistics()
    assert (statistics.value, statistics.tickets) == (10, 0)


async def test_after_close_is_shielded_from_the_cancellation_of_its_block() -> None:
    seen: list[str] = []

    class Closes(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append("closed")

    with anyio.CancelScope() as scope:
        async with MonitoredSession([Closes()], Model().step):
            scope.cancel()
            await anyio.sleep_forever()
    assert seen == ["closed"]
