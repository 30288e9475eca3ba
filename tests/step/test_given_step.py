"""Sessions that count on a global step that was given, and one that runs do not move."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.helpers import settle

pytestmark = pytest.mark.anyio


def loss() -> dict[str, float]:
    return {"loss": 0.5}


async def test_a_session_counts_on_the_step_that_its_creator_was_given() -> None:
    step = GlobalStep(7)
    async with MonitoredSession([], FunctionSessionCreator(loss, global_step=step)) as session:
        await session.run("loss")
        assert (step.value, session.global_step.value) == (8, 8)


async def test_several_creators_may_be_given_one_step() -> None:
    step = GlobalStep()
    creators = [FunctionSessionCreator(loss, global_step=step) for _ in range(2)]
    async with MonitoredSession([], creators[0]) as first:
        async with MonitoredSession([], creators[1]) as second:
            await first.run("loss")
            await second.run("loss")
            assert first.global_step.value == step.value == 2
            assert step.statistics().workers_open == 2


def test_a_step_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="global_step is 3; give a GlobalStep, or None"):
        FunctionSessionCreator(loss, global_step=3)  # type: ignore[arg-type]


def test_a_step_says_whether_it_keeps_its_limit() -> None:
    assert GlobalStep(published_only=True).published_only
    assert not GlobalStep().published_only


async def _loss_later() -> dict[str, float]:
    await anyio.lowlevel.checkpoint()
    return loss()


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
@pytest.mark.parametrize(
    "step_fn",
    [loss, _loss_later, lambda: {"loss": 0.5, "global_step": 99}],
    ids=["sync", "async", "counting"],
)
async def test_runs_do_not_move_a_step_that_keeps_its_limit(step_fn: Any, step_runner: Any) -> None:
    step = GlobalStep(published_only=True)
    creator = FunctionSessionCreator(step_fn, global_step=step)
    hooks = [StopAtStepHook(last_step=3)]
    values = []
    async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
        for _ in range(5):
            await session.run("loss")
            values.append(session.global_step.value)
        step.publish(3)
        assert session.should_stop()
        await session.run("loss")
        values.append(99)  # a run at the limit was not refused
    assert values == [0] * 5
    assert step.value == 3


async def test_runs_that_keep_the_limit_are_under_way_together_up_to_it() -> None:
    step, may_end, num_begun = GlobalStep(published_only=True), anyio.Event(), 0

    async def wait() -> dict[str, float]:
        nonlocal num_begun
        num_begun += 1
        await may_end.wait()
        return loss()

    creator = SharedSessionCreator(FunctionSessionCreator(wait, global_step=step))

    async def worker() -> None:
        async with MonitoredSession([StopAtStepHook(last_step=1)], creator) as session:
            while not session.should_stop():
                await session.run("loss")

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(worker)
        await settle()
        assert num_begun == 8
        step.publish(1)
        may_end.set()
    assert num_begun == 8


async def test_a_lost_session_goes_on_from_the_step_that_others_have_moved() -> None:
    step, num_runs, seen = GlobalStep(published_only=True), 0, []

    def lose_once() -> dict[str, float]:
        nonlocal num_runs
        num_runs += 1
        step.publish(num_runs)
        if num_runs == 2:
            raise PreemptionError("lost")
        return {"loss": 0.5, "global_step": 0}

    class Look(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            seen.append(run_context.global_step.value)

    creator = FunctionSessionCreator(lose_once, global_step=step)
    recovery = Recovery(first_pause_secs=0)
    async with MonitoredSession([Look()], creator, recovery=recovery) as session:
        for _ in range(3):
            await session.run("loss")
    assert seen == [1, 3, 4]
