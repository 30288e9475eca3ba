"""StopAtStepHook and GlobalStepWaiterHook on real graphs, with one and with many workers."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    GlobalStepWaiterHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)

from .models import ChiefSessionCreator, Model, Moments, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

LAST_STEP = 200


def shared(model: Model, num_workers: int | None = None) -> SharedSessionCreator:
    with model.graph.as_default():
        return SharedSessionCreator(ChiefSessionCreator(), num_workers)


def failing_model() -> tuple[Model, Any, tuple[Any, Any]]:
    """(A model, what to feed, ops that fail before and after they move the step, if fed NaN)."""
    model = counting_model()
    with model.graph.as_default():
        x = v1.placeholder_with_default(tf.constant(1.0), [])
        with tf.control_dependencies([v1.debugging.check_numerics(x, "x is bad")]):
            before = v1.assign_add(model.step, 1)
        with tf.control_dependencies([model.train_op]):
            after = v1.debugging.check_numerics(x, "x is bad")
    return model, x, (before, after)


async def train(session: MonitoredSession, train_op: object) -> None:
    async with session:
        while not session.should_stop():
            await session.run(train_op)


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", ["inline", "thread"])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 64])
async def test_workers_stop_exactly_at_the_last_step(num_workers: int, runner: str) -> None:
    model = counting_model()
    creator = shared(model, num_workers)
    async with monitored(model.graph, None, creator) as observer:
        async with anyio.create_task_group() as group:
            for _ in range(num_workers):
                hooks = [StopAtStepHook(last_step=LAST_STEP)]
                session = monitored(model.graph, hooks, creator, step_runner=runner)
                group.start_soon(train, session, model.train_op)
        assert observer.raw_session().run(model.step) == LAST_STEP
        assert observer.global_step.value == LAST_STEP
        assert observer.global_step.statistics().tickets == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", ["inline", "thread"])
@pytest.mark.parametrize("num_workers", [2, 8, 64])
async def test_the_stop_is_exact_with_failing_runs_and_cancelled_workers(
    num_workers: int, runner: str
) -> None:
    last_step = 20 * LAST_STEP  # not all are made before the failing workers run
    model, x, failing = failing_model()
    creator = shared(model)

    async def fail(session: MonitoredSession, op: object) -> None:
        async with session:
            await session.run(model.train_op)
            with pytest.raises(tf.errors.InvalidArgumentError, match="x is bad"):
                await session.run(op, {x: float("nan")})

    async def be_cancelled(session: MonitoredSession, at: int) -> None:
        async def watch() -> None:
            await observer.global_step.wait_for(at)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await train(session, model.train_op)
            group.cancel_scope.cancel()

    async with monitored(model.graph, None, creator) as observer:
        async with anyio.create_task_group() as workers:
            for number in range(num_workers):
                hooks = [StopAtStepHook(last_step=last_step)]
                session = monitored(model.graph, hooks, creator, step_runner=runner)
                workers.start_soon(train, session, model.train_op)
                if number < 4:
                    other = monitored(model.graph, hooks, creator, step_runner=runner)
                    workers.start_soon(fail, other, failing[number % 2])
                    late = monitored(model.graph, hooks, creator, step_runner=runner)
                    workers.start_soon(be_cancelled, late, 100 + 10 * number)
        assert observer.raw_session().run(model.step) == last_step
        assert observer.global_step.statistics().tickets == 0


async def test_only_runs_that_move_the_step_count() -> None:
    model = counting_model()
    runs = 0
    async with monitored(model.graph, [StopAtStepHook(num_steps=3)]) as session:
        while not session.should_stop():
            await session.run(model.train_op if runs % 2 else model.step)
            runs += 1
        assert session.global_step.value == 3
    assert runs == 6


async def test_where_the_step_is_there_already_nothing_is_run() -> None:
    model = counting_model()
    runs: list[object] = []
    async with monitored(model.graph, None, shared(model)) as observer:
        await observer.run(model.train_op)
    hooks = [Moments(after_run=lambda *_: runs.append(1)), StopAtStepHook(last_step=0)]
    async with monitored(model.graph, hooks) as session:
        assert session.should_stop()
        await session.run(model.train_op)
    assert runs == []


async def test_waiters_start_at_their_steps_while_the_first_trains() -> None:
    model = counting_model()
    started: dict[int, int] = {}
    creator = shared(model, 5)

    async def wait_and_train(at: int) -> None:
        def note(context: object) -> None:
            started.setdefault(at, session.global_step.value)

        hooks = [GlobalStepWaiterHook(at), Moments(before_run=note), StopAtStepHook(last_step=60)]
        session = monitored(model.graph, hooks, creator, step_runner="inline")
        await train(session, model.train_op)

    async with anyio.create_task_group() as group:
        for at in (0, 10, 20, 30, 40):
            group.start_soon(wait_and_train, at)
    assert sorted(started) == [0, 10, 20, 30, 40]
    assert all(at <= step <= at + 5 for at, step in started.items()), started
