"""Graph sessions read the global step when something depends on it, and not before."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    MonitoredSession,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.tf.graph._session import GraphSession

from ..support.helpers import Box, settle
from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    monitored,
    raising,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
RUNNERS = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What each read of a graph's step gave; cleared by tests once their session is open."""
    values: list[int | None] = []
    read_step = GraphSession.read_step

    def counted(self: GraphSession) -> int | None:
        values.append(read_step(self))
        return values[-1]

    monkeypatch.setattr(GraphSession, "read_step", counted)
    return values


@RUNNERS
async def test_without_a_limit_a_waiter_or_a_look_nothing_is_read_until_the_end(
    reads: list[int | None], step_runner: Any
) -> None:
    model = counting_model()
    hook = Moments(before_run=lambda context: None, after_run=lambda context, values: None)
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        reads.clear()
        for _ in range(20):
            await session.run(model.train_op)
            assert not session.should_stop()
        assert reads == []
        step = session.global_step
        assert [step.value, step.value, step.statistics().value] == [20] * 3
        assert reads == [20]
        await session.run(model.train_op)
        assert step.statistics().tickets == 0
        await session.run(model.train_op)
    assert reads == [20, 21, 22]  # statistics read, and what is closed is read before
    assert step.value == 22
    assert reads == [20, 21, 22]


@RUNNERS
async def test_with_a_limit_each_run_is_read_once(
    reads: list[int | None], step_runner: Any
) -> None:
    model = counting_model()
    hook = StopAtStepHook(last_step=5)
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        reads.clear()
        while not session.should_stop():
            await session.run(model.train_op)
            assert session.global_step.value == len(reads)
        assert reads == [1, 2, 3, 4, 5]
        with pytest.raises(StopTraining):
            await session.run(model.train_op)
        assert session.global_step.statistics().stride == 1


@RUNNERS
async def test_the_value_is_right_right_after_every_run(step_runner: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        by_three = v1.assign_add(model.step, 3)
    async with monitored(model.graph, step_runner=step_runner) as session:
        expected = 0
        for run in range(30):
            op, stride = [(model.train_op, 1), (by_three, 3), (model.step, 0)][run % 3]
            await session.run(op)
            expected += stride
            assert session.global_step.value == expected
            assert await session.global_step.wait_for(expected) == expected
        session.raw_session().run(by_three)  # beside the session: read after its next run
        await session.run(model.train_op)
        assert session.global_step.value == expected + 4


@RUNNERS
async def test_hooks_see_the_step_before_and_after_their_run(step_runner: Any) -> None:
    class Looks(SessionRunHook):
        def __init__(self) -> None:
            self.seen: list[int] = []

        async def before_run(self, run_context: SessionRunContext) -> None:
            self.seen.append(run_context.global_step.value)

        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            self.seen.append(run_context.session.global_step.value)

    model, hook = counting_model(), Looks()
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        for _ in range(5):
            await session.run(model.train_op)
    assert hook.seen == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


@RUNNERS
async def test_a_run_that_fails_after_its_train_op_counts(step_runner: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        with tf.control_dependencies([model.train_op]):
            fails = tf.debugging.assert_equal(tf.constant([1, 2])[model.train_op * 0], 2)
    async with monitored(model.graph, step_runner=step_runner) as session:
        await session.run(model.train_op)
        assert session.global_step.value == 1
        with pytest.raises(tf.errors.InvalidArgumentError):
            await session.run(fails)
        assert session.global_step.value == 2
        await session.run(model.train_op)
        assert session.global_step.value == 3
        assert session.global_step.statistics().tickets == 0


@RUNNERS
async def test_a_waiter_beside_is_released_by_the_run_that_brings_its_step(
    reads: list[int | None], step_runner: Any
) -> None:
    model, box = counting_model(), Box()
    async with monitored(model.graph, step_runner=step_runner) as session:

        async def wait() -> None:
            box.value = await session.global_step.wait_for(4)

        reads.clear()
        for _ in range(2):
            await session.run(model.train_op)
        assert reads == []
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await settle()
            assert reads == [2]
            await session.run(model.train_op)
            await settle()
            assert box.value is None
            await session.run(model.train_op)
            await settle()
            assert box.value == 4
        assert reads == [2, 3, 4]
        await session.run(model.train_op)
        assert len(reads) == 3


@RUNNERS
async def test_after_a_recovery_the_step_is_the_new_session_s(
    tmp_path: Any, step_runner: Any
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    hook = Moments(before_run=raising(None, None, aborted()))
    with model.graph.as_default():
        creator = ChiefSessionCreator(checkpoint_dir=str(tmp_path))
    recovery = Recovery(first_pause_secs=0)
    async with monitored(
        model.graph, [hook], creator, step_runner=step_runner, recovery=recovery
    ) as session:
        await session.run(model.train_op)
        await session.run(model.train_op)
        first = session.raw_session()
        await session.run(model.train_op)  # lost before it, with two unread steps
        assert session.raw_session() is not first
        assert (session.global_step.value, session.global_step.epoch) == (11, 1)
        await session.run(model.train_op)
        statistics = session.global_step.statistics()
        assert (statistics.value, statistics.tickets) == (12, 0)


async def work(model: Model, session: MonitoredSession, num_runs: int) -> None:
    async with session:
        for _ in range(num_runs):
            if session.should_stop():
                return
            await session.run(model.train_op)


@RUNNERS
@pytest.mark.parametrize("limit", [None, 30])
async def test_workers_on_a_shared_session_count_every_run(
    reads: list[int | None], step_runner: Any, limit: int | None
) -> None:
    model = counting_model()
    shared = SharedSessionCreator(ChiefSessionCreator())
    hooks = [] if limit is None else [StopAtStepHook(last_step=limit)]
    async with monitored(model.graph, [], shared) as first:
        reads.clear()
        others = [monitored(model.graph, hooks, shared, step_runner=step_runner) for _ in "abcd"]
        async with anyio.create_task_group() as group:
            for each in others:
                group.start_soon(work, model, each, 20)
        statistics = first.global_step.statistics()
        assert first.raw_session().run(model.step) == statistics.value == (limit or 80)
        assert (statistics.tickets, statistics.tasks_waiting_for_ticket) == (0, 0)
        if limit is None:
            assert len(reads) <= 2  # by this look alone, and by nothing that a worker does
        assert first.global_step.value == (limit or 80)
    assert first.global_step.value == (limit or 80)
