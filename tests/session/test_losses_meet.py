"""A loss of the shared raw session that meets another loss, an end, a stop, or an input."""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    Coordinator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.checkpoints import CheckpointDirectory, StateDictSaver
from asynchooks.data import prefetch

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


async def run_once(session: MonitoredSession, has_run: anyio.Event, may_leave: anyio.Event) -> None:
    """Make one step, and end when that may be."""
    async with session:
        await session.run([])
        has_run.set()
        await may_leave.wait()


async def test_a_clean_end_is_one_also_where_the_successor_is_replaced_meanwhile() -> None:
    model, hook = Model(), WaitsInSuccessor()
    has_run, may_leave = anyio.Event(), anyio.Event()
    creator = SharedSessionCreator(model.step)
    session = MonitoredSession([hook], creator)

    async with MonitoredSession([], creator) as other, anyio.create_task_group() as group:
        group.start_soon(run_once, session, has_run, may_leave)
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
    hook.session = MonitoredSession([hook], creator)

    async with MonitoredSession([], creator) as other, anyio.create_task_group() as group:
        group.start_soon(run_once, hook.session, has_run, may_leave)
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


class Created(SessionRunHook):
    """Counts the raw sessions that its session has had."""

    num = 0

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.num += 1


class OpensSlowly(SessionRunHook):
    """Its session opens until it may go on; others cannot open or recover meanwhile."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = anyio.Event(), anyio.Event()

    async def begin(self) -> None:
        self.is_there.set()
        await self.may_go_on.wait()


@pytest.mark.parametrize("goes_on", ["the same worker", "another worker"])
async def test_a_recovery_that_is_cancelled_as_it_waits_does_not_forget_the_loss(
    goes_on: str,
) -> None:
    model, slow, mine, others = Model(), OpensSlowly(), Created(), Created()
    creator = SharedSessionCreator(model.step)

    async def open_slowly() -> None:
        async with MonitoredSession([slow], creator):
            pass

    async with (
        MonitoredSession([others], creator) as other,
        MonitoredSession([mine], creator, step_runner="inline") as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(open_slowly)
        await slow.is_there.wait()
        lost, model.loses = session.raw_session(), True
        with anyio.CancelScope() as scope:
            group.start_soon(_cancel_later, scope)
            await session.run([])
        slow.may_go_on.set()
        first = session if goes_on == "the same worker" else other
        await first.run([])
        assert first.raw_session() is not lost
        assert (mine.num, others.num) == ((2, 1) if first is session else (1, 2))


@pytest.mark.parametrize("goes_on", ["a run", "the end"])
async def test_a_loss_that_a_cancelled_call_finds_is_a_loss(goes_on: str, tmp_path: Path) -> None:
    weights, may_end, has_ended = np.zeros(1), threading.Event(), threading.Event()

    def step() -> dict[str, Any]:
        weights[0] += 1
        if weights[0] == 3 and not has_ended.is_set():
            assert may_end.wait(20)
            weights[0] = -100
            has_ended.set()
            raise PreemptionError("the machine went away")
        return {}

    saver = CheckpointSaverHook(tmp_path, save_steps=1, saver=StateDictSaver(w={"w": weights}))
    async with MonitoredSession(
        [saver], step, step_runner="thread", stop_grace_period_secs=0.01
    ) as session:
        for _ in range(2):
            await session.run([])
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:
                group.start_soon(_cancel_later, scope)
                await session.run([])
        may_end.set()
        await anyio.to_thread.run_sync(has_ended.wait)
        if goes_on == "a run":
            await session.run([])
            assert (weights[0], session.global_step.value) == (3, 3)
    expected = [0, 1, 2, 3] if goes_on == "a run" else [0, 1, 2]  # what is lost is not saved
    assert [each.step for each in CheckpointDirectory(tmp_path).checkpoints()] == expected


async def _cancel_later(scope: anyio.CancelScope) -> None:
    await settle()
    scope.cancel()


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


async def test_an_after_close_that_hangs_holds_a_cancelled_session_for_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    class Closes(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            seen.append("closed")

    class Hangs(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        hooks = [Hangs(), Closes()]
        async with MonitoredSession(hooks, Model().step, stop_grace_period_secs=0.05):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert seen == ["closed"]
    assert "after_close of Hangs took longer than the grace period" in caplog.text


async def test_an_after_close_of_a_clean_end_may_take_longer_than_the_grace_period() -> None:
    seen: list[str] = []

    class Uploads(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            await anyio.sleep(0.02)
            seen.append("uploaded")

    async with MonitoredSession([Uploads()], Model().step, stop_grace_period_secs=0):
        pass
    assert seen == ["uploaded"]


class Gates:
    """What two workers wait for."""

    def __init__(self) -> None:
        self.begins_again, self.step_is_made = anyio.Event(), anyio.Event()
        self.has_item = anyio.Event()


class FirstWorker(SessionRunHook):
    """Its run is made again after a loss, once the other worker has made its step."""

    def __init__(self, gates: Gates) -> None:
        self.gates, self.num_runs = gates, 0

    async def before_run(self, run_context: SessionRunContext) -> None:
        self.num_runs += 1
        if self.num_runs == 5:
            self.gates.begins_again.set()
            await self.gates.step_is_made.wait()


class OtherWorker(SessionRunHook):
    """Its step is made while the first one's run is made again; its run does not end."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self.gates.begins_again.wait()

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.gates.step_is_made.set()
        await anyio.sleep_forever()


async def train_life(directory: Path, loses: list[int]) -> list[int]:
    """The items of one life, which ends after the run behind a loss if there is one."""
    weights, gates, is_first = np.zeros(6), Gates(), bool(loses)

    def step(x: int) -> dict[str, Any]:
        if x in loses:
            loses.remove(x)
            raise PreemptionError("the machine went away")
        weights[x] += 1
        return {}

    creator, source = SharedSessionCreator(step), prefetch(range(6), 1)
    saver = StateDictSaver(weights={"w": weights})
    hooks = [
        CheckpointSaverHook(directory, save_steps=2, saver=saver),
        InputPositionHook(source),
        *([FirstWorker(gates)] if is_first else []),
    ]

    async def help_out() -> None:
        async with MonitoredSession([OtherWorker(gates)], creator) as session:
            async for x in session.batches(source):
                gates.has_item.set()
                await session.run([], {"x": x})

    async with anyio.create_task_group() as group:
        async with MonitoredSession(hooks, creator) as session:
            async for x in session.batches(source):
                if is_first and x == 3:
                    group.start_soon(help_out)
                    await gates.has_item.wait()
                await session.run([], {"x": x})
                if is_first and x == 3:
                    group.cancel_scope.cancel()  # as a process ends
                    break
            if is_first:
                await anyio.sleep_forever()
    return [int(each) for each in weights]


async def test_an_item_whose_step_is_made_before_the_position_goes_back_is_trained_once(
    tmp_path: Path,
) -> None:
    assert await train_life(tmp_path, [3]) == [1, 1, 0, 1, 1, 0]
    assert await train_life(tmp_path, []) == [1] * 6
