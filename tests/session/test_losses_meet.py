"""A loss of the shared raw session that meets another loss, an end, a stop, or an input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    InputPositionHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import prefetch

from ..support.helpers import in_task, settle
from ..support.moments import HeldStep, at, lost

pytestmark = pytest.mark.anyio


class Model:
    """Its next step loses the raw session, where it is told so."""

    loses = False

    def step(self) -> dict[str, Any]:
        if self.loses:
            self.loses = False
            raise lost()
        return {}

    async def lose_in(self, session: MonitoredSession) -> None:
        self.loses = True
        await session.run([])


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_clean_end_is_one_also_where_the_successor_is_replaced_meanwhile(
    is_stopped: bool,
) -> None:
    """And the reason of a stop stays."""
    model, is_there, may_go_on, has_run, may_leave = Model(), *(anyio.Event() for _ in range(4))
    creator, log = SharedSessionCreator(model.step), list[str]()

    async def created(raw: Any, coord: Any) -> None:
        log.append("created")
        if len(log) == 2:
            is_there.set()
            await may_go_on.wait()

    def after_run(run_context: SessionRunContext, run_values: Any) -> None:
        if is_stopped:
            run_context.request_stop("it is enough")

    hook = at(
        after_create_session=created,
        after_run=after_run,
        end=lambda raw: log.append(f"ended, {session.stop_reason}"),
    )
    session = MonitoredSession([hook], creator)

    async def run_once() -> None:
        async with session:
            await session.run([])
            has_run.set()
            await may_leave.wait()

    async with MonitoredSession([], creator) as other, in_task(run_once):
        await has_run.wait()
        await model.lose_in(other)
        may_leave.set()
        await is_there.wait()
        await model.lose_in(other)
        may_go_on.set()
    assert log[:3] == ["created"] * 3
    assert log[3:] == [f"ended, {session.stop_reason}"]
    assert ("it is enough" in log[3]) == is_stopped


@pytest.mark.parametrize("goes_on", ["the same worker", "another worker"])
async def test_a_recovery_that_is_cancelled_as_it_waits_does_not_forget_the_loss(
    goes_on: str,
) -> None:
    model, is_there, may_go_on = Model(), anyio.Event(), anyio.Event()
    creator, created = SharedSessionCreator(model.step), {"mine": 0, "other": 0}

    def counts(name: str) -> SessionRunHook:
        return at(after_create_session=lambda *_: created.update({name: created[name] + 1}))

    async def begin() -> None:
        is_there.set()  # others cannot open or recover meanwhile
        await may_go_on.wait()

    async def open_slowly() -> None:
        async with MonitoredSession([at(begin=begin)], creator):
            pass

    async with (
        MonitoredSession([counts("other")], creator) as other,
        MonitoredSession([counts("mine")], creator, step_runner="inline") as session,
        in_task(open_slowly),
    ):
        await is_there.wait()
        lost_one = session.raw_session()
        async with anyio.create_task_group() as group:
            group.start_soon(model.lose_in, session)
            await settle()
            group.cancel_scope.cancel()
        may_go_on.set()
        first = session if goes_on == "the same worker" else other
        await first.run([])
        assert first.raw_session() is not lost_one
        assert created == {"mine": 1 + (first is session), "other": 1 + (first is other)}


@pytest.mark.parametrize("goes_on", ["a run", "the end"])
async def test_a_loss_that_a_cancelled_call_finds_is_a_loss(goes_on: str, tmp_path: Path) -> None:
    weights, held = np.zeros(1), HeldStep()

    def step() -> dict[str, Any]:
        weights[0] += 1
        if weights[0] == 3 and not held.ended.is_set():
            held()
            weights[0] = -100
            raise lost()
        return {}

    saver = CheckpointSaverHook(tmp_path, save_steps=1, saver=StateDictSaver(w={"w": weights}))
    async with MonitoredSession(
        [saver], step, step_runner="thread", stop_grace_period_secs=0.01
    ) as session:
        for _ in range(2):
            await session.run([])
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await held.has_begun()
            group.cancel_scope.cancel()
        held.may_end.set()
        while weights[0] != -100:
            await anyio.lowlevel.checkpoint()
        if goes_on == "a run":
            await session.run([])
            assert (weights[0], session.global_step.value) == (3, 3)
    expected = [0, 1, 2, 3] if goes_on == "a run" else [0, 1, 2]  # what is lost is not saved
    assert [each.step for each in CheckpointDirectory(tmp_path).checkpoints()] == expected


async def test_an_after_close_that_hangs_holds_a_cancelled_session_for_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def close(exception: BaseException | None) -> None:
        seen.append("called")
        await anyio.lowlevel.checkpoint()  # shielded from the cancellation of the block
        seen.append("closed")

    hooks = [at(after_close=lambda _: anyio.sleep_forever()), at(after_close=close)]
    with anyio.CancelScope() as scope:
        async with MonitoredSession([hooks[1]], Model().step, stop_grace_period_secs=0.05):
            scope.cancel()
            await anyio.sleep_forever()
    with anyio.CancelScope() as scope:
        async with MonitoredSession(hooks, Model().step, stop_grace_period_secs=0.05):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert seen == ["called", "closed", "called"]  # by the second session the time is over
    assert "after_close of At took longer than the grace period" in caplog.text


async def test_an_after_close_of_a_clean_end_may_take_longer_than_the_grace_period() -> None:
    seen: list[str] = []

    async def upload(exception: BaseException | None) -> None:
        await anyio.sleep(0.02)
        seen.append("uploaded")

    async with MonitoredSession([at(after_close=upload)], dict, stop_grace_period_secs=0):
        pass
    assert seen == ["uploaded"]


async def train_life(directory: Path, loses: list[int]) -> list[int]:
    """The items of one life, which ends after the run behind a loss if there is one.

    The run of the first worker is made again after a loss, once another has made its step, whose
    run does not end.
    """
    weights, is_first = np.zeros(6), bool(loses)
    begins_again, step_is_made, has_item = (anyio.Event() for _ in range(3))
    num_runs = 0

    def step(x: int) -> dict[str, Any]:
        if x in loses:
            loses.remove(x)
            raise lost()
        weights[x] += 1
        return {}

    async def before_first(run_context: Any) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 5:
            begins_again.set()
            await step_is_made.wait()

    async def after_other(run_context: Any, run_values: Any) -> None:
        step_is_made.set()
        await anyio.sleep_forever()

    creator, source = SharedSessionCreator(step), prefetch(range(6), 1)
    saver = StateDictSaver(weights={"w": weights})
    hooks = [CheckpointSaverHook(directory, save_steps=2, saver=saver), InputPositionHook(source)]
    first = [at(before_run=before_first)] if is_first else []

    async def help_out() -> None:
        other = at(before_run=lambda _: begins_again.wait(), after_run=after_other)
        async with MonitoredSession([other], creator) as session:
            async for x in session.batches(source):
                has_item.set()
                await session.run([], {"x": x})

    async with anyio.create_task_group() as group:
        async with MonitoredSession([*hooks, *first], creator) as session:
            async for x in session.batches(source):
                if is_first and x == 3:
                    group.start_soon(help_out)
                    await has_item.wait()
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
